"""The memory and the time of a plan as lines for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..wording import aligned, human
from .memory import has_own_gpus
from .planning import Plan
from .simulation import Simulated, simulate
from .sizes import ModelShape
from .speed import (
    BANDWIDTH_SHARE,
    GLOO_RATE,
    ITERATION_SECONDS,
    LINK_SHARE,
    PINNED_RATE,
    PREFILL_SHARE,
    TRAIN_SHARE,
    critic_passes,
    learner_passes,
)
from .splits import IDLE, Split

if TYPE_CHECKING:
    from ...common.config import Config

BETTER = 0.95
"""A split is mentioned if its step takes no more than this share of the preset's."""


def transport(plan: Plan) -> str:
    if has_own_gpus(plan.config, plan.device):
        return "nccl"
    name = plan.config.weights.transport
    return "shared memory" if name in ("auto", "shared_memory", "nccl") else name


def model(plan: Plan) -> str:
    if plan.shape is None:
        return f"{plan.config.model.path} (sizes not known)"
    return (
        f"{plan.config.model.path}, {plan.shape.parameters:,} parameters "
        f"(sizes from {'the table' if plan.shape.source == 'table' else 'its config.json'})"
        f"{_adapters(plan.config, plan.shape)}"
    )


def _adapters(config: Config, shape: ModelShape) -> str:
    lora = config.learner.lora
    if lora is None:
        return ""
    count = shape.adapters(lora)
    return (
        f"; frozen, with adapters of rank {lora.rank}: {count:,} parameters, "
        f"{count / shape.parameters:.2%} of the model's, are trained, kept and sent"
    )


def whole(plan: Plan) -> list[str]:
    """Lines for memory, time and problems."""
    lines = [
        f"plan of {plan.name} on {plan.node if plan.device == 'cuda' else 'CPUs'}",
        "all figures are estimates on paper; a run measures the real ones",
        f"model {model(plan)}",
        "",
    ]
    lines += memory(plan)
    return [*lines, "", *step(plan), *_problems(plan, "problems")]


def _problems(plan: Plan, title: str) -> list[str]:
    return ["", title, *(f"  - {one}" for one in plan.problems)] if plan.problems else []


def memory(plan: Plan) -> list[str]:
    """Lines for memory by GPU (or by process on CPUs), part by part."""
    where = "GPU" if plan.device == "cuda" else "process"
    lines = [f"memory by {where}, GB"]
    rows: list[tuple[str, ...]] = []
    names: list[str] = []
    held = [p for p in plan.processes if p.holding is not None and p.name != "redis"]
    held = [p for p in held if p.name.startswith(("learner", "rollout"))]
    for planned in held:
        assert planned.holding is not None
        names += [name for name in planned.holding.parts if name not in names]
    for planned in held:
        assert planned.holding is not None
        parts = planned.holding.parts
        figures = [_gb(parts[name]) if parts.get(name) else "-" for name in names]
        place = ",".join(map(str, planned.gpus)) or "-"
        rows.append((planned.name, place, *figures, _gb(planned.holding.total)))
    head = ("", "GPU", *names, "total")
    lines += _columns([head, *rows])
    if plan.device == "cuda":
        gigabytes = plan.node.memory
        lines.append("")
        for gpu, processes_ in plan.by_gpu().items():
            total = sum(processes_.values())
            fits = "" if total <= gigabytes else "  DOES NOT FIT"
            lines.append(
                f"  GPU {gpu}: {_gb(total)} of {_gb(gigabytes)} GB "
                f"({100 * total / gigabytes:.0f}%), {' + '.join(processes_)}{fits}"
            )
    pinned = f", {human(plan.pinned())} of it pinned" if plan.pinned() else ""
    lines.append(f"  main memory, all processes: {human(plan.host())}{pinned}")
    return lines


