"""``summary.json``: what a finished run has achieved and what it took, and the table that shows it."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import platform
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ...common.errors import DataError
from ...common.parts import HELD_OUT_PAIRS, parts, read_parts
from ...common.run_folder import RunFolder, write_atomic
from ...learner.loop.best import best_of
from ...learner.resume.journal import trained
from ..board.history import MEMORY
from ..board.on_disk import read_restarts
from ..plan.hardware import Machine
from ..wording import duration, human, shown

log = logging.getLogger("tandem.launch")

if TYPE_CHECKING:
    from ...common.config import Config

PACKAGES = (
    "tandem-rl",
    "torch",
    "transformers",
    "tokenizers",
    "deepspeed",
    "vllm",
    "flash-attn",
    "liger-kernel",
    "math-verify",
    "sympy",
    "numpy",
    "redis",
    "pyzmq",
    "msgspec",
    "pyarrow",
    "pydantic",
)
"""Packages whose versions a result may depend on."""


@dataclass(slots=True)
class Findings:
    """Figures that were read from Redis before it ended, for the summary."""

    counts: dict[str, int] = field(default_factory=dict)
    """Groups by ledger state."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """All results, by step."""
    grader_restarts: list[dict[str, Any]] = field(default_factory=list)
    """Restarts of graders, as the pools counted them."""
    dead_letters: list[dict[str, Any]] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    """Share of its time that each role waited."""
    stopped: dict[str, Any] | None = None
    """The callback's request that ended the run, if one did."""
    complete: bool = False
    """Whether everything was read."""


def make(
    *,
    folder: RunFolder,
    config: Config,
    record: Mapping[str, Any],
    findings: Findings,
    wall_seconds: float,
    machine: Machine,
) -> dict[str, Any]:
    course = Course(record.get("began"))
    for one in read_parts(folder.metrics, log.warning):
        course.add(one)
    steps = course.steps
    first = config.data.evaluate[0].name if config.data.evaluate else None
    results = [r for r in findings.evaluations if r.get("set_name") == first]
    before, after = _at(results, 0), _at(results, steps)
    samples, tokens = _trained(folder, course)
    return {
        "run_id": record["run_id"],
        "preset": record["preset"],
        "overrides": list(record.get("overrides", [])),
        "seed": config.run.seed,
        "steps": steps,
        "stopped": findings.stopped,
        "callbacks": _callbacks(config, folder),
        "epochs": _epochs(config, record, steps, samples),
        "accuracy_before": before["accuracy"] if before else None,
        "accuracy_after": after["accuracy"] if after else None,
        "evaluation_set": first,
        "evaluation_problems": after["problems"] if after else None,
        "best": best_of(folder.best),
        "preference_accuracy": course.preferences.get("heldout/preference_accuracy"),
        "preference_pairs": course.preferences.get(HELD_OUT_PAIRS),
        "evaluations": findings.evaluations,
        "wall_seconds": round(wall_seconds, 1),
        "start_seconds": {**record.get("start", {}), **course.first_step},
        "samples_trained": samples,
        "tokens_trained": tokens,
        "course": course.ends(),
        "staleness_max": course.staleness,
        "restarts": [*read_restarts(folder), *_grader_restarts(findings.grader_restarts)],
        "idle_shares": course.idle() | findings.idle,
        "memory_peaks": course.memory,
        "ledger": findings.counts,
        "dead_letters": findings.dead_letters,
        "machine": str(machine),
        "python": platform.python_version(),
        "packages": versions(),
        "redis": record.get("redis_version"),
    }


SAMPLES = ("train/rows",)
TOKENS = ("train/tokens_own", "train/tokens_expert")
STALEST = "replay/staleness_max"


COURSE = (
    "reward/mean",
    "reward/zero_variance",
    "rollout/length_mean",
    "train/entropy",
    "train/ratio_mean",
    "train/loss",
    "replay/staleness_mean",
)
"""Metrics whose values at the beginning and at the end are in the summary."""


ENDS = 20
"""Number of steps at each end that are averaged, at most."""


