"""Tokens a second of the learner's whole update beside a bare transformers model, in one run.

    .venv/bin/python tests/benchmarks/learner.py                     # both models
    .venv/bin/python tests/benchmarks/learner.py --models 3M --pairs 7

Random Qwen2 models of about 3M and 100M parameters, the same rows on both sides, in the same
micro-batches; one token is one that a row has, whatever a side computes in addition.

=======  ============================================================================================
bare     padded rows, ``model.model`` and the output matrix at the responses' places alone, the mean of
         ``cross_entropy``, backward, and ``torch.optim.AdamW(fused=True)``
learner  :meth:`DeepSpeedEngine.update` with the objective ``grpo``: log-probs and entropies, the loss
         with its statistics, backward, the gradient's norm with clipping, and the optimizer's step
=======  ============================================================================================

======  =====================================================================================
case    rows
======  =====================================================================================
alike   of one length, each with a prompt of its own: a layout gains nothing, so that the ratio is
        what the learner costs beside a bare model
varied  groups that share their prompts, of an eighth to the whole of the length: here the learner
        is also timed with padded rows, beside the layout that it chose
======  =====================================================================================

Without a GPU models are float32, in one thread, and the time is that of the processor, which whatever
else the machine does disturbs least (``--wall`` takes the clock on the wall); the learner's layout is
that of shared prompts. On a GPU (untested: no GPU has run it) they are bfloat16 and rows longer, the
layout is the packed one, and the learner alone keeps a float32 copy of its weights. Sides take turns; the
medians of the pairs are printed, and the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engines import CASES, Case, save_model

from tandem.common.config import Config, build
from tandem.common.models import load_model
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.forward import layouts
from tandem.learner.objectives import make
from tandem.learner.rendezvous import Seat, process_group
from tandem.learner.rows.microbatch import LayoutName, MicroBatch, micro_batch
from tandem.learner.rows.packing import plan
from tandem.learner.rows.rows import Rows, ragged

GROUP = 8
"""Rows that share a prompt."""
SHORTEST = 8
"""The shortest response is the longest one divided by this."""
ROWS = {"3M": 64, "100M": 16}
"""Rows of an update on a CPU."""
LONGER = 8
"""Responses and updates are this many times longer on a GPU."""
LR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one update."""

    passes: float
    """Of forward and backward passes with the loss."""
    whole: float
    """Of all of it."""


class Clock:
    """Seconds of this process's processor, or of the clock on the wall once the GPU has done its work."""

    def __init__(self, wall: bool, device: torch.device) -> None:
        self._wall = wall or device.type == "cuda"
        self._device = device

    def __call__(self) -> float:
        """Now."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() if self._wall else time.process_time()


def made_rows(case: Case, count: int, new: int, varied: bool) -> Rows:
    """Rows of random tokens as if the policy had sampled them."""
    rng = np.random.Generator(np.random.Philox(key=1))
    size = GROUP if varied else 1
    lengths = np.full(count, new)
    if varied:
        lengths = rng.permutation(np.linspace(new / SHORTEST, new, count).round().astype(np.int64))
    ids = []
    for row, length in enumerate(lengths.tolist()):
        if row % size == 0:
            prompt = rng.integers(3, case.vocabulary, case.prompt)
        ids += [prompt, rng.integers(3, case.vocabulary, length)]
    responses = torch.from_numpy(lengths)
    row = torch.repeat_interleave(responses)
    nothing, none = torch.zeros(count), torch.zeros(len(row))
    return Rows(
        ids=torch.from_numpy(np.concatenate(ids)),
        prompt_lengths=torch.full((count,), case.prompt),
        response_lengths=responses,
        row=row,
        position=ragged(torch.zeros_like(responses), responses),
        expert=none.bool(),
        behaviour=none - float(np.log(case.vocabulary)),
        known=~none.bool(),
        lag=none.long(),
        temperature=none + 1,
        advantages=torch.from_numpy(rng.choice([-1.0, 1.0], count)).float(),
        rewards=nothing.double(),
        group=torch.arange(count) // size,
        expert_row=nothing.bool(),
        masked=nothing.bool(),
        silent=nothing.bool(),
        lengths=responses,
        turn=none.int(),
        muted=none.bool(),
        groups=-(-count // size),
    )


class Bare:
    """The model of transformers by itself."""

    def __init__(self, folder: Path, config: Config, device: torch.device) -> None:
        self._model: Any = load_model(
            str(folder), dtype=config.model.dtype, attention="auto", device=device
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)

    def update(self, micro_batches: Sequence[MicroBatch], clock: Clock) -> Timing:
        """One update by cross-entropy, of padded micro-batches."""
        device = self._model.device
        began = clock()
        total = sum(len(micro.targets) for micro in micro_batches)
        for micro in micro_batches:
            hidden = self._model.model(
                input_ids=micro.input_ids.to(device), use_cache=False
            ).last_hidden_state
            picked = hidden.flatten(0, 1).index_select(0, micro.index.to(device))
            logits = self._model.lm_head(picked)
            (cross_entropy(logits, micro.targets.to(device), reduction="sum") / total).backward()
        passed = clock()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Timing(passes=passed - began, whole=clock() - began)


class Learner:
    """The learner's engine, as a run has it on one rank."""

    def __init__(self, folder: Path, config: Config, device: torch.device) -> None:
        model = load_model(
            str(folder),
            dtype=config.model.dtype,
            attention=config.model.attention,
            device=device,
        )
        self._engine = DeepSpeedEngine(model, config, device)
        self._objective = make("grpo")
        self.layout: LayoutName = self._engine.policy.layout
        """How it lays out micro-batches."""
        name = layouts.named(self._engine.model.config._attn_implementation)
        self.described = f"{name}, {layouts.SHOWN[self.layout]}"
        """Its attention, for the table."""

    def update(self, rows: Rows, micro_batches: Sequence[MicroBatch], clock: Clock) -> Timing:
        """One update."""
        scalars = {name: float(value) for name, value in self._objective.statistics(rows).items()}
        scalars |= {"constant": float(len(rows.row)), "width": float(rows.lengths.max())}
        passed: list[float] = []
        began = clock()
        result = self._engine.update(
            micro_batches,
            self._objective,
            scalars,
            lr=LR,
            before_step=lambda: passed.append(clock()),
        )
        ended = clock()
        assert result.applied
        return Timing(passes=passed[0] - began, whole=ended - began)


