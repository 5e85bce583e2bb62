"""The longest step that a config permits, made once and measured: what ``tandem plan --measure`` shows.

``python -m tandem.learner.measuring`` reads a config in YAML from standard input, makes the engine that a run
would make, as one rank and without Redis, trains two steps on made-up rows, and writes what the second one held
and took as one line of JSON. The first step makes the optimizer's state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..common.config import Config
from ..common.config import build as build_config
from ..common.config.groups import has_groups
from ..common.config.reading.text import parse_yaml
from ..common.errors import OutOfMemoryError, TandemError
from ..common.longest_pass import LongestPass, alone, longest_pass
from ..common.memory import telling_parts
from ..common.records import (
    ExpertTrace,
    FinishReason,
    Group,
    Problem,
    Sample,
    SamplingParams,
    Source,
    Verdict,
    VersionSpan,
)
from .main import build, prepare
from .rendezvous import Seat, process_group
from .rows.groups import MixedGroup
from .updates.updates import Updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank held and took in a step of the largest micro-batch, or of two where an update has several."""

    device: str
    """``cuda`` or ``cpu``."""
    parts: dict[str, int]
    """Bytes by part: ``weights``, ``gradients``, ``optimizer``, ``activations`` (with logits and temporary
    tensors), and ``runtime``: on a CPU the libraries, on a GPU its context and the allocator's slack."""
    offloaded: int
    """Bytes of weights, gradients and optimizer that aren't on the device."""
    peak: int
    """The most that was held, in bytes: the parts together, without those that are offloaded."""
    host: int
    """The most main memory of the process, in bytes."""
    rows: int
    """Rows of the step."""
    row_tokens: int
    """Tokens of each row, prompt and response."""
    micro_batches: int
    """Forward and backward passes of the step."""
    forward_tokens: int
    """Tokens of its forward passes, those of shared prompts once."""
    layout: str
    """How rows are laid out: ``padded``, ``shared`` (rows of a group share their prompt) or ``packed``."""
    seconds: float
    """Duration of the step."""
    applied: bool
    """Whether the loss and its gradient were finite."""


