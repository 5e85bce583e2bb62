"""The memory and the time of a plan as lines for a person."""

from __future__ import annotations

from collections.abc import Sequence

from ..wording import human
from .memory import stages_on_gpu
from .pace import (
    BANDWIDTH_SHARE,
    GLOO_RATE,
    GRADED_A_SECOND,
    ITERATION_SECONDS,
    LINK_SHARE,
    PREFILL_SHARE,
    TRAIN_SHARE,
    learner_passes,
)
from .planning import Plan


def transport(plan: Plan) -> str:
    if stages_on_gpu(plan.config, plan.device):
        return "nccl"
    asked = plan.config.weights.transport
    return "shared memory" if asked in ("auto", "shared_memory", "nccl") else asked


def model(plan: Plan) -> str:
    if plan.shape is None:
        return f"{plan.config.model.path} (sizes not known)"
    return (
        f"{plan.config.model.path}, {plan.shape.parameters:,} parameters "
        f"(sizes from {'the table' if plan.shape.source == 'table' else 'its config.json'})"
    )


def whole(plan: Plan) -> list[str]:
    """Memory, time and problems."""
    lines = [
        f"plan of {plan.name} on {plan.node if plan.device == 'cuda' else 'CPUs'}",
        "all figures are estimates on paper, from formulas; a run measures the real ones",
        f"model {model(plan)}",
        "",
    ]
    lines += memory(plan)
    lines += ["", *step(plan)]
    if plan.problems:
        lines += ["", "problems", *(f"  - {one}" for one in plan.problems)]
    return lines


def memory(plan: Plan) -> list[str]:
    """Memory by GPU (or by process on CPUs), part by part."""
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
    lines.append(f"  main memory, all processes: {human(plan.host())}")
    return lines


def step(plan: Plan) -> list[str]:
    """The time of a step by role, with what it was taken from."""
    work = plan.load
    lines = [
        (
            f"a step: {work.groups} groups, {work.samples:,} samples to generate, {work.rows:,} "
            f"rows to train on"
        ),
        (
            f"  taken for granted: prompts of {work.prompt:,.0f} tokens, responses of "
            f"{work.response:,.0f} (--prompt-tokens, --response-tokens)"
        ),
    ]
    if plan.pace is None:
        why = "the run is on CPUs" if plan.device == "cpu" else "the model's sizes aren't known"
        return [*lines, f"  no time is told: {why}"]
    made = plan.pace
    seconds = made.seconds
    rows = [
        (
            "rollout",
            _seconds(seconds["rollout"]),
            f"{made.running} rows at a time an engine, {made.tokens_per_second:,.0f} tokens/s",
        ),
        (
            "reward",
            _seconds(seconds["reward"]),
            f"{GRADED_A_SECOND:.0f} answers/s a grader process",
        ),
        (
            "learner",
            _seconds(seconds["learner"]),
            f"{2 * learner_passes(plan.config)} N T + attention, optimizer, exchange of gradients",
        ),
        ("weights", _seconds(seconds["weights"]), f"bytes / link ({transport(plan)})"),
    ]
    lines += _columns([("  " + a, b, c) for a, b, c in rows])
    how = (
        "the slowest role, for they work at the same time (replay.max_staleness="
        f"{plan.config.replay.max_staleness})"
        if made.overlap
        else "the sum, for samples must be fresh (replay.max_staleness=0)"
    )
    if made.overlap and plan.config.launch.share_gpu:
        how = "rollout and learner one after the other, for they share the GPU"
    steps = plan.config.run.steps
    lines.append(f"  a step takes about {_seconds(made.step)}: {how}")
    if steps:
        lines.append(f"  {steps} steps: about {steps * made.step / 3600:.1f} hours")
    lines.append(
        "  an iteration of an engine: the longer of (weights + cache of C rows) / bandwidth and "
        "2 N C / FLOP/s"
    )
    lines.append(
        f"  assumed of the data sheet: {TRAIN_SHARE:.0%} of FLOP/s in training, "
        f"{PREFILL_SHARE:.0%} in prefill, {BANDWIDTH_SHARE:.0%} of bandwidth, {LINK_SHARE:.0%} of "
        f"links; {1000 * ITERATION_SECONDS:.0f} ms of host time an iteration, gloo "
        f"{GLOO_RATE / 1e9:.1f} GB/s"
    )
    lines.append(
        "  formulas: arXiv 2001.08361 and 2204.02311 (FLOPs), 2211.05102 (decoding), "
        "1910.02054 (ZeRO), 2205.05198 (activations)"
    )
    return lines


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _gb(count: int) -> str:
    return f"{count / (1 << 30):.1f}" if count >= 1 << 26 else f"{count / (1 << 30):.2g}"


def _seconds(count: float) -> str:
    return f"{count:.0f} s" if count >= 10 else f"{count:.2g} s"
