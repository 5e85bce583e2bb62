"""The vLLM engine: the contract of :mod:`.engine` on vLLM's ``AsyncLLM``.

A group is one vLLM request with ``n`` samples, or a request for each sample where prefixes differ
or nothing is drawn (temperature 0).
New weights lie in shared memory, where vLLM's workers map them, and are loaded between two token
steps::

    check names and shapes -> map them in every rank -> [wait for running samples]
      -> pause, keeping them -> load in every rank -> name the version -> drop cached keys -> resume

Up to "load" a failure leaves everything as it was. A failure from there on leaves the engine
paused for good, since it may hold half of two versions: :meth:`VllmEngine.load` raises something
other than ``WeightsError``, and whoever called it ends the process.

Versions of vLLM that don't say which weights sampled which tokens (before 0.32) are asked for an
output each step (see :mod:`.vllm_requests`); the counts are taken while the engine is paused.

What differs from the torch engine: noise comes from vLLM's own generators, so ``keyed_noise`` is
False and a repeated run samples other tokens. A group isn't seen between its beginning and its
end, so ``waiting_groups`` counts those that are held back while weights change or the engine is
paused, and a group that waits for a place inside vLLM counts as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..common.errors import TandemError, WeightsError
from ..common.records import Float32Array, Int32Array, Version
from ..common.weights.manifest import SegmentPlace
from ..common.weights.staging import handed_over
from . import vllm_requests
from .contract import NOTHING, Running, enter, fitting, refusal, stream
from .engine import EngineStats, FinishedGroup, GroupRequest, ParameterSpec, StagedWeights
from .model_facts import ModelFacts
from .vllm_extension import Reply
from .vllm_process import VllmProcess

log = logging.getLogger("tandem.rollout")

RPC_SECONDS = 120.0
"""Deadline for pausing, resuming and the like."""
LOAD_SECONDS = 600.0
"""Deadline for all workers to load a version; ``weights.commit_seconds`` is usually shorter."""
QUIET_SECONDS = 0.02
"""No output has come for so long after a pause: none is on its way any more."""
DEAR_VOCABULARY = 4096
"""Tokens of a vocabulary from which on a position's whole distribution is dear."""
UNNAMED = "unnamed"
"""What vLLM calls weights that have no version."""


@dataclass(slots=True, eq=False)
class _Running(Running):
    """A group in the engine; belongs to the front end's thread until it is delivered."""

    names: list[str] = field(default_factory=list)
    """vLLM's request ids."""
    left: int = 0
    """Requests that haven't ended."""
    aborted: bool = False
    """It was aborted, so what hasn't begun never will."""