class Course:
    """The summary's figures from the metrics, added record by record."""

    def __init__(self, began: float | None = None) -> None:
        """Nothing yet.

        Args:
            began: when the last start of the run began, in seconds since the epoch.
        """
        self._began = began
        self.first_step: dict[str, float] = {}
        """Seconds from there to the end of its first step, as ``first_step``."""
        self.steps = 0
        """The last step."""
        self.staleness = 0
        """The age of the oldest sample at any step, in steps."""
        self.trained: dict[int, tuple[int, int]] = {}
        """Step to its numbers of samples and tokens."""
        self.preferences: dict[str, float] = {}
        """The last measurement of held-out pairs."""
        self.memory: dict[str, int] = {}
        """The greatest value of each metric of memory, in bytes, without its prefix."""
        self._total = self._waited = 0.0
        self._counts: Counter[str] = Counter()
        self._firsts: dict[str, list[float]] = {name: [] for name in COURSE}
        self._lasts: dict[str, deque[float]] = {name: deque(maxlen=ENDS) for name in COURSE}

    def add(self, record: Mapping[str, Any]) -> None:
        step = int(record.get("step") or 0)
        self.steps = max(self.steps, step)
        self.staleness = max(self.staleness, int(record.get(STALEST) or 0))
        if any(key in record for key in SAMPLES):
            samples, tokens = _sum(record, SAMPLES), _sum(record, TOKENS)
            self.trained[step] = int(samples), int(tokens)
            since = float(record.get("time") or 0) - (self._began or float("inf"))
            if since > 0 and not self.first_step:
                self.first_step = {"first_step": round(since, 2)}
        if "heldout/preference_accuracy" in record:
            self.preferences = {k: v for k, v in record.items() if k.startswith("heldout/")}
        self._total += float(record.get("time/total") or 0)
        self._waited += _sum(record, [key for key in record if key.startswith("time/wait/")])
        for name, value in record.items():
            if name.startswith(MEMORY) and isinstance(value, int | float):
                short = name.removeprefix(MEMORY)
                self.memory[short] = max(int(value), self.memory.get(short, 0))
        for name in COURSE:
            value = record.get(name)
            if isinstance(value, int | float):
                self._counts[name] += 1
                if len(self._firsts[name]) < ENDS:
                    self._firsts[name].append(value)
                self._lasts[name].append(value)

    def ends(self) -> dict[str, list[float]]:
        """Means of each metric of :data:`COURSE` over its first and over its last steps.

        Each end is a tenth of the steps that have the metric, at least 1 and at most 20.
        """
        means = {}
        for name, total in self._counts.items():
            count = min(ENDS, max(1, total // 10))
            ends = self._firsts[name][:count], list(self._lasts[name])[-count:]
            means[name] = [sum(end) / len(end) for end in ends]
        return means

    def idle(self) -> dict[str, float]:
        """Share of its steps' time that the learner waited, as each step recorded it."""
        return {"learner": round(self._waited / self._total, 4)} if self._total else {}


OF_A_STAGE = (
    "steps",
    "accuracy_before",
    "accuracy_after",
    "samples_trained",
    "tokens_trained",
    "wall_seconds",
)
"""Keys of a stage's summary that stand in the common one, in ``stages``."""


def of_stages(
    preset: str, overrides: Sequence[str], summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The common summary of runs that were made one after another, with a single run's keys.

    Counts and times are added up; ``accuracy_before`` and what else is of the beginning is the first
    run's, the rest the last run's.

    Args:
        preset: its name.
        overrides: settings of the whole.
        summaries: the runs' own, by stage, in their order.
    """
    every = list(summaries.values())
    first, last = every[0], every[-1]

    def total(key: str) -> Any:
        return sum(one[key] for one in every)

    def joined(key: str) -> list[dict[str, Any]]:
        return [{**entry, "stage": name} for name, one in summaries.items() for entry in one[key]]

    ledger: Counter[str] = Counter()
    peaks: Counter[str] = Counter()
    for one in every:
        ledger.update(one["ledger"])
        # The union of two counters keeps the greater of two values.
        peaks |= Counter(one.get("memory_peaks", {}))
    course = dict(last["course"])
    for name, (began, _) in first["course"].items():
        if name in course:
            course[name] = [began, course[name][1]]
    return {
        **last,
        "preset": preset,
        "overrides": list(overrides),
        "seed": first["seed"],
        "steps": total("steps"),
        "accuracy_before": first["accuracy_before"],
        "evaluations": joined("evaluations"),
        "wall_seconds": round(total("wall_seconds"), 1),
        "samples_trained": total("samples_trained"),
        "tokens_trained": total("tokens_trained"),
        "course": course,
        "staleness_max": max(one["staleness_max"] for one in every),
        "restarts": joined("restarts"),
        "memory_peaks": dict(peaks),
        "ledger": dict(ledger),
        "dead_letters": joined("dead_letters"),
        "stages": [
            {"name": name, "run_id": one["run_id"], **{key: one[key] for key in OF_A_STAGE}}
            for name, one in summaries.items()
        ],
    }


def stages_table(summary: Mapping[str, Any], folder: RunFolder) -> list[str]:
    """The common summary as a few lines of text."""
    width = max(len("summary"), *(len(stage["name"]) for stage in summary["stages"])) + 2
    lines = []
    for stage in summary["stages"]:
        came, now = (_percent(stage[key]) for key in ("accuracy_before", "accuracy_after"))
        accuracy = f"held-out accuracy {came} -> {now}" if now else ""
        took = f"{stage['steps']:,} steps, {duration(stage['wall_seconds'])}"
        lines.append(f"  {stage['name']:<{width}}{took:<22}{accuracy}")
    lines.append(f"  {'summary':<{width}}{shown(folder.summary)}")
    if folder.report.exists():
        lines.append(f"  {'report':<{width}}{shown(folder.report)}")
    return ["", *lines, ""]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _sum(record: Mapping[str, Any], keys: Sequence[str]) -> float:
    return sum(float(record.get(key) or 0) for key in keys)


def _at(results: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """The result of a step that covers the most problems."""
    there = [result for result in results if result.get("step") == step]
    return max(there, key=lambda result: int(result.get("problems") or 0), default=None)


def _callbacks(config: Config, folder: RunFolder) -> dict[str, Any]:
    """How often calls of each callback failed; empty if none did."""
    if not config.run.callbacks:
        return {}
    # It imports the client of Redis, which the start of a run has no need of.
    from ..callbacks.host import read_tallies

    try:
        return {name: structs.asdict(one) for name, one in read_tallies(folder.callbacks).items()}
    except DataError as error:
        log.warning(f"the summary has no failures of callbacks: {error}")
        return {}


def _trained(folder: RunFolder, course: Course) -> tuple[int, int]:
    """Samples and tokens that were trained on, from the journal.

    The metrics fill in for a run without a journal and for steps that the journal has no numbers of.
    """
    counts: Mapping[int, tuple[int, int] | None] = course.trained
    if parts(folder.journal):
        counts = trained(folder.journal)
    known = [one or course.trained.get(step, (0, 0)) for step, one in counts.items()]
    return sum(samples for samples, _ in known), sum(tokens for _, tokens in known)


def _epochs(config: Config, record: Mapping[str, Any], steps: int, samples: int) -> float | None:
    """Passes over what is stored, of an offline run: the stored traces without those of held-out pairs, or the steps
    of an archive."""
    if config.learner.source != "offline":
        return None
    if config.data.archive is None:
        stored, done = int((record.get("ingest") or {}).get("traces") or 0), samples
    else:
        from ...replay import archive

        try:
            stored = sum(1 for _ in archive.steps(Path(config.data.archive).expanduser()))
        except DataError as error:
            log.warning(f"the summary has no number of epochs: {error}")
            return None
        done = steps
    return round(done / stored, 4) if stored else None


def _grader_restarts(counted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    import datetime

    return [
        {
            "process": entry["name"],
            "time": datetime.datetime.fromtimestamp(entry["time"])
            .astimezone()
            .isoformat(timespec="seconds"),
            "exit": entry["detail"],
        }
        for entry in counted
    ]


def versions() -> dict[str, str]:
    """Installed versions of :data:`PACKAGES`, by package."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def write(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Writes ``summary.json``; what has no value, such as the share of right forms without a form, is null."""
    write_atomic(folder.summary, json.dumps(_known(summary), indent=1, allow_nan=False) + "\n")


def _known(value: Any) -> Any:
    """The same without NaN and infinities, which aren't JSON."""
    if isinstance(value, Mapping):
        return {key: _known(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


CHANGES = (
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/zero_variance", "groups without signal", "{:.0%}"),
    ("rollout/length_mean", "response length", "{:,.1f}"),
    ("train/entropy", "entropy", "{:.3f}"),
    ("train/loss", "loss", "{:.4f}"),
)
"""Rows of the table that compare the first steps with the last: metric, label, format."""


def table(summary: Mapping[str, Any], folder: RunFolder) -> list[str]:
    """The summary as a few lines of text."""
    rows = [("steps", f"{summary['steps']}")]
    if summary.get("stopped") is not None:
        stopped = summary["stopped"]
        rows.append(("stopped by a callback", f"{stopped['reason']} ({stopped['callback']})"))
    for name, tally in summary.get("callbacks", {}).items():
        failed = tally["errors"] + tally["ended"] + tally["missed"]
        if failed:
            off = ", switched off" if tally["off"] else ""
            log_file = shown(folder.logs / "callbacks.log")
            rows.append(("callback failed", f"{name}: {failed} of its calls{off}; see {log_file}"))
    if summary["epochs"] is not None:
        rows.append(("epochs", f"{summary['epochs']:,.4g}"))
    if summary["accuracy_after"] is not None:
        before = summary["accuracy_before"]
        came = f"{100 * before:.1f}% -> " if before is not None else ""
        now, over = 100 * summary["accuracy_after"], summary["evaluation_problems"]
        others = len({one.get("set_name") for one in summary["evaluations"]}) > 1
        of = f" of {summary['evaluation_set']}" if others else ""
        rows.append(("held-out accuracy", f"{came}{now:.1f}% ({over} problems{of})"))
    if summary.get("best") is not None:
        best = summary["best"]
        rows.append(("best", f"{best['metric']} {best['value']:.4g} at step {best['step']}"))
    if summary.get("preference_accuracy") is not None:
        share, over = 100 * summary["preference_accuracy"], int(summary["preference_pairs"])
        rows.append(("held-out pairs", f"{share:.1f}% preferred as they should be ({over} pairs)"))
    for metric, name, form in CHANGES:
        if metric in summary["course"]:
            began, ended = (form.format(value) for value in summary["course"][metric])
            rows.append((name, f"{began} -> {ended}"))
    if "replay/staleness_mean" in summary["course"]:
        mean = summary["course"]["replay/staleness_mean"][1]
        rows.append(
            ("staleness", f"{mean:.1f} steps at the end, {summary['staleness_max']} at most")
        )
    rows.append(
        (
            "trained on",
            f"{summary['samples_trained']:,} samples, {summary['tokens_trained']:,} tokens",
        )
    )
    rows.append(("time", duration(summary["wall_seconds"])))
    rows.append(("restarts", str(len(summary["restarts"]))))
    if summary["idle_shares"]:
        shares = ", ".join(f"{r} {100 * s:.0f}%" for r, s in summary["idle_shares"].items())
        rows.append(("idle", shares))
    peaks = summary.get("memory_peaks", {})
    held = [(role, peaks.get(f"{role}_peak_bytes")) for role in ("learner", "rollout")]
    if any(size for _, size in held):
        rows.append(("memory at most", ", ".join(f"{r} {human(size)}" for r, size in held if size)))
    rows.append(("model", shown(folder.model)))
    if summary.get("best") is not None:
        rows.append(("best model", shown(folder.best)))
    rows.append(("summary", shown(folder.summary)))
    if folder.report.exists():
        rows.append(("report", shown(folder.report)))
    width = max(len(name) for name, _ in rows) + 2
    return ["", *(f"  {name:<{width}}{value}" for name, value in rows), ""]


def next_command(config: Config, preset: str, machine: Machine) -> str:
    """Suggests what to run next on this machine."""
    # In a clone the command isn't on PATH, and the script sets itself up.
    start = "bash launch/start_all.sh" if Path("launch/start_all.sh").exists() else "tandem start"
    if len(machine.gpus) >= 8 and not preset.startswith("qwen"):
        return f"{start} qwen2.5-math-7b-luffy-8gpu  (8 GPUs are here; see its data first)"
    if preset == "miniature":
        return f"{start} miniature-on-policy  (the same without the traces: it stays near 0)"
    if preset.startswith("miniature-"):
        return f"{start} miniature  (4 traces and rewards together)"
    return f"tandem evaluate --model {config.run.dir}/model --data YOUR.parquet"