def _assumed(plan: Plan) -> str:
    """A line about the lengths of rows."""
    work, block = plan.load, plan.config.data.pack_tokens
    if block is not None:
        return f"  rows are blocks of {block:,} tokens (data.pack_tokens)"
    return (
        f"  assumed: prompts of {work.prompt:,.0f} tokens, responses of "
        f"{work.response:,.0f} with a log-normal spread of {work.lengths.spread:g}, cut at "
        f"{work.lengths.limit:,} (--prompt-tokens, --response-tokens, --spread)"
    )


def step(plan: Plan) -> list[str]:
    """Lines for the time of a simulated step, who waits in it, and the assumptions behind it."""
    work = plan.load
    lines = [
        (
            f"a step: {work.groups} groups, {work.samples:,} samples to generate, {work.rows:,} "
            f"rows to train on"
        ),
        _assumed(plan),
    ]
    if plan.scenario is None:
        return [*lines, f"  no time is estimated: {_why_no_time(plan)}"]
    simulated = simulate(plan.scenario)
    engines = f"{plan.scenario.workers} engine{'s' * (plan.scenario.workers > 1)}"
    lines += _columns(
        [
            (
                "  learner",
                f"works {_seconds(simulated.trained)}",
                f"waits {simulated.learner_waits:.0%} of the time",
                _operations(plan.config),
            ),
            (
                f"  {engines}",
                f"{simulated.tokens_per_second:,.0f} tokens/s",
                f"wait {simulated.engines_wait:.0%} of the time",
                (
                    f"{simulated.running:.0f} of {plan.scenario.slots} slots in use, new weights take "
                    f"{simulated.engines_pause:.0%} of the time"
                ),
            ),
        ]
    )
    bound = plan.config.replay.max_staleness
    lines.append(
        f"  a step takes about {_seconds(simulated.step)} with samples at most {bound} "
        f"step{'s' * (bound != 1)} old (replay.max_staleness={bound}), {simulated.staleness:.1f} on "
        f"average: {who_waits(simulated)}"
    )
    steps = plan.config.run.steps
    if steps:
        lines.append(f"  {steps} steps: about {steps * simulated.step / 3600:.1f} hours")
    lines.append(
        "  simulated by the ledger's own rules (docs/plan.md); an iteration of an engine is the longer "
        "of (weights + cache of C rows) / bandwidth and 2 N C / FLOP/s"
    )
    lines.append(
        f"  assumed of the data sheet: {TRAIN_SHARE:.0%} of FLOP/s in training, "
        f"{PREFILL_SHARE:.0%} in prefill, {BANDWIDTH_SHARE:.0%} of bandwidth, {LINK_SHARE:.0%} of "
        f"links; {1000 * ITERATION_SECONDS:.0f} ms of host time an iteration, "
        f"{PINNED_RATE / 1e9:.0f} GB/s to pinned memory, gloo {GLOO_RATE / 1e9:.1f} GB/s"
    )
    lines.append(
        "  formulas: arXiv 2001.08361 and 2204.02311 (FLOPs), 2211.05102 (decoding), "
        "1910.02054 (ZeRO), 2205.05198 (activations)"
    )
    return lines


def _why_no_time(plan: Plan) -> str:
    if plan.device == "cpu":
        return "the run is on CPUs"
    if plan.shape is None:
        return "the model's sizes aren't known"
    return "all samples come from workers on other hosts (rollout.workers=0)"


def who_waits(simulated: Simulated) -> str:
    """Who waits for whom in a step, in words."""
    waiting = []
    if simulated.learner_waits >= IDLE:
        waiting.append(f"the learner waits for samples {simulated.learner_waits:.0%} of the time")
    if simulated.engines_wait >= IDLE:
        waiting.append(f"the engines for leases {simulated.engines_wait:.0%}")
    return ", ".join(waiting) if waiting else "nobody waits"


