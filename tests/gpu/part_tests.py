"""The tests that need GPUs: those marked ``gpu``, wherever they are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from record import LAST_LINES, Recorder
from sizes import Sizes

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from stages import read_report  # noqa: E402

NCCL = TESTS / "weights" / "test_gpus.py"
"""The tests of which most need two GPUs."""


def marked() -> list[Path]:
    """Files with a test that is marked ``gpu``."""
    files = TESTS.glob("**/test_*.py")
    return sorted(
        one
        for one in files
        if "mark.gpu" in one.read_text(encoding="utf-8") and one.name != "test_kit.py"
    )


def nccl(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The NCCL way of weights and its faults, and what one GPU can run of them."""
    _pytest("nccl", [NCCL], device, record)


def others(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """All others; on a CPU they are collected and skipped."""
    files = [one for one in marked() if one != NCCL]
    if not files:
        record.not_run("tests", "no other test is marked gpu")
        return
    _pytest("tests", files, device, record)


def _pytest(name: str, files: list[Path], device: torch.device, record: Recorder) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
                *(str(one) for one in files),
                f"--junitxml={report}",
            ],
            cwd=TESTS.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found = read_report(report)
    for reason in sorted(set(found.skipped.values())):
        skipped = sorted(test for test, why in found.skipped.items() if why == reason)
        record.not_run(f"{len(skipped)} tests", reason, tests=skipped)
    if found.passed or found.failed:
        record.figures(
            name,
            files=len(files),
            passed=len(found.passed),
            failed=len(found.failed),
            skipped=len(found.skipped),
        )
    # 5: every test was deselected.
    if found.failed or ran.returncode not in (0, 5):
        lines = ran.stdout.strip().splitlines()[-LAST_LINES:]
        what = ", ".join(sorted(found.failed)) or f"pytest ended with status {ran.returncode}"
        record.failed(name, what, lines)
