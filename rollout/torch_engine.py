"""The torch engine: batched sampling with a key-value cache, in a thread of its own.

One decode thread owns the model. Between two token steps, and only there, it does what it was
asked for meanwhile: take in groups, abort, pause, change the weights. All else (building
samples, decoding text) happens in the caller's thread, beside the next token step.

The life of a row::

    waiting -> running -> done (end token, length, abort) -> dropped from the batch

Done rows keep their place until an eighth of the batch is done: dropping re-indexes the whole
cache. Rows join whenever at least an eighth of the places is free.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from ..common import prompts
from ..common.errors import TandemError, WeightsError
from ..common.records import (
    FinishReason,
    Float32Array,
    Int32Array,
    Sample,
    SamplingParams,
    Source,
    Version,
    VersionSpan,
)
from .decoder import KeyValues, choose
from .engine import (
    EngineStats,
    FinishedGroup,
    GroupRequest,
    ParameterSpec,
    StagedWeights,
)
from .sampling import Noise, draw

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

GROWTH = 64
"""Least number of slots that the cache grows by."""


@dataclass(slots=True)
class _Row:
    """One sample in the making; its tokens stand in the batch's arrays."""

    group: _Running
    """The group that it belongs to."""
    index: int
    """Its place in the group."""
    context: Int32Array
    """``[P + L]`` prompt and prefix."""
    spans: list[tuple[Version, int, int]] = field(default_factory=list)
    """Closed spans: version, start, end, counted in the response."""
    since: int = 0
    """Response position from which the version in use has sampled."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """What a row has made, copied out of the batch."""

    tokens: Int32Array
    """``[L]`` the response, its prefix included."""
    logprobs: Float32Array
    """``[L]`` NaN over the prefix."""
    spans: tuple[VersionSpan, ...]
    """Who sampled what."""
    reason: FinishReason
    """Why it ended."""


@dataclass(slots=True, eq=False)
class _Running:
    """A group in the engine."""

    request: GroupRequest
    """What was asked for."""
    deliver: Callable[[_Running], None]
    """Hands the group to its caller; called once, from the decode thread."""
    finished: dict[int, _Finished] = field(default_factory=dict)
    """Done samples by index."""
    error: str | None = None
    """Why it failed."""


class TorchEngine:
    """An :class:`~tandem.rollout.engine.Engine` on a transformers causal model."""

    keyed_noise = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        recompute_kv: bool = True,
        update_wait: float = 0.0,
        max_rows: int = 256,
        prefill_tokens: int = 16384,
        decoder: str = "auto",
        version: Version | None = None,
    ) -> None:
        """Takes over a model, which must be used by nothing else from here on.

        Args:
            model: a transformers causal model on its device, in the dtype to generate in.
            tokenizer: decodes samples; its end token ends a response.
            recompute_kv: after new weights, compute the keys and values of running rows again.
            update_wait: most seconds that new weights wait for the running samples to end; while
                they wait, no group joins. 0 = they are loaded between two token steps.
            max_rows: most samples generated at a time; bounds the cache's memory.
            prefill_tokens: most padded tokens of one prefill pass; bounds its memory.
            decoder: ``auto``, ``direct`` or ``generic``; see :func:`tandem.rollout.decoder.choose`.
            version: of the model's own weights, where they have one.

        Raises:
            TandemError: the model can't be run.
        """
        self._model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._recompute = recompute_kv
        self._update_wait = update_wait
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._decoder = choose(model, decoder)
        self._device = model.get_input_embeddings().weight.device
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._context = int(
            getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        )
        self._stop = np.array(sorted(prompts.end_tokens(tokenizer, model)), dtype=np.int64)
        self._parameters = dict(model.named_parameters())
        self._version = version

        self._commands: deque[Callable[[], None]] = deque()
        # Weights that wait for the running samples: until when (monotonic), and the load itself.
        self._update: tuple[float, Callable[[], None]] | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._paused = False
        self._closing = False
        self._waiting: deque[_Running] = deque()
        self._groups: dict[str, _Running] = {}

        # The batch: arrays over its rows, in the order of `_rows`.
        self._rows: list[_Row] = []
        self._cache: KeyValues | None = None
        self._noise = Noise()
        self._tokens = np.zeros((0, 0), dtype=np.int64)
        self._logprobs = np.zeros((0, 0), dtype=np.float32)
        self._length = np.zeros(0, dtype=np.int64)
        self._limit = np.zeros(0, dtype=np.int64)
        self._done = np.zeros(0, dtype=bool)
        self._next = torch.zeros(0, dtype=torch.int64)
        self._kinds: list[tuple[SamplingParams, np.ndarray | None]] = []

        self._sampled = 0
        self._prefilled = 0
        self._steps = 0
        self._busy = 0.0
        self._loads = 0

    # What callers see.

    @property
    def version(self) -> Version | None:
        """Version of the weights in use."""
        return self._version

    async def start(self) -> None:
        """Starts the decode thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
            self._thread.start()

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group as it finishes; see :class:`~tandem.rollout.engine.Engine`."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[_Running] = asyncio.Queue()

        def deliver(group: _Running) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, group)
            except RuntimeError:
                # The caller's loop is closed: nobody waits for this group any more.
                log.debug("group %s finished after its caller left", group.request.group_id)

        groups = [_Running(request, deliver) for request in requests]
        await self._ask(lambda: self._submit(groups))
        left = {group.request.group_id for group in groups}
        try:
            while left:
                group = await arrived.get()
                left.discard(group.request.group_id)
                yield self._present(group)
        finally:
            if left and self._thread is not None:
                self._post(lambda: self._abort(left))

    async def abort(self, group_ids: Iterable[str]) -> None:
        """Ends groups at the next token step."""
        wanted = set(group_ids)
        await self._ask(lambda: self._abort(wanted))

    async def pause(self) -> None:
        """Returns once no token step runs."""

        def pause() -> None:
            self._paused = True

        await self._ask(pause)

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""

        def resume() -> None:
            self._paused = False

        await self._ask(resume)

    async def load(self, state: StagedWeights, version: Version) -> None:
        """Changes the weights between two token steps, or once the running samples have ended."""
        answer: Future[None] = Future()

        def wait() -> None:
            due = time.monotonic() + self._update_wait
            self._update = (due, self._command(lambda: self._load(state, version), answer))

        await self._ask(wait)
        await asyncio.wrap_future(answer)

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use."""
        await self._ask(lambda: self._close_spans(version))

    def parameter_specs(self) -> list[ParameterSpec]:
        """Every parameter that :meth:`load` expects; tied ones once."""
        return [
            ParameterSpec(
                name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch.")
            )
            for name, p in self._parameters.items()
        ]

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(
            sampled_tokens=self._sampled,
            prefill_tokens=self._prefilled,
            decode_steps=self._steps,
            busy_seconds=self._busy,
            loads=self._loads,
            running_rows=len(self._rows),
            waiting_groups=len(self._waiting),
        )

    async def close(self) -> None:
        """Aborts what runs and ends the decode thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return

        def close() -> None:
            self._abort(set(self._groups))
            self._closing = True

        self._post(close)
        await asyncio.to_thread(thread.join, 30.0)
        if thread.is_alive():
            log.warning("the decode thread is still in a token step after 30 s; left behind")

    # Handing work to the decode thread.

    @staticmethod
    def _command(work: Callable[[], T], answer: Future[T]) -> Callable[[], None]:
        def command() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever asked is to have it
                answer.set_exception(error)

        return command

    def _post(self, work: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._commands.append(self._command(work, answer))
        self._wake.set()
        return answer

    async def _ask(self, work: Callable[[], T]) -> T:
        if self._thread is None or not self._thread.is_alive():
            raise TandemError("the engine isn't running: start() it first")
        return await asyncio.wrap_future(self._post(work))

    def _present(self, group: _Running) -> FinishedGroup:
        """Builds the samples, in the caller's thread."""
        request = group.request
        if group.error is not None:
            return FinishedGroup(group_id=request.group_id, samples=(), error=group.error)
        ended = [group.finished[i] for i in range(request.count)]
        texts = prompts.decode(self._tokenizer, [row.tokens for row in ended])
        samples = []
        for index, (row, text) in enumerate(zip(ended, texts, strict=True)):
            source = np.full(len(row.tokens), Source.OWN, dtype=np.uint8)
            source[: len(request.prefix(index))] = request.prefix_source
            samples.append(
                Sample(
                    tokens=row.tokens,
                    source=source,
                    logprobs=row.logprobs,
                    spans=row.spans,
                    finish_reason=row.reason,
                    sampling=request.sampling,
                    text=text,
                )
            )
        return FinishedGroup(group_id=request.group_id, samples=tuple(samples))

    # The decode thread.

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._closing:
                while self._commands:
                    self._commands.popleft()()
                self._update_when_due()
                if self._paused or not (self._rows or self._waiting):
                    if not self._closing:
                        self._wake.wait()
                    self._wake.clear()
                    continue
                start = time.perf_counter()
                try:
                    self._admit()
                    if self._rows:
                        self._step()
                except Exception as error:
                    log.exception("a token step failed; its groups are given up")
                    self._fail(f"{type(error).__name__}: {error}")
                self._busy += time.perf_counter() - start
        while self._commands:
            self._commands.popleft()()
        self._update_when_due()

    def _update_when_due(self) -> None:
        """Loads the weights that wait, if nothing runs or they have waited long enough."""
        if self._update is None:
            return
        due, load = self._update
        if not self._rows or self._paused or time.monotonic() >= due:
            self._update = None
            load()

    def _submit(self, groups: list[_Running]) -> None:
        ids = [group.request.group_id for group in groups]
        clash = [i for i in ids if i in self._groups]
        if clash or len(set(ids)) < len(ids):
            raise ValueError(f"group ids that run already, or twice in one call: {clash or ids}")
        for group in groups:
            self._groups[group.request.group_id] = group
            group.error = self._refusal(group.request)
            if group.error is not None or group.request.count == 0:
                self._deliver(group)
            else:
                self._waiting.append(group)

    def _refusal(self, request: GroupRequest) -> str | None:
        """Why a request can't be generated, or None."""
        if len(request.prompt_tokens) == 0:
            return "the prompt has no tokens"
        if isinstance(request.prefix_tokens, tuple) and len(request.prefix_tokens) != request.count:
            return f"{len(request.prefix_tokens)} prefixes for {request.count} samples"
        if request.sampling.max_new_tokens < 1:
            return "max_new_tokens is under 1"
        for index in range(request.count):
            prefix = request.prefix(index)
            for part in (request.prompt_tokens, prefix):
                if len(part) and not 0 <= int(part.min()) <= int(part.max()) < self._vocabulary:
                    return f"a token id is outside the model's {self._vocabulary}"
            if len(prefix) and prefix[-1] in self._stop:
                return "the prefix ends with the end token: nothing is left to sample"
            if request.room(len(prefix)) < 1:
                return f"a prefix of {len(prefix)} tokens, and a response has {request.longest}"
            if len(request.prompt_tokens) + len(prefix) >= self._context:
                return (
                    f"prompt and prefix have {len(request.prompt_tokens)} + {len(prefix)} tokens, "
                    f"and the model's context has {self._context}"
                )
            if not isinstance(request.prefix_tokens, tuple):
                break
        return None

    def _deliver(self, group: _Running) -> None:
        del self._groups[group.request.group_id]
        group.deliver(group)

    def _fail(self, error: str) -> None:
        """Gives up every running group; the batch is empty afterwards."""
        for group in {id(row.group): row.group for row in self._rows}.values():
            if group.request.group_id in self._groups:
                group.error = error
                self._deliver(group)
        self._keep(np.zeros(0, dtype=np.int64))

    # The batch.

    def _admit(self) -> None:
        """Takes waiting groups into the batch, whole, while there is room."""
        if not self._waiting or self._update is not None:
            return
        room = self._max_rows - len(self._rows)
        if self._rows and room * 8 < self._max_rows:
            return
        groups: list[_Running] = []
        while self._waiting and (
            self._waiting[0].request.count <= room or not (self._rows or groups)
        ):
            group = self._waiting.popleft()
            room -= group.request.count
            groups.append(group)
        rows = []
        for group in groups:
            request = group.request
            for index in range(request.count):
                prefix = request.prefix(index)
                context = request.prompt_tokens
                if len(prefix):
                    context = np.concatenate([context, prefix])
                rows.append(_Row(group, index, context, since=len(prefix)))
        if not rows:
            return
        try:
            self._join(rows)
        except Exception:
            # What was taken out of the queue must not be lost with the error.
            known = {id(row) for row in self._rows}
            self._waiting.extendleft(
                group
                for group in reversed(groups)
                if not any(id(row) in known for row in rows if row.group is group)
            )
            if not self._rows:
                failed = self._waiting.popleft()
                failed.error = "the prefill failed; the log has the error"
                self._deliver(failed)
            raise

    def _join(self, rows: list[_Row]) -> None:
        """Prefills rows (each distinct context once) and appends them to the batch."""
        distinct: dict[bytes, int] = {}
        contexts: list[Int32Array] = []
        at = []
        for row in rows:
            key = row.context.tobytes()
            if key not in distinct:
                distinct[key] = len(contexts)
                contexts.append(row.context)
            at.append(distinct[key])
        lengths = np.array([len(row.context) for row in rows], dtype=np.int64)
        budget = np.array([row.group.request.room(row.since) for row in rows])
        limit = np.minimum(lengths + budget, self._context)
        capacity = max(
            min(int(lengths.max()) + GROWTH, int(limit.max())),
            self._tokens.shape[1] if self._rows else 0,
        )
        cache = self._prefill([context[:-1] for context in contexts])
        cache.grow(capacity)
        if len(contexts) < len(rows):
            cache.keep(torch.tensor(at, device=self._device))

        tokens = np.zeros((len(rows), capacity), dtype=np.int64)
        for b, row in enumerate(rows):
            tokens[b, : len(row.context)] = row.context
        logprobs = np.full((len(rows), capacity), np.nan, dtype=np.float32)
        last = torch.from_numpy(tokens[np.arange(len(rows)), lengths - 1]).to(self._device)
        keys = [
            (row.group.request.seed, row.group.request.group_id, row.index, row.since)
            for row in rows
        ]
        if self._rows and self._cache is not None:
            self._grow(capacity)
            self._cache.append(cache)
            self._tokens = np.concatenate([self._tokens, tokens])
            self._logprobs = np.concatenate([self._logprobs, logprobs])
            self._length = np.concatenate([self._length, lengths])
            self._limit = np.concatenate([self._limit, limit])
            self._done = np.concatenate([self._done, np.zeros(len(rows), dtype=bool)])
            self._next = torch.cat([self._next, last])
        else:
            self._cache = cache
            self._tokens, self._logprobs = tokens, logprobs
            self._length, self._limit = lengths, limit
            self._done = np.zeros(len(rows), dtype=bool)
            self._next = last
        self._noise.add(keys)
        self._rows.extend(rows)
        self._sort_kinds()

    def _prefill(self, contexts: list[Int32Array]) -> KeyValues:
        """Keys and values of token lists, in their order; passes are bounded in size."""
        lengths = np.array([len(context) for context in contexts])
        # Whole passes of like lengths; at least one token, so that the cache has a shape.
        order = np.argsort(-lengths, kind="stable")
        width = max(int(lengths.max()), 1)
        parts: list[KeyValues] = []
        start = 0
        while start < len(order):
            longest = max(int(lengths[order[start]]), 1)
            stop = start + max(1, self._prefill_tokens // longest)
            chosen = order[start:stop]
            padded = np.zeros((len(chosen), longest), dtype=np.int64)
            for b, i in enumerate(chosen):
                padded[b, : lengths[i]] = contexts[i]
            part = self._decoder.prefill(
                torch.from_numpy(padded).to(self._device),
                torch.from_numpy(np.maximum(lengths[chosen], 1)).to(self._device),
            )
            self._prefilled += int(lengths[chosen].sum())
            part.grow(width)
            parts.append(part)
            start = stop
        whole = parts[0]
        for part in parts[1:]:
            whole.append(part)
        if not np.array_equal(order, np.arange(len(order))):
            whole.keep(torch.from_numpy(np.argsort(order, kind="stable")).to(self._device))
        return whole

    def _sort_kinds(self) -> None:
        """Which rows share sampling parameters; one kind needs no index."""
        kinds: dict[SamplingParams, list[int]] = {}
        for b, row in enumerate(self._rows):
            kinds.setdefault(row.group.request.sampling, []).append(b)
        self._kinds = (
            [(next(iter(kinds)), None)]
            if len(kinds) == 1
            else [(sampling, np.array(rows)) for sampling, rows in kinds.items()]
        )

    def _grow(self, capacity: int) -> None:
        extra = capacity - self._tokens.shape[1]
        if extra <= 0 or self._cache is None:
            return
        self._tokens = np.pad(self._tokens, ((0, 0), (0, extra)))
        self._logprobs = np.pad(self._logprobs, ((0, 0), (0, extra)), constant_values=np.nan)
        self._cache.grow(capacity)

    def _step(self) -> None:
        """Samples one token for every row."""
        if self._cache is None:
            raise RuntimeError("rows without a cache")
        longest = int(self._length.max())
        if longest >= self._tokens.shape[1]:
            # Geometric, so that copying stays a fraction of the work; no further than needed.
            capacity = max(longest + GROWTH, longest * 3 // 2)
            self._grow(max(longest + 1, min(capacity, int(self._limit.max()))))
        logits = self._decoder.step(self._next, self._length - 1, self._cache)
        tokens, logprobs = self._draw(logits)
        self._next = tokens
        every = np.arange(len(self._rows))
        host = tokens.cpu().numpy()
        self._tokens[every, self._length] = host
        self._logprobs[every, self._length] = logprobs.cpu().numpy()
        self._length += 1
        self._steps += 1
        self._sampled += len(every) - int(self._done.sum())

        stopped = host == self._stop[0] if len(self._stop) == 1 else np.isin(host, self._stop)
        ended = stopped | (self._length >= self._limit)
        ended &= ~self._done
        if ended.any():
            for b in np.flatnonzero(ended).tolist():
                self._finish(b, FinishReason.STOP if stopped[b] else FinishReason.LENGTH)
            self._drop()

    def _draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        uniforms = torch.from_numpy(self._noise.next()).to(self._device)
        (sampling, rows), *others = self._kinds
        if rows is None:
            return draw(logits, sampling, uniforms)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=self._device)
        for kind, members in ((sampling, rows), *others):
            index = torch.from_numpy(members).to(self._device)
            tokens[index], logprobs[index] = draw(logits[index], kind, uniforms[index])
        return tokens, logprobs

    def _finish(self, b: int, reason: FinishReason) -> None:
        """Marks row b done and copies out what it made; delivers its group if that was all."""
        row = self._rows[b]
        self._done[b] = True
        request = row.group.request
        prompt, length = len(request.prompt_tokens), int(self._length[b])
        self._end_span(row, length - prompt)
        self._settle(
            row,
            _Finished(
                tokens=self._tokens[b, prompt:length].astype(np.int32),
                logprobs=self._logprobs[b, prompt:length].copy(),
                spans=tuple(
                    VersionSpan(term=v.term, step=v.step, start=start, end=end)
                    for v, start, end in row.spans
                ),
                reason=reason,
            ),
        )

    def _settle(self, row: _Row, finished: _Finished) -> None:
        group = row.group
        group.finished[row.index] = finished
        if len(group.finished) == group.request.count:
            self._deliver(group)

    def _drop(self) -> None:
        """Leaves done rows out of the batch once they are an eighth of it."""
        done = int(self._done.sum())
        if done * 8 >= len(self._done):
            self._keep(np.flatnonzero(~self._done))

    def _keep(self, rows: np.ndarray) -> None:
        self._rows = [self._rows[b] for b in rows]
        if not self._rows:
            self._cache = None
            self._noise = Noise()
            self._tokens, self._logprobs = self._tokens[:0, :0], self._logprobs[:0, :0]
            self._length, self._limit = self._length[:0], self._limit[:0]
            self._done, self._next = self._done[:0], self._next[:0]
            return
        self._noise.keep(rows)
        self._tokens, self._logprobs = self._tokens[rows], self._logprobs[rows]
        self._length, self._limit = self._length[rows], self._limit[rows]
        self._done = self._done[rows]
        index = torch.from_numpy(rows).to(self._device)
        self._next = self._next[index]
        if self._cache is not None:
            self._cache.keep(index)
        self._sort_kinds()

    def _abort(self, group_ids: set[str]) -> None:
        for b, row in enumerate(self._rows):
            if not self._done[b] and row.group.request.group_id in group_ids:
                self._finish(b, FinishReason.ABORT)
        for group in [g for g in self._waiting if g.request.group_id in group_ids]:
            self._waiting.remove(group)
            for index in range(group.request.count):
                prefix = group.request.prefix(index).astype(np.int32)
                self._settle(
                    _Row(group, index, prefix),
                    _Finished(
                        prefix,
                        np.full(len(prefix), np.nan, dtype=np.float32),
                        (),
                        FinishReason.ABORT,
                    ),
                )
        if self._rows:
            self._drop()

    # Weights.

    def _load(self, state: StagedWeights, version: Version) -> None:
        new = dict(state.tensors())
        missing, unknown = (
            self._parameters.keys() - new.keys(),
            new.keys() - self._parameters.keys(),
        )
        if missing or unknown:
            raise WeightsError(
                f"weights {version} don't fit the engine: missing {sorted(missing)[:3]}, "
                f"unknown {sorted(unknown)[:3]}; is it the same model?"
            )
        for name, parameter in self._parameters.items():
            tensor = new[name]
            if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                raise WeightsError(
                    f"weights {version} don't fit the engine: {name} is {tensor.dtype} "
                    f"{tuple(tensor.shape)}, not {parameter.dtype} {tuple(parameter.shape)}"
                )
        for name, parameter in self._parameters.items():
            parameter.copy_(new[name])
        self._loads += 1
        self._close_spans(version)
        if self._recompute and self._rows:
            self._recompute_cache()

    def _close_spans(self, version: Version) -> None:
        """Names the weights in use; running rows begin a new span."""
        for b, row in enumerate(self._rows):
            if not self._done[b]:
                self._end_span(row, int(self._length[b]) - len(row.group.request.prompt_tokens))
        self._version = version

    def _end_span(self, row: _Row, end: int) -> None:
        if self._version is not None and end > row.since:
            row.spans.append((self._version, row.since, end))
        row.since = end

    def _recompute_cache(self) -> None:
        """Keys and values of all running rows under the weights in use, by one prefill."""
        if self._done.any():
            self._keep(np.flatnonzero(~self._done))
        if not self._rows or self._cache is None:
            return
        capacity = self._cache.capacity
        self._cache = None  # Its memory is free for the new one.
        self._cache = self._prefill(
            [
                self._tokens[b, : length - 1].astype(np.int32)
                for b, length in enumerate(self._length)
            ]
        )
        self._cache.grow(capacity)
