"""The weights of a vLLM that samples: pausing it, loading new ones between two token steps, naming them.

New weights lie in shared memory, where vLLM's workers map them, and are loaded between two token
steps::

    check names and shapes -> map them in every rank -> [wait for running samples]
      -> pause, keeping them -> load in every rank -> name the version -> drop cached keys -> resume

Up to "load" a failure leaves everything as it was. A failure from there on leaves the engine
paused for good, since it may hold half of two versions: :meth:`VllmWeights.load` raises something
other than ``WeightsError``, and whoever called it ends the process.

Versions of vLLM that don't say which weights sampled which tokens (before 0.32) are asked for an
output each step (see :mod:`.vllm_requests`); the counts are taken while the engine is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..common.errors import TandemError, WeightsError
from ..common.records import Version
from ..common.weights.manifest import SegmentPlace
from . import vllm_requests
from .vllm_extension import Reply
from .vllm_process import VllmProcess

log = logging.getLogger("tandem.rollout")

RPC_SECONDS = 120.0
"""Deadline for pausing, resuming and the like."""
LOAD_SECONDS = 600.0
"""Deadline for all workers to load a version; ``weights.commit_seconds`` is usually shorter."""
QUIET_SECONDS = 0.02
"""No output has come for so long after a pause: none is on its way any more."""
UNNAMED = "unnamed"
"""What vLLM calls weights that have no version."""


class VllmWeights:
    """Which weights vLLM samples from, and whether it samples. Its coroutines run in the front end's loop."""

    def __init__(
        self,
        process: VllmProcess,
        *,
        recompute_kv: bool,
        update_wait: float,
        version: Version | None,
    ) -> None:
        """Nothing is asked of vLLM yet; the settings are those of :class:`.vllm_engine.VllmEngine`."""
        self._process = process
        self._recompute = recompute_kv
        self._update_wait = update_wait
        self._order: asyncio.Lock | None = None
        self._changing = False
        self.paused = False
        """Between :meth:`pause` and :meth:`resume`."""
        self.broken = ""
        """Why it never samples again; empty where that isn't so."""
        self.version = version
        """Of the weights in use."""
        self.versions: dict[str, Version] = {}
        """By the names that vLLM was told."""
        self.loads = 0
        self.load_seconds = 0.0
        """In which nothing was sampled on account of them."""
        # Of the requests that run, where vLLM doesn't say which weights sampled what.
        self._says_versions = True
        self._progress: set[vllm_requests.Progress] = set()

    @property
    def admits(self) -> bool:
        """Whether groups may begin now: nothing is paused, and no new weights wait for those that run."""
        return not self.paused and not self._changing

    async def begin(self) -> None:
        """Names the weights that vLLM has started with."""
        self._order = asyncio.Lock()
        self._says_versions = vllm_requests.says_versions(self._process.llm)
        await self._name(self.version)

    @contextlib.contextmanager
    def watched(self, count: int) -> Iterator[vllm_requests.Progress | None]:
        """Keeps the spans of a request with ``count`` samples while it runs; None where vLLM does."""
        if self._says_versions:
            yield None
            return
        progress = vllm_requests.Progress(count, self.version)
        self._progress.add(progress)
        try:
            yield progress
        finally:
            self._progress.discard(progress)

    def _in_order(self) -> asyncio.Lock:
        if self._order is None:
            raise TandemError("the engine isn't running: start() it first")
        return self._order

    async def pause(self) -> None:
        """Returns once no token step runs."""
        async with self._in_order():
            if not self.paused:
                self.paused = True
                await self._freeze()

    async def resume(self) -> None:
        """Undoes :meth:`pause`; what is broken stays paused."""
        async with self._in_order():
            if self.paused and not self.broken:
                await self._thaw()
                self.paused = False

    async def _freeze(self) -> None:
        llm = self._process.llm
        pause = getattr(getattr(llm, "engine_core", None), "pause_scheduler_async", None)
        async with asyncio.timeout(RPC_SECONDS):
            if pause is not None and self._says_versions:
                # All that `pause_generation` does but for a sleep of 20 ms, for callers who want the
                # last step's outputs before it returns.
                await pause(mode="keep", clear_cache=False)
            else:
                await llm.pause_generation(mode="keep", clear_cache=False)

    async def _thaw(self) -> None:
        async with asyncio.timeout(RPC_SECONDS):
            await self._process.llm.resume_generation()

    async def _name(self, version: Version | None, seconds: float = RPC_SECONDS) -> None:
        """Says what the weights of the next step are called; no step runs."""
        if self._says_versions:
            label = label_of(version)
            if version is not None:
                self.versions[label] = version
            async with asyncio.timeout(seconds):
                await self._process.llm.update_weight_version(label)
        elif version is not None:
            await self._quiet()
            for progress in self._progress:
                progress.change(version)
        self.version = version

    async def _quiet(self) -> None:
        """Returns when the outputs of the last step have come; vLLM is paused."""
        before: list[list[int]] = []
        while (now := [progress.lengths() for progress in list(self._progress)]) != before:
            before = now
            await asyncio.sleep(QUIET_SECONDS)

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use."""
        async with self._in_order():
            still = not self.paused and bool(self._progress)
            if still:
                await self._freeze()
            await self._name(version)
            if still:
                await self._thaw()

    async def load(
        self,
        place: SegmentPlace,
        count: int,
        version: Version,
        running: Callable[[], Collection[asyncio.Task[None]]],
    ) -> None:
        """Changes the weights between two token steps, or once the running samples have ended.

        Args:
            place: where every rank finds the tensors.
            count: of tensors.
            version: of the new weights.
            running: what ``update_wait`` waits for.

        Raises:
            WeightsError: a rank couldn't map them; nothing was changed.
            TandemError: vLLM may hold half of them, and is :attr:`broken`.
        """
        async with self._in_order():
            if self.broken:
                raise TandemError(self.broken)
            ticket = f"{version}/{secrets.token_hex(4)}"
            await self._stage(ticket, place, count, version)
            self._changing = True
            before = self.version
            if self._update_wait and not self.paused and (samples := running()):
                await asyncio.wait(samples, timeout=self._update_wait)
            try:
                if not self.paused:
                    await self._freeze()
                since = time.perf_counter()
                await self._commit(ticket, count, version)
                if not self.paused:
                    await self._thaw()
                self.load_seconds += time.perf_counter() - since
            except BaseException as error:
                self.version = before
                self.broken = (
                    f"version {version} could not be loaded, so the engine may hold half of it: "
                    f"{type(error).__name__}: {error}"
                )
                log.error(self.broken)
                raise TandemError(self.broken) from error
            self._changing = False

    async def _stage(self, ticket: str, place: SegmentPlace, count: int, version: Version) -> None:
        """Every rank maps the weights, or none loads them."""
        try:
            async with asyncio.timeout(RPC_SECONDS):
                replies = await self._process.llm.collective_rpc(
                    "tandem_stage", args=(ticket, place.path, place.nbytes, place.layout)
                )
            problem = complaint(replies, ticket, count)
        except Exception as error:  # vLLM wraps what a rank raises in something of its own.
            if self._process.llm is None or self._process.llm.errored:
                raise TandemError(f"vLLM has died: {error}") from error
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise WeightsError(f"version {version} can't be read by vLLM: {problem}")

    async def _commit(self, ticket: str, count: int, version: Version) -> None:
        llm: Any = self._process.llm
        async with asyncio.timeout(LOAD_SECONDS):
            # At once, because each alone is a trip to vLLM and back; it stays paused through all of
            # them, so their order doesn't matter. The last answers False where samples run and are to
            # keep their keys: their salt keeps others off them.
            replies, _, _ = await asyncio.gather(
                llm.collective_rpc("tandem_load", args=(ticket,)),
                self._name(version, LOAD_SECONDS),
                llm.reset_prefix_cache(reset_running_requests=self._recompute),
            )
        if problem := complaint(replies, ticket, count):
            raise TandemError(problem)
        self.loads += 1


def label_of(version: Version | None) -> str:
    """What vLLM calls the weights of a version."""
    return str(version or UNNAMED)


def complaint(replies: Sequence[Reply], ticket: str, count: int) -> str:
    """What is wrong with the ranks' replies to one order; empty where all took all tensors."""
    found = [
        f"rank {rank}: " + (problem or f"took {number} of {count} tensors")
        if answered == ticket
        else f"rank {rank} answered another order"
        for rank, (answered, number, problem) in enumerate(replies)
        if (answered, number, problem) != (ticket, count, "")
    ]
    return "; ".join(found) if replies else "no rank answered"