def taking_turns(sides: dict[str, Callable[[], Timing]], pairs: int) -> dict[str, list[Timing]]:
    """Timings of each side, which take turns; the first of each doesn't count."""
    found: dict[str, list[Timing]] = {name: [] for name in sides}
    for pair in range(pairs + 1):
        # Whoever begins may find a colder cache.
        for name in sides if pair % 2 else reversed(sides):
            timing = sides[name]()
            if pair:
                found[name].append(timing)
    return found


def compared(label: str, tokens: int, slow: Sequence[Timing], fast: Sequence[Timing]) -> str:
    """A line of the table: tokens a second of two sides, and the ratio, of passes and of whole updates."""
    cells = []
    for part in ("whole", "passes"):
        these = [getattr(one, part) for one in slow]
        others = [getattr(one, part) for one in fast]
        ratios = [a / b for a, b in zip(these, others, strict=True)]
        rates = (tokens / statistics.median(times) for times in (these, others))
        cells += [*(f"{rate:,.0f}" for rate in rates), f"**{statistics.median(ratios):.2f}**"]
        cells.append(f"{min(ratios):.2f}-{max(ratios):.2f}")
    return f"| {label} | {' | '.join(cells)} |"


def measure(case: Case, options: argparse.Namespace, device: torch.device) -> None:
    """Prints the lines of one model."""
    longer = LONGER if device.type == "cuda" else 1
    count, new = options.rows or ROWS[case.name] * longer, case.new * longer
    longest = case.prompt + new
    config = build(
        {
            "run": {"steps": 1},
            "data": {"train": [{"path": "unused.parquet"}], "max_prompt_tokens": case.prompt},
            "rollout": {"group_size": GROUP, "max_new_tokens": new},
            "model": {"dtype": "bfloat16" if device.type == "cuda" else "float32"},
            # A quarter of an update's rows, so that there are several micro-batches.
            "learner": {"micro_batch_tokens": max(count // 4, GROUP) * longest},
        },
        stored=True,
    )
    clock = Clock(options.wall, device)
    with tempfile.TemporaryDirectory(prefix="tandem-learner-") as place:
        folder = Path(place)
        parameters = save_model(case, folder)
        bare, learner = Bare(folder, config, device), Learner(folder, config, device)
    print(f"{case.name}: {parameters:,} parameters, {config.model.dtype}, {learner.described}")
    for varied in (False, True):
        rows = made_rows(case, count, new, varied)
        name = f"{case.name}, {'varied' if varied else 'alike'}"
        measure_rows(
            name,
            rows,
            varied,
            bare,
            learner,
            config.learner.micro_batch_tokens,
            clock,
            options.pairs,
        )


def measure_rows(
    name: str,
    rows: Rows,
    varied: bool,
    bare: Bare,
    learner: Learner,
    budget: int,
    clock: Clock,
    pairs: int,
) -> None:
    """Prints the lines of one case."""

    def laid_out(layout: LayoutName) -> list[MicroBatch]:
        shares = plan(
            rows.forward_lengths.numpy(),
            np.arange(rows.count),
            budget=budget,
            packed=layout == "packed",
        )[0]
        return [micro_batch(rows.select(torch.from_numpy(part)), layout) for part in shares]

    tokens = int(rows.forward_lengths.sum())
    padded, chosen = laid_out("padded"), laid_out(learner.layout)
    sides: dict[str, Callable[[], Timing]] = {
        "bare": lambda: bare.update(padded, clock),
        "learner": lambda: learner.update(rows, chosen, clock),
    }
    if varied and learner.layout != "padded":
        # Rows without a layout go through plain attention.
        sides["padded"] = lambda: learner.update(rows, padded, clock)
    found = taking_turns(sides, pairs)
    print(compared(f"{name}: bare, learner", tokens, found["bare"], found["learner"]), flush=True)
    if "padded" in found:
        label = f"{name}: learner padded, {learner.layout}"
        print(compared(label, tokens, found["padded"], found["learner"]), flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", choices=[c.name for c in CASES], help="these only")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, help="rows of an update")
    parser.add_argument("--wall", action="store_true", help="wall time, where there is no GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        "| model, rows | whole: a/s | b/s | b/a | | passes: a/s | b/s | b/a | |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    with process_group(Seat()):
        for case in CASES:
            if not options.models or case.name in options.models:
                measure(case, options, device)


if __name__ == "__main__":
    main()
