"""The vLLM engine: the contract of :mod:`..engine` on vLLM's ``AsyncLLM``.

A group is one vLLM request with ``n`` samples, or one request per sample if prefixes differ or
the temperature is 0. Pausing and new weights are in :mod:`.vllm_weights`.

Two things differ from the torch engine. Noise comes from vLLM's own generators, so ``keyed_noise``
is False and a repeated run samples other tokens. A group can't be seen inside vLLM, so
``waiting_groups`` counts only those held back while weights change or the engine is paused, and a
group that waits for a place inside vLLM counts as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from ...common.config.learner import LoraConfig
from ...common.config.rollout import beyond_vllm
from ...common.errors import TandemError
from ...common.records import Float32Array, Int32Array, Version
from ...common.seeds import keyed_seed
from ...common.weights.manifest import SegmentPlace
from ..contract import NOTHING, Running, enter, fitting, ids_of, refusal, stream
from ..engine import (
    EngineStats,
    FinishedGroup,
    GroupRequest,
    Likeliest,
    ParameterSpec,
    StagedWeights,
)
from ..model_facts import ModelFacts
from .vllm_adapters import VllmAdapters
from .vllm_process import VllmProcess
from .vllm_weights import RPC_SECONDS, VllmWeights, handed_over

log = logging.getLogger("tandem.rollout")

LARGE_VOCABULARY = 4096
"""Vocabulary size above which fetching a position's whole distribution is expensive. On a GPU vLLM makes a table of as
many log-probs and token ids, 12 bytes each, for every token of the batch in which one request asks for it: of 2,048
tokens and a vocabulary of 151,936 that is 3.7 GB, twice as much at its peak."""


@dataclass(slots=True, eq=False)
class _Running(Running):
    """A group in the engine; belongs to the front end's thread until it is delivered."""

    names: list[list[str]] = field(default_factory=list)
    """Ids of vLLM's requests, of each one with those that go on with its samples."""
    left: int = 0
    """Number of requests that haven't ended."""
    aborted: bool = False
    """Whether it was aborted, so that requests which haven't begun never will."""


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
        version: Version | None = None,
        owns_process: bool = True,
        lora: LoraConfig | None = None,
        versions: int = 2,
    ) -> None:
        """Doesn't start anything yet.

        Args:
            process: vLLM; used by one engine at a time.
            tokenizer: decodes samples.
            facts: facts about the model that ``process`` loads.
            recompute_kv: whether new weights recompute the keys and values of running samples. Without,
                samples end with the adapter with which they began, if there are adapters.
            version: version of the model's own weights, if they have one.
            owns_process: whether :meth:`close` ends vLLM too.
            lora: ``learner.lora``: new weights are adapters, of which ``facts`` has the tensors.
            versions: number of adapters that samples may use at the same time.
        """
        self._process = process
        self._tokenizer = tokenizer
        self._facts = facts
        self._adapters: VllmAdapters | None = None
        if lora is not None:
            self._adapters = VllmAdapters(
                process,
                lora,
                facts.specs,
                versions=versions,
                recompute_kv=recompute_kv,
                version=version,
            )
        self._weights: VllmWeights = self._adapters or VllmWeights(
            process, recompute_kv=recompute_kv, version=version
        )
        self._owns_process = owns_process
        # A tokenizer may have ids for which the model has no logit; vLLM refuses those.
        self._stop = sorted(t for t in facts.end_tokens if t < facts.vocabulary)

        # Owned by the front end's thread.
        self._groups: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._urgent: set[asyncio.Task[None]] = set()
        self._held: list[_Running] = []
        self._holding = False
        self._requests = 0
        self._busy_since: float | None = None
        self._busy = 0.0
        self._start_counts = (0, 0, 0)

    # What callers see.

    @property
    def weights_device(self) -> str:
        """The device at which buckets of new weights may arrive: the first of the engine's GPUs."""
        return "cuda:0" if torch.cuda.is_available() else "cpu"

    @property
    def version(self) -> Version | None:
        """Version of the weights in use."""
        return self._weights.version

    @property
    def scores_plain(self) -> bool:
        """Whether scoring at a temperature other than 1 is expensive, since it takes whole distributions."""
        return self._facts.vocabulary > LARGE_VOCABULARY

    @property
    def prefix_block(self) -> int:
        """Block size of the prefix cache in tokens; a shorter prompt is never found in it."""
        config = getattr(self._process.llm, "vllm_config", None)
        return int(getattr(getattr(config, "cache_config", None), "block_size", None) or 16)

    @property
    def processes(self) -> list[psutil.Process]:
        """vLLM's processes."""
        return self._process.family

    @property
    def broken(self) -> str:
        """Why the engine will never finish a group again; empty while it works."""
        llm = self._process.llm
        return self._weights.broken or ("vLLM has died" if llm is not None and llm.errored else "")

    @property
    def context(self) -> int:
        """Greatest number of tokens of prompt and response together."""
        return self._facts.context

    async def start(self) -> None:
        """Starts vLLM unless it is running already."""
        if not self._process.started:
            await self._process.start()
        counters = self._process.counters
        self._start_counts = (counters.sampled, counters.prefilled, counters.steps)
        await self._process.run(self._weights.begin())

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group as it finishes; see :class:`~tandem.rollout.engine.Engine`."""
        return stream(_Running, requests, self._take_in, self._leave, self._tokenizer)

    async def _take_in(self, groups: list[_Running]) -> None:
        await self._process.run(self._submit(groups))

    def _leave(self, groups: set[_Running]) -> None:
        async def abort() -> None:
            await self._abort(ids_of(groups, self._groups))

        with contextlib.suppress(TandemError):  # Raised after close, which aborts everything.
            self._process.post(abort())

    async def abort(self, group_ids: Iterable[str]) -> None:
        """Ends groups at the next token step."""
        await self._process.run(self._abort(set(group_ids)))

    async def score(
        self, rows: Sequence[Int32Array], temperature: float = 1.0
    ) -> list[Float32Array]:
        """Log-probs of tokens; see :class:`~tandem.rollout.engine.Scorer`."""
        return await self._process.run(self._score(rows, temperature))

    async def rank(self, rows: Sequence[Int32Array], count: int) -> list[Likeliest]:
        """Log-probs of tokens and of others; see :class:`~tandem.rollout.engine.Ranker`."""
        return await self._process.run(self._rank(rows, count))

    async def pause(self) -> None:
        """Returns once no token step runs."""
        await self._process.run(self._weights.pause())

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""
        await self._process.run(self._resume())

    async def hold(self, seconds: float) -> None:
        """Lets only urgent groups begin until the next load; returns when no other samples run."""
        await self._process.run(self._hold(seconds))

    async def load(self, state: StagedWeights, version: Version) -> None:
        """Changes the weights between two token steps.

        Raises:
            WeightsError: the weights don't fit, or there is no room to hand them over; nothing
                was changed.
            TandemError: vLLM may hold only part of them, and samples no more.
        """
        try:
            tensors = fitting(state.tensors(), self._facts.specs, version)
            if self._adapters is not None:
                await self._process.run(self._adapters.take(tensors, version))
                return
            with contextlib.ExitStack() as stack:
                place = state.place
                if place is None:
                    handing = handed_over(tensors.items())
                    place = await asyncio.to_thread(stack.enter_context, handing)
                await self._process.run(self._load(place, len(tensors), version))
        finally:
            await self._process.run(self._end_hold())

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use."""
        await self._process.run(self._weights.restamp(version))

    def parameter_specs(self) -> list[ParameterSpec]:
        """Every parameter that :meth:`load` expects, tied ones once."""
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
            loads=self._weights.loads,
            load_seconds=self._weights.load_seconds,
            running_rows=sum(
                group.request.count - len(group.finished)
                for group in list(self._groups.values())
                if group.names
            ),
            waiting_groups=len(self._held),
        )

    async def close(self) -> None:
        """Aborts all groups and ends vLLM; leaves none of its processes behind."""
        if self._process.started:
            with contextlib.suppress(TandemError):
                await self._process.run(self._end())
        if self._owns_process:
            await self._process.stop()
        await asyncio.to_thread(self._weights.close)

    # In the front end's thread.

    async def _submit(self, groups: list[_Running]) -> None:
        enter(groups, self._groups)
        for group in groups:
            group.error = refusal(group.request, self._facts) or beyond_vllm(
                "temperature", group.request.sampling.temperature
            )
            group.refused = bool(group.error)
            group.error = group.error or self.broken or None
            if group.error is not None or group.request.count == 0:
                self._deliver(group)
            elif self._may_begin(group):
                self._hand_over(group)
            else:
                self._held.append(group)

    def _let_in(self) -> None:
        """Begins those of the held groups that may begin."""
        for group in [group for group in self._held if self._may_begin(group)]:
            self._held.remove(group)
            self._hand_over(group)

    def _may_begin(self, group: _Running) -> bool:
        return self._weights.admits and (group.request.urgent or not self._holding)

    async def _resume(self) -> None:
        await self._weights.resume()
        self._let_in()

    async def _hold(self, seconds: float) -> None:
        self._holding = True
        samples = self._tasks - self._urgent
        if samples and not self._weights.paused:
            await asyncio.wait(samples, timeout=seconds)

    async def _end_hold(self) -> None:
        self._holding = False
        self._let_in()

    async def _load(self, place: SegmentPlace, count: int, version: Version) -> None:
        try:
            await self._weights.load(place, count, version)
        except BaseException:
            if self._weights.broken:
                await self._abort(set(self._groups))
            raise

    def _hand_over(self, group: _Running) -> None:
        """Gives a group to vLLM."""
        request = group.request
        # A vLLM request has one prompt, and only one sample at temperature 0.
        # A sample that a stop string has ended is aborted alone.
        apart = isinstance(request.prefix_tokens, tuple) or group.stops is not None
        if apart or request.sampling.temperature == 0.0:
            parts = [(request.prefix(i), range(i, i + 1)) for i in range(request.count)]
        else:
            parts = [(request.prefix(0), range(request.count))]
        if self._busy_since is None:
            self._busy_since = time.perf_counter()
        group.left = len(parts)
        for prefix, indices in parts:
            self._requests += 1
            names = [f"{request.group_id}/{self._requests}"]
            group.names.append(names)
            context = [*request.prompt_tokens.tolist(), *prefix.tolist()]
            room = min(self._facts.context - len(context), request.room(len(prefix)))
            task = asyncio.create_task(self._consume(group, names, context, indices, room))
            for tasks in (self._tasks, self._urgent) if request.urgent else (self._tasks,):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _consume(
        self, group: _Running, names: list[str], context: list[int], indices: range, room: int
    ) -> None:
        """Runs one vLLM request to its end, and those that go on with its samples."""
        try:
            if group.aborted:
                group.finished.update(dict.fromkeys(indices, NOTHING))
                return
            ended = await self._weights.sample(
                names,
                lambda: group.aborted or group.error is not None,
                context,
                group.request.sampling,
                count=len(indices),
                room=room,
                least=group.request.shortest,
                end_tokens=self._stop,
                urgent=group.request.urgent,
                stops=group.stops,
                follow=group.request.follow,
                # Never two samples of a request the same.
                seed=None
                if group.request.noise is None
                else keyed_seed(group.request.seed, group.request.noise, indices.start) >> 1,
            )
            group.finished.update(zip(indices, ended, strict=True))
        except asyncio.CancelledError:
            group.error = "the engine was closed"
            raise
        except Exception as error:
            if group.error is None and not self._weights.broken:
                log.exception(f"vLLM gave up group {group.request.group_id}")
            group.error = self._weights.broken or f"{type(error).__name__}: {error}"
            await self._abort_requests(group)
        finally:
            group.left -= 1
            if group.left == 0:
                self._deliver(group)

    async def _score(self, rows: Sequence[Int32Array], temperature: float) -> list[Float32Array]:
        if self.broken:
            raise TandemError(self.broken)
        self._requests += 1
        names = [f"score/{self._requests}/{number}" for number in range(len(rows))]

        async def one(name: str, row: Int32Array) -> Float32Array:
            return await self._weights.score(name, row.tolist(), temperature)

        try:
            if temperature == 1.0:
                return await asyncio.gather(*map(one, names, rows))
            # One at a time, since each returns whole distributions.
            return [await one(name, row) for name, row in zip(names, rows, strict=True)]
        except Exception as error:  # vLLM raises many kinds.
            raise TandemError(f"vLLM couldn't score {len(rows)} rows: {error}") from error

    async def _rank(self, rows: Sequence[Int32Array], count: int) -> list[Likeliest]:
        if self.broken:
            raise TandemError(self.broken)
        self._requests += 1
        names = [f"rank/{self._requests}/{number}" for number in range(len(rows))]
        try:
            return await asyncio.gather(
                *(
                    self._weights.rank(name, row.tolist(), count)
                    for name, row in zip(names, rows, strict=True)
                )
            )
        except Exception as error:  # vLLM raises many kinds.
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
            await llm.abort([name for names in group.names for name in names])

    async def _end(self) -> None:
        await self._abort(set(self._groups))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RPC_SECONDS)
        await self._weights.end()
        if self._weights.paused and not self._owns_process:
            await self._resume()