class VllmEngine:
    """An :class:`~tandem.rollout.engine.Engine` on vLLM."""

    keyed_noise = False

    def __init__(
        self,
        process: VllmProcess,
        tokenizer: Any,
        facts: ModelFacts,
        *,
        recompute_kv: bool = True,
        update_wait: float = 0.0,
        version: Version | None = None,
        owns_process: bool = True,
    ) -> None:
        """Nothing is started yet.

        Args:
            process: vLLM; used by one engine at a time.
            tokenizer: decodes samples.
            facts: of the model that ``process`` loads.
            recompute_kv: after new weights, compute the keys and values of running samples again.
            update_wait: most seconds that new weights wait for the running samples to end; while
                they wait, no group joins. 0 = they are loaded between two token steps.
            version: of the model's own weights, where they have one.
            owns_process: :meth:`close` ends vLLM too.
        """
        self._process = process
        self._tokenizer = tokenizer
        self._facts = facts
        self._recompute = recompute_kv
        self._update_wait = update_wait
        self._version = version
        self._owns_process = owns_process
        # vLLM refuses ids that the model has no logit for, which a tokenizer may well have.
        self._stop = sorted(t for t in facts.end_tokens if t < facts.vocabulary)
        self._versions: dict[str, Version] = {}

        # Owned by the front end's thread.
        self._groups: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._urgent: set[asyncio.Task[None]] = set()
        self._held: list[_Running] = []
        self._changing = False
        self._paused = False
        self._broken = ""
        self._requests = 0
        # Of the requests that run, where vLLM doesn't say which weights sampled what.
        self._says_versions = True
        self._progress: set[vllm_requests.Progress] = set()
        self._order: asyncio.Lock | None = None
        self._busy_since: float | None = None
        self._busy = 0.0
        self._loads = 0
        self._load_seconds = 0.0
        self._start_counts = (0, 0, 0)

    # What callers see.

    @property
    def weights_device(self) -> str:
        """Where buckets of new weights may arrive: the first of the engine's GPUs."""
        return "cuda:0" if torch.cuda.is_available() else "cpu"

    @property
    def version(self) -> Version | None:
        """Version of the weights in use."""
        return self._version

    @property
    def scores_plain(self) -> bool:
        """Whether scoring at a temperature other than 1 is dear: whole distributions have to come."""
        return self._facts.vocabulary > DEAR_VOCABULARY

    @property
    def prefix_block(self) -> int:
        """Tokens that the prefix cache keeps together: a shorter prompt is never found in it."""
        config = getattr(self._process.llm, "vllm_config", None)
        return int(getattr(getattr(config, "cache_config", None), "block_size", None) or 16)

    @property
    def broken(self) -> str:
        """Why no group will ever be finished again; empty where that isn't so."""
        llm = self._process.llm
        return self._broken or ("vLLM has died" if llm is not None and llm.errored else "")

    async def start(self) -> None:
        """Starts vLLM, unless somebody has."""
        if not self._process.started:
            await self._process.start()
        counters = self._process.counters
        self._start_counts = (counters.sampled, counters.prefilled, counters.steps)
        await self._process.run(self._begin())

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group as it finishes; see :class:`~tandem.rollout.engine.Engine`."""
        return stream(_Running, requests, self._take_in, self._leave, self._tokenizer)

    async def _take_in(self, groups: list[_Running]) -> None:
        await self._process.run(self._submit(groups))

    def _leave(self, group_ids: set[str]) -> None:
        with contextlib.suppress(TandemError):  # It was closed, which aborts everything.
            self._process.post(self._abort(group_ids))

    async def abort(self, group_ids: Iterable[str]) -> None:
        """Ends groups at the next token step."""
        await self._process.run(self._abort(set(group_ids)))

    async def score(
        self, rows: Sequence[Int32Array], temperature: float = 1.0
    ) -> list[Float32Array]:
        """Log-probs of tokens; see :class:`~tandem.rollout.engine.Scorer`."""
        return await self._process.run(self._score(rows, temperature))

    async def pause(self) -> None:
        """Returns once no token step runs."""
        await self._process.run(self._pause())

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""
        await self._process.run(self._resume())

    async def load(self, state: StagedWeights, version: Version) -> None:
        """Changes the weights between two token steps, or once the running samples have ended.

        Raises:
            WeightsError: the weights don't fit, or there is no room to hand them over; nothing
                was changed.
            TandemError: vLLM may hold half of them, and samples no further token.
        """
        tensors = list(fitting(state.tensors(), self._facts.specs, version).items())
        with contextlib.ExitStack() as stack:
            place = state.place
            if place is None:
                place = await asyncio.to_thread(stack.enter_context, handed_over(tensors))
            await self._process.run(self._load(place, len(tensors), version))

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use."""
        await self._process.run(self._restamp(version))

    def parameter_specs(self) -> list[ParameterSpec]:
        """Every parameter that :meth:`load` expects; tied ones once."""
        return list(self._facts.specs)

    def stats(self) -> EngineStats:
        """Counters since the start."""
        counters, since = self._process.counters, self._busy_since
        sampled, prefilled, steps = self._start_counts
        return EngineStats(
            sampled_tokens=counters.sampled - sampled,
            prefill_tokens=counters.prefilled - prefilled,
            decode_steps=counters.steps - steps,
            busy_seconds=self._busy + (time.perf_counter() - since if since is not None else 0.0),
            loads=self._loads,
            load_seconds=self._load_seconds,
            running_rows=sum(
                group.request.count - len(group.finished)
                for group in list(self._groups.values())
                if group.names
            ),
            waiting_groups=len(self._held),
        )

    async def close(self) -> None:
        """Aborts what runs and ends vLLM; none of its processes is left."""
        if self._process.started:
            with contextlib.suppress(TandemError):
                await self._process.run(self._end())
        if self._owns_process:
            await self._process.stop()

    # In the front end's thread: groups.

    async def _begin(self) -> None:
        self._order = asyncio.Lock()
        self._says_versions = vllm_requests.says_versions(self._process.llm)
        await self._name(self._version)

    async def _submit(self, groups: list[_Running]) -> None:
        enter(groups, self._groups)
        for group in groups:
            group.error = self.broken or refusal(group.request, self._facts)
            if group.error is not None or group.request.count == 0:
                self._deliver(group)
            elif self._paused or self._changing:
                self._held.append(group)
            else:
                self._hand_over(group)

    def _hand_over(self, group: _Running) -> None:
        """Gives a group to vLLM."""
        request = group.request
        # vLLM wants one prompt for all samples, and refuses several that take the likeliest token.
        if isinstance(request.prefix_tokens, tuple) or request.sampling.temperature == 0.0:
            parts = [(request.prefix(i), range(i, i + 1)) for i in range(request.count)]
        else:
            parts = [(request.prefix(0), range(request.count))]
        if self._busy_since is None:
            self._busy_since = time.perf_counter()
        group.left = len(parts)
        for prefix, indices in parts:
            self._requests += 1
            name = f"{request.group_id}/{self._requests}"
            group.names.append(name)
            context = [*request.prompt_tokens.tolist(), *prefix.tolist()]
            room = min(self._facts.context - len(context), request.room(len(prefix)))
            task = asyncio.create_task(self._consume(group, name, context, indices, room))
            for tasks in (self._tasks, self._urgent) if request.urgent else (self._tasks,):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _consume(
        self, group: _Running, name: str, context: list[int], indices: range, room: int
    ) -> None:
        """One vLLM request, to its end."""
        progress = None
        if not self._says_versions:
            progress = vllm_requests.Progress(len(indices), self._version)
            self._progress.add(progress)
        try:
            if group.aborted:
                group.finished.update(dict.fromkeys(indices, NOTHING))
            else:
                # Up to its registration this doesn't wait, so an abort can't come in between.
                ended = await vllm_requests.sample(
                    self._process.llm,
                    name,
                    context,
                    group.request.sampling,
                    count=len(indices),
                    room=room,
                    end_tokens=self._stop,
                    # Keys and values of one version are no good to another.
                    salt=str(self._version or UNNAMED),
                    versions=self._versions,
                    progress=progress,
                    urgent=group.request.urgent,
                )
                group.finished.update(zip(indices, ended, strict=True))
        except asyncio.CancelledError:
            group.error = "the engine was closed"
            raise
        except Exception as error:
            if group.error is None and not self._broken:
                log.exception(f"vLLM gave up group {group.request.group_id}")
            group.error = self._broken or f"{type(error).__name__}: {error}"
            await self._abort_requests(group)
        finally:
            if progress is not None:
                self._progress.discard(progress)
            group.left -= 1
            if group.left == 0:
                self._deliver(group)

    async def _score(self, rows: Sequence[Int32Array], temperature: float) -> list[Float32Array]:
        if self.broken:
            raise TandemError(self.broken)
        self._requests += 1
        names = [f"score/{self._requests}/{number}" for number in range(len(rows))]

        async def one(name: str, row: Int32Array) -> Float32Array:
            return await vllm_requests.score(
                self._process.llm, name, row.tolist(), temperature, salt=name
            )

        try:
            if temperature == 1.0:
                return await asyncio.gather(*map(one, names, rows))
            # One at a time: each brings whole distributions.
            return [await one(name, row) for name, row in zip(names, rows, strict=True)]
        except Exception as error:  # vLLM has many kinds.
            raise TandemError(f"vLLM couldn't score {len(rows)} rows: {error}") from error

    def _deliver(self, group: _Running) -> None:
        del self._groups[group.request.group_id]
        if self._busy_since is not None and not any(g.names for g in self._groups.values()):
            self._busy += time.perf_counter() - self._busy_since
            self._busy_since = None
        group.deliver(group)

    async def _abort(self, group_ids: set[str]) -> None:
        for group in [g for i, g in self._groups.items() if i in group_ids]:
            group.aborted = True
            if group in self._held:
                self._held.remove(group)
                group.finished.update(dict.fromkeys(range(group.request.count), NOTHING))
                self._deliver(group)
            else:
                await self._abort_requests(group)

    async def _abort_requests(self, group: _Running) -> None:
        llm = self._process.llm
        if llm is not None and not llm.errored:
            await llm.abort(group.names)

    async def _end(self) -> None:
        await self._abort(set(self._groups))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RPC_SECONDS)
        if self._paused and not self._owns_process:
            await self._resume()

    # In the front end's thread: pausing and weights.

    def _in_order(self) -> asyncio.Lock:
        if self._order is None:
            raise TandemError("the engine isn't running: start() it first")
        return self._order

    async def _pause(self) -> None:
        async with self._in_order():
            if not self._paused:
                self._paused = True
                await self._freeze()

    async def _resume(self) -> None:
        async with self._in_order():
            if self._paused and not self._broken:
                await self._thaw()
                self._paused = False
                self._let_in()

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

    def _let_in(self) -> None:
        held, self._held = self._held, []
        for group in held:
            self._hand_over(group)

    async def _name(self, version: Version | None, seconds: float = RPC_SECONDS) -> None:
        """Says what the weights of the next step are called; no step runs."""
        if self._says_versions:
            label = str(version or UNNAMED)
            if version is not None:
                self._versions[label] = version
            async with asyncio.timeout(seconds):
                await self._process.llm.update_weight_version(label)
        elif version is not None:
            await self._quiet()
            for progress in self._progress:
                progress.change(version)
        self._version = version

    async def _quiet(self) -> None:
        """Returns when the outputs of the last step have come; vLLM is paused."""
        before: list[list[int]] = []
        while (now := [progress.lengths() for progress in list(self._progress)]) != before:
            before = now
            await asyncio.sleep(QUIET_SECONDS)

    async def _restamp(self, version: Version) -> None:
        async with self._in_order():
            still = not self._paused and bool(self._progress)
            if still:
                await self._freeze()
            await self._name(version)
            if still:
                await self._thaw()

    async def _load(self, place: SegmentPlace, count: int, version: Version) -> None:
        async with self._in_order():
            if self._broken:
                raise TandemError(self._broken)
            ticket = f"{version}/{secrets.token_hex(4)}"
            await self._stage(ticket, place, count, version)
            self._changing = True
            before = self._version
            waited_for = self._tasks - self._urgent
            if waited_for and self._update_wait and not self._paused:
                await asyncio.wait(waited_for, timeout=self._update_wait)
            try:
                if not self._paused:
                    await self._freeze()
                since = time.perf_counter()
                await self._commit(ticket, count, version)
                if not self._paused:
                    await self._thaw()
                self._load_seconds += time.perf_counter() - since
            except BaseException as error:
                self._version = before
                self._broken = (
                    f"version {version} could not be loaded, so the engine may hold half of it: "
                    f"{type(error).__name__}: {error}"
                )
                log.error(self._broken)
                await self._abort(set(self._groups))
                raise TandemError(self._broken) from error
            self._changing = False
            if not self._paused:
                self._let_in()

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
        self._loads += 1


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