def splits(plan: Plan, tried: Sequence[Split]) -> list[str]:
    """Lines for every split of the node: its memory, and by staleness bound its time and who waits."""
    lines = [
        f"splits of {plan.name} on {plan.node}",
        (
            "seconds of a step, and the share of the time in which learner and engines wait, by "
            "replay.max_staleness"
        ),
    ]
    reasons: dict[str, list[str]] = {}
    for ranks, workers in dict.fromkeys((split.ranks, split.workers) for split in tried):
        here = [s for s in tried if (s.ranks, s.workers) == (ranks, workers)]
        first = here[0]
        pinned = f", {human(first.plan.pinned())} of it pinned"
        if first.plan.problems:
            reasons.setdefault(first.plan.problems[0], []).append(f"{ranks} + {workers}")
        runs = "" if first.fits else ", WOULD NOT RUN"
        lines += [
            "",
            (
                f"{ranks} rank{'s' * (ranks > 1)} + {workers} "
                f"engine{'s' * (workers > 1)}: fullest GPU {first.plan.fullest():.0%}, main "
                f"memory {human(first.plan.host())}{pinned}{runs}"
            ),
        ]
        rows: list[tuple[str, ...]] = [("staleness", *(str(s.staleness) for s in here))]
        rows.append(("step, s", *(f"{s.simulated.step:.0f}" for s in here)))
        rows.append(("learner waits", *(f"{s.simulated.learner_waits:.0%}" for s in here)))
        rows.append(("engines wait", *(f"{s.simulated.engines_wait:.0%}" for s in here)))
        lines += _columns(rows)
    possible = [split for split in tried if split.fits]
    if reasons:
        lines += ["", "would not run" if possible else "no split would run"]
        lines += [f"  - {', '.join(names)}: {why}" for why, names in reasons.items()]
    own_problems = _problems(plan, "problems of this preset")
    if not possible:
        return lines + own_problems
    lines.append("")
    best = min(possible, key=lambda split: split.simulated.step)
    before, changed = plan.config, best.plan.config
    rollout, further = changed.rollout, ""
    # A lower bound may need these lowered too.
    if changed.replay.window != before.replay.window:
        further += f"replay.window={changed.replay.window} "
    if changed.weights.every != before.weights.every:
        further += f"weights.every={changed.weights.every} "
    lines.append(
        f"fastest: learner.ranks={best.ranks} rollout.workers={best.workers} "
        f"replay.max_staleness={best.staleness} {further}rollout.groups_per_batch="
        f"{rollout.groups_per_batch} rollout.groups_ahead={rollout.groups_ahead}, about "
        f"{_seconds(best.simulated.step)}"
    )
    if plan.scenario is not None:
        own = simulate(plan.scenario).step
        better = [s for s in possible if s.simulated.step <= BETTER * own]
        ranks, workers = plan.config.learner.ranks, plan.config.rollout.workers
        lines.append(
            f"this preset: {ranks} + {workers} at staleness {plan.config.replay.max_staleness}, "
            f"about {_seconds(own)}; "
            + (f"{len(better)} of these are" if better else "none of these is")
            + " more than 5% faster"
        )
    return lines + own_problems


def _operations(config: Config) -> str:
    """What the learner's step consists of."""
    if not config.learner.train:
        return "nothing is trained (learner.train=false)"
    return f"{_passes(config)} N T + {_teacher(config)}attention, optimizer, exchange of gradients"


def _passes(config: Config) -> str:
    """Operations of the learner's step per parameter and token."""
    policy = str(2 * learner_passes(config))
    return policy if config.learner.critic is None else f"({policy} + {2 * critic_passes(config)})"


def _teacher(config: Config) -> str:
    """Those of the teacher, whose parameters are others."""
    return (
        ""
        if config.learner.teacher is None
        else f"{2 * config.learner.update_epochs} N_teacher T + "
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows)]


def _gb(count: int) -> str:
    return f"{count / (1 << 30):.1f}" if count >= 1 << 26 else f"{count / (1 << 30):.2g}"


def _seconds(count: float) -> str:
    return f"{count:.0f} s" if count >= 10 else f"{count:.2g} s"
