"""An engine that sleeps where a model would compute: fault tests of everything around it.

``rollout.engine=scripted_engine:make`` with this folder on ``PYTHONPATH``. It keeps the contract of
:mod:`tandem.rollout.engine`: tokens depend on (seed, group id, sample, position) alone, spans say
which version "sampled" which, weights are received and checked for real, pause and abort take
effect between two token steps.

A response is the chain that answers a problem of the miniature, right or off by one, in a form
that only a grader process can read (a fraction) half of the time. To a problem of the miniature with a tool it is a
call, sometimes a broken one, or an answer: what a result says, or off by one. The environment variable
``TANDEM_SCRIPTED_STEP_SECONDS`` is the time of one token step, ``TANDEM_SCRIPTED_ROWS`` how many rows run at
a time, and ``TANDEM_SCRIPTED_LENGTHS`` (``mean:limit:spread``) draws the lengths of responses from a
distribution of :class:`tandem.launch.plan.lengths.Lengths`. When it is closed it leaves the mean time that a token
step really took in the folder that ``TANDEM_SCRIPTED_TIMES`` names.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer

from tandem.common.config import LoraConfig, ModelConfig, RolloutConfig
from tandem.common.errors import TandemError, WeightsError
from tandem.common.models import resolve
from tandem.common.records import FinishReason, Sample, Source, Version, VersionSpan
from tandem.common.seeds import keyed_generator
from tandem.launch.plan.lengths import Lengths
from tandem.rollout.engine import (
    EngineStats,
    FinishedGroup,
    GroupRequest,
    ParameterSpec,
    StagedWeights,
)

STEP_SECONDS = "TANDEM_SCRIPTED_STEP_SECONDS"
ROWS = "TANDEM_SCRIPTED_ROWS"
LENGTHS = "TANDEM_SCRIPTED_LENGTHS"
TIMES = "TANDEM_SCRIPTED_TIMES"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHAIN = re.compile(r"(\d\d)((?:[+-]\d)+)=")
_PRODUCT = re.compile(r"(\d+)\*(\d+)=\?")
_RESULT = re.compile(r"<tool_response>\s*(\d+)")


def make(
    model: ModelConfig, rollout: RolloutConfig, *, max_rows: int, lora: LoraConfig | None = None
) -> ScriptedEngine:
    """The factory that ``rollout.engine`` names."""
    del rollout
    folder = Path(resolve(model.path))
    specs = read_specs(folder)
    return ScriptedEngine(
        specs=specs if lora is None else adapters_of(specs, lora.rank),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        step_seconds=float(os.environ.get(STEP_SECONDS, "0.008")),
        max_rows=int(os.environ.get(ROWS, max_rows)),
        lengths=read_lengths(os.environ.get(LENGTHS, "")),
    )


def read_lengths(text: str) -> Lengths | None:
    """``mean:limit:spread``; None of an empty text."""
    if not text:
        return None
    mean, limit, spread = text.split(":")
    return Lengths(mean=float(mean), limit=int(limit), spread=float(spread))


def read_specs(folder: Path) -> list[ParameterSpec]:
    """Every parameter, from the headers of a model's files; nothing is loaded."""
    specs = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                header = file.get_slice(name)
                specs.append(
                    ParameterSpec(
                        name=name,
                        shape=tuple(header.get_shape()),
                        dtype=DTYPES[header.get_dtype()],
                    )
                )
    return specs


def adapters_of(specs: list[ParameterSpec], rank: int) -> list[ParameterSpec]:
    """The adapters of every matrix of the miniature but its embeddings."""
    return [
        ParameterSpec(name=name, shape=shape, dtype=spec.dtype)
        for spec in specs
        if spec.name.endswith("_proj.weight")
        for name, shape in (
            (spec.name.replace(".weight", ".lora_A.weight"), (rank, spec.shape[1])),
            (spec.name.replace(".weight", ".lora_B.weight"), (spec.shape[0], rank)),
        )
    ]


@dataclass(slots=True, eq=False)
class _Row:
    """One sample in the making."""

    tokens: np.ndarray
    """``[L]`` all that it will say."""
    logprobs: np.ndarray
    """``[L]`` NaN over the prefix."""
    text: str
    """What the grader reads, once it is whole."""
    reason: FinishReason
    """How it ends by itself."""
    prefix: int
    """Tokens that somebody else wrote."""
    length: int = 0
    """Tokens so far."""
    spans: list[tuple[Version, int, int]] = field(default_factory=list)
    """Version, start and end, the last one growing."""

    @property
    def done(self) -> bool:
        return self.length >= len(self.tokens)

    def advance(self, version: Version | None) -> None:
        at = self.length
        self.length += 1
        if version is None:
            return
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], at + 1)
        else:
            self.spans.append((version, at, at + 1))