def groups_of_a_pass(config: Config, vocabulary: int, step: int) -> list[MixedGroup]:
    """Made-up groups of these rows, whose rewards differ inside each group.

    Args:
        config: the run's config, with its own number of ranks and mini-batches.
        vocabulary: number of token ids of the model.
        step: step that trains on them.
    """
    wanted = longest_pass(config)
    # Two passes, where an update has several, since the first one's gradients are there in the second. A group of
    # one row may have no advantage.
    passes = 1 if wanted.alone else 2
    count = max(passes * wanted.rows, 2)
    sizes = [
        len(part) for part in np.array_split(range(count), min(passes * wanted.groups, count // 2))
    ]
    generator = np.random.default_rng(config.run.seed)
    return [
        _group_of(config, wanted, number, size, vocabulary, step, generator)
        for number, size in enumerate(sizes)
    ]


def _group_of(
    config: Config,
    wanted: LongestPass,
    number: int,
    size: int,
    vocabulary: int,
    step: int,
    generator: np.random.Generator,
) -> MixedGroup:
    def tokens(count: int) -> Any:
        return generator.integers(0, vocabulary, count).astype(np.int32)

    length = wanted.response
    experts = min(config.expert.per_group, size - 1) if has_groups(config) else size
    sampling = SamplingParams(
        temperature=config.rollout.temperature, top_p=1.0, top_k=0, max_new_tokens=length
    )
    problem = Problem(
        problem_id=f"measured/{number}",
        prompt_text="",
        prompt_tokens=tokens(wanted.prompt),
        gold="",
        data_source="measured",
        ability="",
        trace_ids=(),
        extra={},
    )
    graded: list[dict[str, Any]] = [
        {
            "reward": float(place % 2),
            "verdict": Verdict.CORRECT if place % 2 else Verdict.WRONG,
            "components": {},
            "grader": "",
            "text": "",
        }
        for place in range(size)
    ]
    samples = tuple(
        Sample(
            tokens=tokens(length),
            source=np.full(length, Source.OWN, np.uint8),
            # As of a policy that knows nothing.
            logprobs=np.full(length, -np.log(vocabulary), np.float32),
            spans=(VersionSpan(term=1, step=step - 1, start=0, end=length),),
            finish_reason=FinishReason.STOP,
            sampling=sampling,
            extracted=None,
            **one,
        )
        for one in graded[: size - experts]
    )
    traces = tuple(
        ExpertTrace(
            trace_id=f"measured/{number}#{place}",
            problem_id=problem.problem_id,
            tokens=tokens(length),
            logprobs=None,
            tokenizer_digest="",
            **one,
        )
        for place, one in enumerate(graded[size - experts :])
    )
    group = Group.of(problem, samples, group_id=f"0-{number}", attempt=1, worker="", trace_ids=())
    return MixedGroup(group=group, traces=traces)


def measured_step(updates: Updates, config: Config) -> Measured:
    """Makes the longest step twice, and measures the second one; no parameter changes.

    Args:
        updates: of a config as :func:`~tandem.common.longest_pass.alone` makes it.
        config: the run's config, with its own number of ranks and mini-batches.
    """
    engine = updates.engine
    memory, device = engine.memory, engine.device
    vocabulary = engine.model.config.get_text_config().vocab_size
    critic = config.learner.critic
    step = 1 if critic is None else critic.warmup_steps + 1
    groups = groups_of_a_pass(config, vocabulary, step)
    # Weights stay as they were: every step may then be as bad as it likes.
    updates.train(step, groups, lr=0.0, critic_lr=0.0, settled=True)
    memory.take()
    _settled(device)
    began = time.perf_counter()
    outcome = updates.train(step, groups, lr=0.0, critic_lr=0.0, settled=True)
    _settled(device)
    seconds = time.perf_counter() - began
    figures = {name: int(size) for name, size in memory.take().items()}
    counted = memory.counted
    there = {part: sizes.get(device.type, 0) for part, sizes in counted.items()}
    runtime = memory.libraries
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        runtime = total - free - torch.cuda.memory_reserved(device)
        runtime += figures["reserved"] - figures["peak"]
    parts = {**there, "activations": figures.get("activations", 0), "runtime": runtime}
    metrics = outcome.metrics
    lengths = [len(sample.tokens) for one in groups for sample in one.group.samples]
    lengths += [len(trace.tokens) for one in groups for trace in one.traces]
    return Measured(
        device=device.type,
        parts=parts,
        offloaded=sum(sum(sizes.values()) for sizes in counted.values()) - sum(there.values()),
        peak=sum(parts.values()),
        host=figures.get("host", figures["peak"]),
        rows=len(lengths),
        row_tokens=len(groups[0].group.prompt_tokens) + lengths[0],
        micro_batches=int(metrics.get("train/micro_batches", 0)),
        forward_tokens=int(metrics.get("train/forward_tokens", 0)),
        layout=engine.policy.layout,
        seconds=seconds,
        applied=outcome.applied,
    )


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(config: Config) -> Measured:
    """Makes the engine of a config in this process, which must be a fresh one, and measures a step of it.

    Raises:
        OutOfMemoryError: the device or the host has too little memory.
        TandemError: the model can't be loaded or trained.
    """
    own = alone(config)
    device = prepare(own, 0)
    with process_group(Seat()):
        with telling_parts(dict):
            updates = build(own, device, None)
        with telling_parts(updates.engine.memory.parts):
            return measured_step(updates, config)


def main() -> int:
    """Measures the config on standard input; writes the figures, or why there are none, to standard output."""
    # Libraries print what they like; only the answer goes to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        config = build_config(parse_yaml(sys.stdin.read(), "the config"), stored=True)
        found = measure(config)
        answer = asdict(found)
    except OutOfMemoryError as error:
        answer = {"asked": error.asked, "parts": error.parts}
    except TandemError as error:
        answer = {"error": str(error)}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
