"""The kit's results as a section of ``docs/benchmarks.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Column = tuple[str, str, float, str]
"""Heading, key of the figures, factor, and format."""

LEARNER: tuple[Column, ...] = (
    ("attention", "attention", 1, ""),
    ("rows", "layout", 1, ""),
    ("dtype", "dtype", 1, ""),
    ("tokens/s", "tokens_per_second", 1, ",.0f"),
    ("padded tokens", "padded_tokens", 1, ",.0f"),
    ("update, s", "update_seconds", 1, ".2f"),
    ("TFLOP/s", "tflops", 1, ",.3g"),
    ("product, TFLOP/s", "product_tflops", 1, ",.3g"),
    ("MFU", "mfu", 100, ".1f"),
    ("peak, GB", "peak_bytes", 2**-30, ".2f"),
    ("plan, GB", "planned_bytes", 2**-30, ".2f"),
)
RUNS: tuple[Column, ...] = (
    ("steps", "steps", 1, ",.0f"),
    ("whole run, s", "seconds", 1, ".0f"),
    ("step, s", "step_seconds", 1, ".3f"),
    ("reward, first and last tenth", "reward_first", 1, ".2f"),
    ("", "reward_last", 1, ".2f"),
    ("held-out accuracy, before and after", "accuracy_first", 1, ".3f"),
    ("", "accuracy_last", 1, ".3f"),
    ("weights, ms", "weights_seconds", 1e3, ".1f"),
    ("GB/s", "weights_gb_per_second", 1, ".2f"),
    ("pause, ms", "pause_seconds", 1e3, ".1f"),
    ("checks", "checks", 1, ",.0f"),
    ("failed", "checks_failed", 1, ",.0f"),
    ("ratio alarms", "ratio_alarms", 1, ",.0f"),
    ("nearest to bound", "nearest_to_bound", 1, ".2f"),
)
TESTS: tuple[Column, ...] = tuple((name, name, 1, ",.0f") for name in ("passed", "failed"))
COLUMNS: Mapping[str, Sequence[Column]] = {
    "miniature": RUNS,
    "half-precision": RUNS,
    "model": RUNS,
    "vllm": RUNS,
    "presets": (
        ("objective", "objective", 1, ""),
        ("optimizer", "optimizer", 1, ""),
        ("steps", "steps", 1, ",.0f"),
        ("stages", "stages", 1, ",.0f"),
        ("loss", "loss", 1, ".3g"),
        ("whole run, s", "seconds", 1, ".0f"),
    ),
    "learner-half": LEARNER,
    "learner-large": LEARNER,
    "engine": (
        ("tokens/s", "tokens_per_second", 1, ",.0f"),
        ("`generate`", "generate_tokens_per_second", 1, ",.0f"),
        ("ratio", "ratio", 1, ".2f"),
    ),
    "staging": (
        ("GB", "bytes", 1e-9, ".2f"),
        ("pinned", "pinned", 1, ""),
        ("GB/s", "gb_per_second", 1, ".2f"),
        ("bare copy, GB/s", "bare_gb_per_second", 1, ".2f"),
        ("ratio", "ratio", 1, ".2f"),
        ("training thread, ms", "blocked_seconds", 1e3, ".1f"),
        ("checksums, ms", "sums_seconds", 1e3, ".1f"),
        ("to the device, GB/s", "to_device_gb_per_second", 1, ".2f"),
    ),
    "logprobs": (
        ("seconds", "seconds", 1, ".3f"),
        ("memory, GB", "extra_bytes", 1e-9, ".3f"),
        ("memory, ratio", "memory", 1, ".3f"),
        ("time, ratio", "time", 1, ".2f"),
    ),
    "nccl": TESTS,
    "tests": TESTS,
}
"""Columns of each part's table, beside the case's name. A heading that is empty shares the cell before it."""


def page(found: Mapping[str, Any]) -> str:
    """The Markdown text."""
    machine = found["machine"]
    gpus = [gpu["name"] for gpu in machine["gpus"]]
    name = gpus[0] if found["device"] == "cuda" and gpus else "CPU"
    count = f"{len(gpus)} x " if len(gpus) > 1 and name != "CPU" else ""
    packages = ", ".join(f"{key} {value}" for key, value in machine["packages"].items())
    driver = f"driver {machine['driver']}; " if machine["driver"] else ""
    lines = [
        f"## On one GPU: {count}{name}",
        "",
        "```bash",
        f"bash tests/gpu/run.sh --minutes {found['minutes']:g}",
        "```",
        "",
        (
            f"{driver}{machine['processor']}, {machine['cores']} cores; Python {machine['python']}, "
            f"{packages}. All parts took {found['seconds']:.0f} s."
        ),
    ]
    for key, part in found["parts"].items():
        lines += ["", f"### {part['title']}", ""]
        if part["figures"]:
            lines += [*table(part["figures"], COLUMNS.get(key, ())), ""]
        for one in part["figures"]:
            if one.get("shares"):
                told = ", ".join(f"{kind} {share:.0%}" for kind, share in one["shares"].items())
                lines += [f"- An update, {one['name']}, by kind of kernel: {told}."]
        lines += [f"- Not run: {one['name']}: {one['reason']}" for one in part["not_run"]]
        for one in part["failed"]:
            lines += [f"- **Failed**: {one['name']}: {one['error']}"]
        if lines[-1] == "":
            lines.pop()
    return "\n".join(lines) + "\n"


def table(figures: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[str]:
    """A Markdown table with a row for each case."""
    heads = ["", *(heading for heading, *_ in columns if heading)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in figures:
        cells = [str(case["name"])]
        for heading, key, factor, form in columns:
            cell = shown(case.get(key), factor, form)
            if heading:
                cells.append(cell)
            else:
                cells[-1] += f", {cell}"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shown(value: Any, factor: float, form: str) -> str:
    """A figure as it stands in a table; a dash for one that is missing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not form:
        return str(value)
    return format(value * factor, form)