@dataclass(slots=True, eq=False)
class _Running:
    """A group in the engine."""

    request: GroupRequest
    deliver: Callable[[_Running], None]
    rows: list[_Row] = field(default_factory=list)
    error: str | None = None


class ScriptedEngine:
    """See the module."""

    keyed_noise = True

    def __init__(
        self,
        *,
        specs: list[ParameterSpec],
        tokenizer: Tokenizer,
        step_seconds: float,
        max_rows: int = 256,
        lengths: Lengths | None = None,
    ) -> None:
        self._specs = specs
        self._tokenizer = tokenizer
        self._end = int(tokenizer.token_to_id("<eos>") or tokenizer.token_to_id("<|im_end|>"))
        self._step_seconds = step_seconds
        self._max_rows = max_rows
        self._lengths = lengths
        self._version: Version | None = None
        self._weights: dict[str, Any] = {}
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        # Held during a token step: whoever has it is between two of them.
        self._between = asyncio.Lock()
        self._paused = False
        self._held = False
        self._sampled = self._steps = self._loads = 0
        self._busy = 0.0

    @property
    def version(self) -> Version | None:
        """Version of the weights in use."""
        return self._version

    async def start(self) -> None:
        """Starts stepping."""
        self._task = asyncio.create_task(self._run())

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group as it finishes."""
        if self._task is None:
            raise TandemError("the engine isn't running: start() it first")
        arrived: asyncio.Queue[_Running] = asyncio.Queue()
        known = {group.request.group_id for group in (*self._running.values(), *self._waiting)}
        for request in requests:
            if request.group_id in known:
                raise ValueError(f"group {request.group_id} is already running")
            known.add(request.group_id)
        self._waiting.extend(_Running(request, arrived.put_nowait) for request in requests)
        self._wake.set()
        left = {request.group_id for request in requests}
        try:
            while left:
                group = await arrived.get()
                left.discard(group.request.group_id)
                yield self._present(group)
        finally:
            if left:
                self._abort(left)

    async def abort(self, group_ids: Iterable[str]) -> None:
        """Ends groups at the next token step."""
        wanted = set(group_ids)
        async with self._between:
            self._abort(wanted)

    async def pause(self) -> None:
        """Returns once no token step runs."""
        async with self._between:
            self._paused = True

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""
        self._paused = False
        self._wake.set()

    async def hold(self, seconds: float) -> None:
        """Lets no group begin until the next load; returns when no sample runs, or after ``seconds``."""
        self._held = True
        until = time.monotonic() + seconds
        while self._running and not self._paused and time.monotonic() < until:
            await asyncio.sleep(self._step_seconds)

    async def load(self, state: StagedWeights, version: Version) -> None:
        """Copies the weights, between two token steps."""
        self._held = False
        self._wake.set()
        async with self._between:
            new = dict(state.tensors())
            for spec in self._specs:
                tensor = new.get(spec.name)
                found = None if tensor is None else (tuple(tensor.shape), _dtype(tensor))
                if found != (spec.shape, spec.dtype):
                    raise WeightsError(
                        f"weights {version} don't fit the engine: {spec.name} is {found}, not "
                        f"{(spec.shape, spec.dtype)}"
                    )
            unknown = sorted(new.keys() - {spec.name for spec in self._specs})
            if unknown:
                raise WeightsError(
                    f"weights {version} don't fit the engine: unknown {', '.join(unknown[:3])}"
                )
            self._weights = {name: tensor.clone() for name, tensor in new.items()}
            self._loads += 1
            self._version = version

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use."""
        async with self._between:
            self._version = version

    def parameter_specs(self) -> list[ParameterSpec]:
        """Every parameter that :meth:`load` expects."""
        return list(self._specs)

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(
            sampled_tokens=self._sampled,
            decode_steps=self._steps,
            busy_seconds=self._busy,
            loads=self._loads,
            running_rows=self._rows(),
            waiting_groups=len(self._waiting),
        )

    async def close(self) -> None:
        """Aborts what runs and stops stepping."""
        self._abort({group.request.group_id for group in (*self._running.values(), *self._waiting)})
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if TIMES in os.environ and self._steps:
            Path(os.environ[TIMES], str(os.getpid())).write_text(str(self._busy / self._steps))

    # Stepping.

    async def _run(self) -> None:
        while True:
            if self._paused or not (self._running or (self._waiting and not self._held)):
                self._wake.clear()
                await self._wake.wait()
                continue
            async with self._between:
                if self._paused:
                    continue
                began = time.monotonic()
                self._admit()
                await asyncio.sleep(self._step_seconds)
                self._step()
                self._busy += time.monotonic() - began
            # A lock that is taken again at once would leave the others no turn.
            await asyncio.sleep(0)

    def _rows(self) -> int:
        return sum(not row.done for group in self._running.values() for row in group.rows)

    def _admit(self) -> None:
        while (self._waiting and not self._held) and (
            not self._running or self._rows() + self._waiting[0].request.count <= self._max_rows
        ):
            group = self._waiting.popleft()
            group.rows = [self._script(group.request, i) for i in range(group.request.count)]
            self._running[group.request.group_id] = group

    def _step(self) -> None:
        self._steps += 1
        for group in list(self._running.values()):
            for row in group.rows:
                if not row.done:
                    row.advance(self._version)
                    self._sampled += 1
            if all(row.done for row in group.rows):
                del self._running[group.request.group_id]
                group.deliver(group)

    def _abort(self, group_ids: set[str]) -> None:
        for group_id in group_ids & self._running.keys():
            group = self._running.pop(group_id)
            group.deliver(group)
        for group in [g for g in self._waiting if g.request.group_id in group_ids]:
            self._waiting.remove(group)
            group.rows = [self._script(group.request, i) for i in range(group.request.count)]
            group.deliver(group)

    # What is said.

    def _script(self, request: GroupRequest, index: int) -> _Row:
        noise = keyed_generator(request.seed, "scripted", request.group_id, index)
        prompt = self._tokenizer.decode(request.prompt_tokens.tolist(), skip_special_tokens=True)
        said, text = respond(prompt, noise)
        encoded = self._tokenizer.encode(said, add_special_tokens=False).ids
        most = request.sampling.max_new_tokens
        if self._lengths is not None:
            wanted = int(self._lengths.draw(1, 1, int(noise.integers(2**32)))[0, 0])
            # One token more comes at the end.
            encoded = list(np.resize(np.array(encoded), wanted - 1))
        own = np.array([*encoded, self._end][:most], dtype=np.int32)
        prefix = request.prefix(index)
        tokens = np.concatenate([prefix, own]).astype(np.int32)
        logprobs = np.full(len(tokens), np.nan, np.float32)
        logprobs[len(prefix) :] = -noise.exponential(0.3, len(own))
        whole = len(encoded) < most
        return _Row(
            tokens=tokens,
            logprobs=logprobs,
            text=text if whole else said,
            reason=FinishReason.STOP if whole else FinishReason.LENGTH,
            prefix=len(prefix),
            length=len(prefix),
        )

    def _present(self, group: _Running) -> FinishedGroup:
        request = group.request
        samples = []
        for row in group.rows:
            source = np.full(row.length, int(Source.OWN), np.uint8)
            source[: row.prefix] = int(request.prefix_source)
            samples.append(
                Sample(
                    tokens=row.tokens[: row.length],
                    source=source,
                    logprobs=row.logprobs[: row.length],
                    spans=tuple(
                        VersionSpan(term=v.term, step=v.step, start=start, end=end)
                        for v, start, end in row.spans
                    ),
                    finish_reason=row.reason if row.done else FinishReason.ABORT,
                    sampling=request.sampling,
                    text=row.text if row.done else "",
                    reward=None,
                    verdict=None,
                    components={},
                    extracted=None,
                    grader=None,
                )
            )
        return FinishedGroup(group_id=request.group_id, samples=tuple(samples), error=group.error)


