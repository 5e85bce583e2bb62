"""New weights for a running vLLM: pausing it, loading them between two token steps, naming them.

vLLM's workers map new weights in shared memory before they load them::

    check names and shapes -> map them in every rank -> [wait for running samples]
      -> pause, keeping them -> load in every rank -> name the version -> drop cached keys -> resume

A failure before "load" leaves everything as it was. A later one leaves the engine paused for good,
since it may hold half of two versions: :meth:`VllmWeights.load` raises something other than
``WeightsError``, and its caller ends the process.

Versions of vLLM that don't report which weights sampled which tokens (before 0.32) return an output
each step (see :mod:`.vllm_requests`), and the tokens are counted while the engine is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ...common.errors import TandemError, WeightsError
from ...common.records import Float32Array, SamplingParams, Version
from ...common.weights.manifest import SegmentPlace, plan
from ...common.weights.shared_memory import Segment, StagedTensors
from ..contract import Response
from ..engine import Likeliest
from . import vllm_requests
from .vllm_extension import Reply
from .vllm_process import VllmProcess

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

RPC_SECONDS = 120.0
"""Deadline for pausing, resuming and the like."""
LOAD_SECONDS = 600.0
"""Deadline for all workers to load a version; ``weights.commit_seconds`` is usually shorter."""
LOOK_SECONDS = 0.1
"""Interval between two looks whether vLLM has died meanwhile."""
QUIET_SECONDS = 0.02
"""If no output has come for this long after a pause, none is on its way any more."""
UNNAMED = "unnamed"
"""vLLM's name for weights that have no version."""


