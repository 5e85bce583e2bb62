"""A harness of verifiers that fails as it starts, and one that never ends, by the task's name."""

import asyncio

from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harnesses.null.harness import NullHarness


class FailingHarnessConfig(HarnessConfig):
    pass


class FailingHarness(NullHarness):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        if "#sleeps" in (data.name or ""):
            await asyncio.sleep(3600)
        if "#fails" in (data.name or ""):
            raise RuntimeError("planted")
        return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more)


__all__ = ["FailingHarness"]
