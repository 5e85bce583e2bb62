"""Loads environments once, each in a process like those that will play its episodes, and says which can't be loaded.

It is a program of its own (``python -m tandem.rollout.environments.checking``), so that whatever an environment's module
starts or prints stays out of the process that asks.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from ...common.confinement import adopt_orphans, die_with
from .hosts import Hosts
from .process import Bounds, NotStarted


async def problems(
    use: Mapping[str, Mapping[str, Any]], bounds: Bounds, path: list[str]
) -> dict[str, str]:
    """Why environments can't be loaded, by name; nothing of those that can."""
    found = {}
    hosts = Hosts(use, bounds, len(use), path)
    try:
        for name in use:
            try:
                await hosts.check(name)
            except NotStarted as error:
                found[name] = str(error)
    finally:
        await hosts.close()
    return found


def main() -> int:
    """Reads what to load from standard input, and writes what can't be loaded, both as JSON."""
    die_with(os.getppid())
    adopt_orphans()
    asked = json.load(sys.stdin)
    print(json.dumps(asyncio.run(problems(asked["use"], Bounds(**asked["bounds"]), asked["path"]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