def respond(prompt: str, noise: np.random.Generator) -> tuple[str, str]:
    """A response as the tokenizer can say it, and as the grader is to read it."""
    if product := _PRODUCT.search(prompt):
        said = _turn(prompt, product, noise)
        return said, said
    match = _CHAIN.search(prompt)
    total = int(match[1]) if match else 0
    chain = f"{total:02d}"
    for operand in re.findall(r"[+-]\d", match[2]) if match else ():
        total = (total + int(operand)) % 100
        chain += f"{operand}={total:02d}"
    answer = (total + int(noise.integers(0, 2))) % 100
    head = f"{chain}</think> <answer> \\boxed{{"
    factor = int(noise.integers(2, 10_000))
    in_words = (
        f"{answer:02d}" if noise.random() < 0.5 else f"\\frac{{{answer * factor}}}{{{factor}}}"
    )
    return f"{head}{answer:02d}}} </answer>", f"{head}{in_words}}} </answer>"


def _turn(prompt: str, product: re.Match[str], noise: np.random.Generator) -> str:
    """A turn of an episode with a calculator."""
    if result := _RESULT.search(prompt):
        return f"\n\\boxed{{{int(result[1]) + int(noise.integers(0, 2))}}}"
    if noise.random() < 0.2:
        return f"\n\\boxed{{{noise.integers(10_000, 100_000)}}}"
    call = f'{{"name": "multiply", "arguments": {{"a": {product[1]}, "b": {product[2]}}}}}'
    return f"\n<tool_call>\n{call if noise.random() < 0.9 else call[:-1]}\n</tool_call>"


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