class VllmWeights:
    """Which weights vLLM samples from, and whether it samples. Coroutines run in the front end's loop."""

    def __init__(
        self,
        process: VllmProcess,
        *,
        recompute_kv: bool,
        version: Version | None,
    ) -> None:
        """Doesn't call vLLM yet; the arguments are those of :class:`.vllm_engine.VllmEngine`."""
        self._process = process
        self._recompute = recompute_kv
        self._order: asyncio.Lock | None = None
        self._changing = False
        self.paused = False
        """True between :meth:`pause` and :meth:`resume`."""
        self.broken = ""
        """Why it will never sample again; empty while it works."""
        self.version = version
        """Version of the weights in use."""
        self.versions: dict[str, Version] = {}
        """Versions by the names that vLLM has for them."""
        self.loads = 0
        self.load_seconds = 0.0
        """Seconds in which nothing was sampled because of loads."""
        # Of running requests; empty if vLLM reports by itself which weights sampled what.
        self._says_versions = True
        self._progress: set[vllm_requests.Progress] = set()

    @property
    def admits(self) -> bool:
        """Whether groups may begin now: nothing is paused, and no weights are being changed."""
        return not self.paused and not self._changing

    async def begin(self) -> None:
        """Names the weights with which vLLM has started."""
        self._order = asyncio.Lock()
        self._says_versions = vllm_requests.says_versions(self._process.llm)
        await self._name(self.version)

    async def end(self) -> None:
        """Frees what vLLM holds for this engine alone, once no request runs."""

    def close(self) -> None:
        """Frees what isn't vLLM's, once vLLM is used no more."""

    async def sample(
        self,
        names: list[str],
        gone: Callable[[], bool],
        context: list[int],
        sampling: SamplingParams,
        *,
        count: int,
        room: int,
        **how: Any,
    ) -> list[Response]:
        """Draws samples of one prompt.

        Args:
            names: ids by which vLLM's requests for it can be aborted, the last one's being this one's;
                those of further requests are added.
            gone: whether nobody wants the samples any more.
            context, sampling, count, room, how: see :func:`.vllm_requests.sample`.
        """
        with self._watched(count) as progress:
            # This doesn't wait until the request is registered, so no abort can come between.
            return await vllm_requests.sample(
                self._process.llm,
                names[-1],
                context,
                sampling,
                count=count,
                room=room,
                # Cached keys and values are only valid for their own version.
                salt=label_of(self.version),
                versions=self.versions,
                progress=progress,
                **how,
            )

    async def score(self, name: str, row: Sequence[int], temperature: float) -> Float32Array:
        """Log-probs of a row's tokens; see :func:`.vllm_requests.score`."""
        return await vllm_requests.score(self._process.llm, name, row, temperature, salt=name)

    async def rank(self, name: str, row: Sequence[int], count: int) -> Likeliest:
        """Log-probs of a row's tokens and of the most likely ones; see :func:`.vllm_requests.rank`."""
        return await vllm_requests.rank(self._process.llm, name, row, count, salt=name)

    @contextlib.contextmanager
    def _watched(self, count: int) -> Iterator[vllm_requests.Progress | None]:
        """Records the spans of a running request with ``count`` samples; None if vLLM does so."""
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
        """Undoes :meth:`pause`, unless the weights are broken."""
        async with self._in_order():
            if self.paused and not self.broken:
                await self._thaw()
                self.paused = False

    async def _freeze(self) -> None:
        llm = self._process.llm
        pause = getattr(getattr(llm, "engine_core", None), "pause_scheduler_async", None)
        if pause is None or not self._says_versions:
            # Otherwise without its sleep of 20 ms, which is for callers who need the last step's
            # outputs before it returns.
            pause = llm.pause_generation
        await self._answer(pause(mode="keep", clear_cache=False))

    async def _thaw(self) -> None:
        await self._answer(self._process.llm.resume_generation())

    async def _answer(self, call: Awaitable[T], seconds: float = RPC_SECONDS) -> T:
        """Awaits a call of vLLM's; vLLM itself never ends one that is under way when its engine dies.

        Raises:
            TandemError: vLLM has died.
            TimeoutError: it hasn't answered.
        """
        task = asyncio.ensure_future(call)
        try:
            async with asyncio.timeout(seconds):
                while not (await asyncio.wait([task], timeout=LOOK_SECONDS))[0]:
                    if self._process.llm is None or self._process.llm.errored:
                        raise TandemError("vLLM has died")
            return task.result()
        finally:
            task.cancel()

    async def _name(self, version: Version | None, seconds: float = RPC_SECONDS) -> None:
        """Names the weights of the next step, while no step runs."""
        if self._says_versions:
            label = label_of(version)
            if version is not None:
                self.versions[label] = version
            await self._answer(self._process.llm.update_weight_version(label), seconds)
        elif version is not None:
            await self._quiet()
            for progress in self._progress:
                progress.change(version)
        self.version = version

    async def _quiet(self) -> None:
        """Returns when the outputs of the last step have arrived, while vLLM is paused."""
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

    async def load(self, place: SegmentPlace, count: int, version: Version) -> None:
        """Changes the weights between two token steps.

        Args:
            place: where every rank finds the tensors.
            count: number of tensors.
            version: version of the new weights.

        Raises:
            WeightsError: a rank couldn't map them; nothing was changed.
            TandemError: vLLM may hold only part of them, and is :attr:`broken`.
        """
        async with self._in_order():
            if self.broken:
                raise TandemError(self.broken)
            ticket = f"{version}/{secrets.token_hex(4)}"
            await self._stage(ticket, place, count, version)
            self._changing = True
            before = self.version
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
        """Has every rank map the weights; if one can't, none loads them."""
        try:
            replies = await self._answer(
                self._process.llm.collective_rpc(
                    "tandem_stage", args=(ticket, place.path, place.layout)
                )
            )
            problem = complaint(replies, ticket, count)
        except TandemError:
            raise
        except Exception as error:  # vLLM wraps a rank's exception in one of its own.
            if self._process.llm is None or self._process.llm.errored:
                raise TandemError(f"vLLM has died: {error}") from error
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise WeightsError(f"version {version} can't be read by vLLM: {problem}")

    async def _commit(self, ticket: str, count: int, version: Version) -> None:
        llm: Any = self._process.llm
        # All at once, because each is a round trip; vLLM stays paused throughout, so their order
        # doesn't matter. The last one returns False if running samples keep their keys, which
        # their salt keeps from other requests.
        calls = asyncio.gather(
            llm.collective_rpc("tandem_load", args=(ticket,)),
            self._name(version, LOAD_SECONDS),
            llm.reset_prefix_cache(reset_running_requests=self._recompute),
        )
        replies, _, _ = await self._answer(calls, LOAD_SECONDS)
        if problem := complaint(replies, ticket, count):
            raise TandemError(problem)
        self.loads += 1


@contextlib.contextmanager
def handed_over(tensors: Iterable[tuple[str, Any]]) -> Iterator[SegmentPlace]:
    """Copies tensors into a new segment, where vLLM's ranks can map them, and removes it at the end.

    Raises:
        WeightsError: there is no room for the segment.
    """
    content = [(name, tensor.detach()) for name, tensor in tensors]
    layout = plan(((name, tensor.shape, tensor.dtype) for name, tensor in content), 1 << 30)
    segment = Segment(layout.total_bytes)
    path = str(segment.path)
    try:
        copies = StagedTensors(layout=layout, buffer=segment.buffer, path=path).tensors()
        for (_, tensor), (_, copy) in zip(content, copies, strict=True):
            copy.copy_(tensor)
        yield SegmentPlace(path, layout.text)
    finally:
        segment.close()


def label_of(version: Version | None) -> str:
    """vLLM's name for the weights of a version."""
    return str(version or UNNAMED)


def complaint(replies: Sequence[Reply], ticket: str, count: int) -> str:
    """What is wrong with the ranks' replies to one order; empty if all took all tensors."""
    found = [
        f"rank {rank}: " + (problem or f"took {number} of {count} tensors")
        if answered == ticket
        else f"rank {rank} answered another order"
        for rank, (answered, number, problem) in enumerate(replies)
        if (answered, number, problem) != (ticket, count, "")
    ]
    return "; ".join(found) if replies else "no rank answered"
