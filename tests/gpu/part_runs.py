"""Whole runs of ``tandem start`` on the device: real Redis, processes, weights and checks of every commit."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import commit_check
import torch
from engines import save_model
from measure import free
from record import NotRunError, Recorder
from sizes import Sizes, case_of

from tandem.common.models import resolve
from tandem.rollout.vllm import vllm_version

MEMBER = "weights/rollout-0/"
QUIET = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")
"""Without evaluations."""


def miniature(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The miniature as it is shipped, in float32."""
    with record.case("miniature"):
        _run(device, sizes, record, "miniature", [f"run.steps={sizes.run_steps}"])


def half_precision(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The miniature with learner and engine in bfloat16."""
    settings = [f"run.steps={sizes.half_steps}", "model.dtype=bfloat16", *QUIET]
    with record.case("miniature in bfloat16"):
        _run(device, sizes, record, "miniature in bfloat16", settings)


def model(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The smaller model with random weights in the miniature's place: it learns nothing, and moves as many
    bytes as a real one."""
    with record.case("random model"), tempfile.TemporaryDirectory() as folder:
        case = case_of(sizes.half, rows=1, batches=1, prompt=1, new=1)
        save_model(case, Path(folder), dtype=torch.bfloat16, device=str(device))
        free(device)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(resolve("miniature")) / name, folder)
        settings = [
            f"run.steps={sizes.model_steps}",
            f"model.path={folder}",
            "model.dtype=bfloat16",
            "learner.optimizer.lr=1e-6",
            *QUIET,
        ]
        _run(device, sizes, record, "random model", settings)


def vllm(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The miniature with vLLM, where it is installed."""
    with record.case("miniature with vLLM"):
        if device.type == "cpu":
            raise NotRunError("no GPU")
        if not vllm_version.installed():
            raise NotRunError("vLLM isn't installed")
        settings = [
            f"run.steps={sizes.half_steps}",
            "rollout.engine=vllm",
            # The learner is on the same GPU.
            "rollout.vllm.gpu_memory_utilization=0.3",
        ]
        _run(device, sizes, record, "miniature with vLLM", settings)


def _run(
    device: torch.device, sizes: Sizes, record: Recorder, name: str, settings: Iterable[str]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        where = ["launch.gpus=none"]
        if device.type == "cuda":
            where = ["launch.gpus=required", "launch.share_gpu=true"]
        start = time.perf_counter()
        ran = command(
            *("start", "miniature", "--plain", f"run.dir={folder}"),
            *(*where, *sizes.run_settings, *settings),
        )
        seconds = time.perf_counter() - start
        if ran.returncode:
            lines = [*_logs(folder), *ran.stdout.strip().splitlines()[-12:]]
            record.failed(name, f"tandem start ended with status {ran.returncode}", lines)
            return
        record.figures(name, seconds=seconds, **_figures(folder))
        found = commit_check.complaints(folder)
        if found:
            record.failed(name, "a check of new weights or of ratios failed", found[:12])


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command of Tandem to its end; its two outputs are one."""
    return subprocess.run(
        [sys.executable, "-m", "tandem.launch.cli", *words],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def _logs(folder: Path) -> list[str]:
    """The last lines of each process's log."""
    found = []
    for log in sorted((folder / "logs").glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"{log.stem}: {line}" for line in lines[-4:]]
    return found


def _figures(folder: Path) -> dict[str, Any]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    steps = [one for one in records if "train/loss" in one]

    def every(name: str) -> list[float]:
        return [one[name] for one in steps if one.get(name) is not None]

    def middle(name: str) -> float | None:
        values = every(name)
        return statistics.median(values) if values else None

    reward = every("reward/accuracy")
    accuracies = [
        value
        for one in records
        for key, value in one.items()
        if key.startswith("eval/") and key.endswith("/accuracy") and key.count("/") == 2
    ]
    tenth = max(1, len(reward) // 10)
    checks = commit_check.figures(folder)
    return {
        "steps": len(steps),
        "step_seconds": middle("time/total"),
        "compute_seconds": middle("time/compute"),
        "wait_seconds": middle("time/wait/batch"),
        "publish_seconds": middle("time/publish"),
        "reward_first": statistics.mean(reward[:tenth]) if reward else None,
        "reward_last": statistics.mean(reward[-tenth:]) if reward else None,
        "accuracy_first": accuracies[0] if accuracies else None,
        "accuracy_last": accuracies[-1] if accuracies else None,
        "weights_seconds": middle(f"{MEMBER}seconds"),
        "weights_gb_per_second": middle(f"{MEMBER}gb_per_second"),
        "pause_seconds": middle(f"{MEMBER}pause_seconds"),
        "latency_seconds": middle(f"{MEMBER}latency_seconds"),
        "checks": checks["checks"],
        "checks_failed": checks["failed"],
        "ratio_alarms": checks["alarms"],
        "nearest_to_bound": checks["nearest"],
        "check_seconds": checks["check_seconds"],
        "score_seconds": checks["score_seconds"],
    }
