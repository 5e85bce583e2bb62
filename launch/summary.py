"""``summary.json``: what a finished run has reached and what it took; and the lines that tell it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import DataError
from ..common.run_folder import RunFolder, write_atomic
from ..common.telemetry import read_json_lines
from .hardware import Machine
from .progress import duration
from .supervision import shown

if TYPE_CHECKING:
    from ..common.config import Config
    from .job import Findings

PACKAGES = (
    "tandem-rl",
    "torch",
    "transformers",
    "tokenizers",
    "deepspeed",
    "vllm",
    "flash-attn",
    "math-verify",
    "sympy",
    "numpy",
    "redis",
    "pyzmq",
    "msgpack",
    "pyarrow",
    "pydantic",
)
"""Whose versions a result may depend on."""


def make(
    *,
    folder: RunFolder,
    config: Config,
    record: Mapping[str, Any],
    findings: Findings,
    wall_seconds: float,
    machine: Machine,
) -> dict[str, Any]:
    """The summary as plain data."""
    metrics = list(read_json_lines(folder.metrics))
    steps = max((int(r["step"]) for r in metrics if "step" in r), default=0)
    first = config.data.evaluate[0].name if config.data.evaluate else None
    results = [r for r in findings.evaluations if r.get("set_name") == first]
    before, after = _at(results, 0), _at(results, steps)
    return {
        "run_id": record["run_id"],
        "preset": record["preset"],
        "overrides": list(record.get("overrides", [])),
        "seed": config.run.seed,
        "steps": steps,
        "accuracy_before": before["accuracy"] if before else None,
        "accuracy_after": after["accuracy"] if after else None,
        "evaluation_problems": after["problems"] if after else None,
        "evaluations": findings.evaluations,
        "wall_seconds": round(wall_seconds, 1),
        "samples_trained": int(_total(metrics, SAMPLES)),
        "tokens_trained": int(_total(metrics, TOKENS)),
        "staleness_max": max((int(r[STALEST]) for r in metrics if r.get(STALEST)), default=0),
        "restarts": [*read_restarts(folder), *_grader_restarts(findings.grader_restarts)],
        "idle_shares": learner_idle(metrics) | findings.idle,
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


def _at(results: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """The result of a step over the most problems."""
    there = [result for result in results if result.get("step") == step]
    return max(there, key=lambda result: int(result.get("problems") or 0), default=None)


def _total(metrics: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float:
    return sum(float(record.get(key) or 0) for record in metrics for key in keys)


def learner_idle(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of its steps' time that the learner waited, as each step recorded it."""
    total = _total(metrics, ("time/total",))
    if not total:
        return {}
    waits = {key for record in metrics for key in record if key.startswith("time/wait/")}
    return {"learner": round(_total(metrics, sorted(waits)) / total, 4)}


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


def read_restarts(folder: RunFolder) -> list[dict[str, Any]]:
    """Deaths that the supervisor saw, in all lives of the run."""
    try:
        return list(read_json_lines(folder.logs / "restarts.jsonl"))
    except ValueError:
        raise DataError(f"{folder.logs / 'restarts.jsonl'} is damaged") from None


def versions() -> dict[str, str]:
    """Installed versions of :data:`PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Writes ``summary.json``."""
    write_atomic(folder.summary, json.dumps(summary, indent=1) + "\n")


def table(summary: Mapping[str, Any], folder: RunFolder) -> list[str]:
    """A few lines for a person."""
    rows = [("steps", f"{summary['steps']}")]
    if summary["accuracy_after"] is not None:
        before = summary["accuracy_before"]
        came = f"{100 * before:.1f}% -> " if before is not None else ""
        now, over = 100 * summary["accuracy_after"], summary["evaluation_problems"]
        rows.append(("held-out accuracy", f"{came}{now:.1f}% ({over} problems)"))
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
    rows.append(("model", shown(folder.model)))
    rows.append(("summary", shown(folder.summary)))
    width = max(len(name) for name, _ in rows) + 2
    return ["", *(f"  {name:<{width}}{value}" for name, value in rows), ""]


def next_command(config: Config, preset: str, machine: Machine) -> str:
    """What to run next on this machine."""
    # In a clone the command isn't on PATH, and the script does its own set-up.
    start = "bash launch/start_all.sh" if Path("launch/start_all.sh").exists() else "tandem start"
    if len(machine.gpus) >= 8 and not preset.startswith("qwen"):
        return f"{start} qwen2.5-math-7b-luffy-8gpu  (8 GPUs are here; see its data first)"
    if preset == "miniature":
        return f"{start} miniature-on-policy  (the same without the traces: it stays near 0)"
    if preset in ("miniature-on-policy", "miniature-easy", "miniature-sft"):
        return f"{start} miniature  (4 traces and rewards together)"
    return f"tandem evaluate --model {config.run.dir}/model --data YOUR.parquet"
