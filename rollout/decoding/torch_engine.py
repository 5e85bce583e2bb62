"""The torch engine: batched sampling with a key-value cache, in a thread of its own.

One decode thread owns the model. Between two token steps, and only there, it does what it was
asked to do: take in groups, abort, pause, change the weights. Everything else (building samples,
decoding text) happens in the caller's thread, in parallel with the next token step.

A group waits, joins the :mod:`.batch` as a whole when at least an eighth of the places is free,
and is delivered when the last of its rows has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ...common.agreement import untried_lengths
from ...common.config.learner import LoraConfig
from ...common.errors import OutOfMemoryError, TandemError
from ...common.memory import is_out_of_memory, what_was_asked
from ...common.records import Float32Array, Int32Array, Version
from ..contract import NOTHING, Response, Running, enter, fitting, ids_of, refusal, stream
from ..engine import (
    EngineStats,
    FinishedGroup,
    GroupRequest,
    Likeliest,
    ParameterSpec,
    StagedWeights,
)
from ..model_facts import facts_of
from . import adapters
from .batch import Batch, Row, rows_of
from .choice import choose
from .scoring import rank, score

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

URGENT_ROWS = 8
"""Places beyond ``max_rows`` for which the cache has room, so that it isn't copied as a whole
when urgent groups join a full batch."""


class TorchEngine:
    """An :class:`~tandem.rollout.engine.Engine` on a transformers causal model."""

    keyed_noise = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        recompute_kv: bool = True,
        max_rows: int = 256,
        decoder: str = "auto",
        version: Version | None = None,
        longest: int | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """Takes over a model, which nothing else may use from here on.

        Args:
            model: a transformers causal model on its device, in the dtype to generate in.
            tokenizer: decodes samples; its end token ends a response.
            recompute_kv: after new weights, compute the keys and values of running rows again.
            max_rows: greatest number of samples generated at a time; bounds the cache's memory.
            decoder: ``auto``, ``direct`` or ``generic``; see :func:`tandem.rollout.decoding.choice.choose`.
            version: version of the model's own weights, if they have one.
            longest: greatest number of tokens of prompt and response that will be asked for; None =
                the model's own limit. Windows of the model that such rows don't reach aren't tested,
                and rows that would reach them are refused.
            lora: ``learner.lora``: new weights are adapters of the model's own.

        Raises:
            ConfigError: the model can't be run, or not with its own log-probs; or it has no such
                layers as ``lora`` names.
        """
        model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._recompute = recompute_kv
        self._max_rows = max_rows
        untried = [] if longest is None else untried_lengths(model, longest)
        context = min(untried, default=None)
        self._facts = facts_of(model, tokenizer, context=context, lora=lora)
        terms = adapters.attach(model, lora) if lora is not None else None
        self._decoder = choose(model, decoder, longest=longest)
        self._device = model.get_input_embeddings().weight.device
        self._batch = Batch(
            self._decoder,
            self._facts,
            self._device,
            max_rows=max_rows + URGENT_ROWS,
            version=version,
        )
        # After the decoder has fused some of them.
        self._parameters: dict[str, torch.Tensor] = (
            dict(model.named_parameters()) if terms is None else adapters.tensors(terms)
        )

        self._commands: deque[Callable[[], None]] = deque()
        # While groups are held back: until when (monotonic) somebody waits for the running samples.
        self._held: tuple[float, Future[None]] | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._paused = False
        self._closing = False
        self._waiting: deque[Running] = deque()
        self._groups: dict[str, Running] = {}
        self._busy = 0.0
        self._loads = 0
        self._load_seconds = 0.0
        self.exhausted: OutOfMemoryError | None = None
        """Why a token step, a load or a score had too little memory; None as long as all had enough."""
        self.broken = ""
        """Why no group will ever be finished again; empty while the engine works."""

    # The interface for callers.

    @property
    def weights_device(self) -> str:
        """The GPU through which new weights may pass on their way to host memory."""
        return str(next(iter(self._parameters.values())).device)

    @property
    def version(self) -> Version | None:
        """Version of the weights in use."""
        return self._batch.version

    @property
    def context(self) -> int:
        """Greatest number of tokens of prompt and response together."""
        return self._facts.context

    async def start(self) -> None:
        """Starts the decode thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
            self._thread.start()

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group as it finishes; see :class:`~tandem.rollout.engine.Engine`."""
        return stream(Running, requests, self._take_in, self._leave, self._tokenizer)

    async def _take_in(self, groups: list[Running]) -> None:
        await self._ask(lambda: self._submit(groups))

    def _leave(self, groups: set[Running]) -> None:
        if self._thread is not None:
            self._post(lambda: self._abort(ids_of(groups, self._groups)))

    async def abort(self, group_ids: Iterable[str]) -> None:
        """Ends groups at the next token step."""
        wanted = set(group_ids)
        await self._ask(lambda: self._abort(wanted), anyway=True)

    async def score(
        self, rows: Sequence[Int32Array], temperature: float = 1.0
    ) -> list[Float32Array]:
        """Log-probs of tokens; see :class:`~tandem.rollout.engine.Scorer`."""

        def scored() -> list[Float32Array]:
            vocabulary = self._facts.vocabulary
            try:
                return score(self._decoder, rows, temperature, self._device, vocabulary=vocabulary)
            except Exception as error:
                if is_out_of_memory(error):
                    self._exhaust(error)
                raise

        return await self._ask(scored)

    async def rank(self, rows: Sequence[Int32Array], count: int) -> list[Likeliest]:
        """Log-probs of tokens and of others; see :class:`~tandem.rollout.engine.Ranker`."""
        return await self._ask(
            lambda: rank(
                self._decoder, rows, count, self._device, vocabulary=self._facts.vocabulary
            )
        )

    async def pause(self) -> None:
        """Returns once no token step runs."""

        def pause() -> None:
            self._paused = True

        await self._ask(pause)

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""

        def resume() -> None:
            self._paused = False

        await self._ask(resume, anyway=True)

    async def hold(self, seconds: float) -> None:
        """Lets only urgent groups begin until the next load; returns when no other samples run."""
        answer: Future[None] = Future()
        # Whoever is cancelled takes nothing from the decode thread, which answers in any case.
        answer.set_running_or_notify_cancel()

        def hold() -> None:
            self._held = (time.monotonic() + seconds, answer)

        await self._ask(hold)
        await asyncio.wrap_future(answer)

    async def load(self, state: StagedWeights, version: Version) -> None:
        """Changes the weights between two token steps."""
        await self._ask(lambda: self._load(state, version))

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use."""
        await self._ask(lambda: self._batch.restamp(version))

    def parameter_specs(self) -> list[ParameterSpec]:
        """Every parameter that :meth:`load` expects; tied ones once."""
        return list(self._facts.specs)

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(
            sampled_tokens=self._batch.sampled,
            prefill_tokens=self._batch.prefilled,
            decode_steps=self._batch.steps,
            busy_seconds=self._busy,
            loads=self._loads,
            load_seconds=self._load_seconds,
            running_rows=len(self._batch),
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

    def _command(self, work: Callable[[], T], answer: Future[T]) -> Callable[[], None]:
        def command() -> None:
            # From here on the answer can't be cancelled; what nobody waits for any more isn't done.
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001 - passed on to whoever asked
                answer.set_exception(error)
                if _is_of_device(error):
                    self._break(error)

        return command

    def _post(self, work: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._commands.append(self._command(work, answer))
        self._wake.set()
        return answer

    async def _ask(self, work: Callable[[], T], *, anyway: bool = False) -> T:
        """Result of some work of the decode thread; ``anyway``: done even if the caller is cancelled before."""

        def unless_broken() -> T:
            if self.broken:
                raise TandemError(self.broken)
            return work()

        if self._thread is None or not self._thread.is_alive():
            raise TandemError("the engine isn't running: start() it first")
        answer = asyncio.wrap_future(self._post(unless_broken))
        return await (asyncio.shield(answer) if anyway else answer)

    # The decode thread.

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._closing:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - told to all who wait
                    self._break(error)
        while self._commands:
            self._commands.popleft()()
        self._tell_when_ended()

    def _turn(self) -> None:
        """Does what was asked, then a token step, or waits if there is none to do."""
        while self._commands:
            self._commands.popleft()()
        if not self.broken:
            self._tell_when_ended()
        if self.broken or self._paused or not (len(self._batch) or self._may_begin()):
            if not self._closing:
                self._wake.wait()
            self._wake.clear()
            return
        start = time.perf_counter()
        try:
            self._admit()
            if len(self._batch):
                ended = self._batch.step()
                # New weights that wait for this come before the text of the finished samples.
                self._tell_when_ended()
                self._settle(ended)
        except Exception as error:
            if _is_of_device(error):
                raise
            if is_out_of_memory(error):
                self._exhaust(error)
            self._fail(error, "a token step")
        self._busy += time.perf_counter() - start

    def _break(self, error: BaseException) -> None:
        """Gives up for good, and says so to all who wait: nothing else would ever end their waiting."""
        self.broken = f"the decode thread has failed: {type(error).__name__}: {error}"
        log.exception(self.broken)
        if self._held is not None and not self._held[1].done():
            self._held[1].set_exception(TandemError(self.broken))
        self._waiting.clear()
        self._batch.clear()
        for group in list(self._groups.values()):
            group.error = self.broken
            self._deliver(group)

    def _held_bytes(self) -> dict[str, int]:
        """Bytes of the weights, and of the keys and values."""
        return {
            "weights": sum(one.nbytes for one in self._parameters.values()),
            "keys and values": self._batch.cache_bytes,
        }

    def _tell_when_ended(self) -> None:
        """Answers who waits for the running samples, if they have ended or the time is over."""
        if self._held is None or self._held[1].done():
            return
        due, answer = self._held
        waited_for = any(not group.request.urgent for group in self._batch.groups())
        if not waited_for or self._paused or self._closing or time.monotonic() >= due:
            answer.set_result(None)

    def _may_begin(self) -> bool:
        return bool(self._waiting) and (self._held is None or self._waiting[0].request.urgent)

    def _submit(self, groups: list[Running]) -> None:
        enter(groups, self._groups)
        for group in groups:
            group.error = refusal(group.request, self._facts)
            group.refused = group.error is not None
            if group.error is not None or group.request.count == 0:
                self._deliver(group)
            elif group.request.urgent:
                self._waiting.appendleft(group)
            else:
                self._waiting.append(group)

    def _admit(self) -> None:
        """Takes waiting groups into the batch, each as a whole, while there is room."""
        if not self._may_begin():
            return
        running = len(self._batch)
        room = self._max_rows - running
        if running and room * 8 < self._max_rows and not self._waiting[0].request.urgent:
            return
        groups: list[Running] = []
        while self._may_begin() and (
            self._waiting[0].request.urgent
            or self._waiting[0].request.count <= room
            or not (running or groups)
        ):
            group = self._waiting.popleft()
            room -= group.request.count
            groups.append(group)
        if not groups:
            return
        try:
            self._batch.join([row for group in groups for row in rows_of(group)])
        except Exception:
            # Groups that were taken out of the queue must not be lost with the error.
            self._waiting.extendleft(reversed(groups))
            if not running:
                failed = self._waiting.popleft()
                failed.error = "the prefill failed; the log has the error"
                self._deliver(failed)
            raise

    def _settle(self, ended: list[tuple[Row, Response]]) -> None:
        for row, response in ended:
            group = row.group
            group.finished[row.index] = response
            if len(group.finished) == group.request.count:
                self._deliver(group)

    def _deliver(self, group: Running) -> None:
        del self._groups[group.request.group_id]
        group.deliver(group)

    def _exhaust(self, error: Exception) -> None:
        self.exhausted = OutOfMemoryError(what_was_asked(error), self._held_bytes())

    def _fail(self, error: Exception, what: str) -> None:
        """Gives up every running group; the batch is empty afterwards."""
        log.exception(f"{what} failed; the running groups are given up")
        for group in self._batch.groups():
            if group.request.group_id in self._groups:
                group.error = f"{type(error).__name__}: {error}"
                self._deliver(group)
        self._batch.clear()

    def _abort(self, group_ids: set[str]) -> None:
        self._settle(self._batch.abort(lambda row: row.group.request.group_id in group_ids))
        for group in [g for g in self._waiting if g.request.group_id in group_ids]:
            self._waiting.remove(group)
            group.finished.update(dict.fromkeys(range(group.request.count), NOTHING))
            self._deliver(group)

    def _load(self, state: StagedWeights, version: Version) -> None:
        self._held = None
        new = fitting(state.tensors(), self._facts.specs, version)
        since = time.perf_counter()
        for name, tensor in new.items():
            self._parameters[name].copy_(tensor)
        self._loads += 1
        self._batch.restamp(version)
        if self._recompute:
            try:
                self._batch.recompute()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # The weights are whole: only the samples that ran are lost.
                self._exhaust(error)
                self._fail(error, f"recomputing keys and values under {version}")
        self._load_seconds += time.perf_counter() - since


def _is_of_device(error: BaseException) -> bool:
    """Whether an accelerator has failed, after which this process can't use it any more."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
