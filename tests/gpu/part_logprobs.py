"""Log-probs at Qwen's vocabulary: ``tests/benchmarks/logprobs.py`` on the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from record import LAST_LINES, Recorder
from sizes import Sizes

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "logprobs.py"


def run(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """Slices, plain and Liger's, each in a process of its own, in bfloat16."""
    ran = subprocess.run(
        [
            *(sys.executable, str(BENCHMARK), "--device", device.type, "--dtype", "bfloat16"),
            *sizes.logprobs,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    for text in ran.stdout.splitlines():
        line = json.loads(text)
        if "not run" in line:
            record.not_run(line["variant"], line["not run"])
        elif "variant" in line:
            record.figures(line.pop("variant"), **line)
        else:
            # Whether it is within the benchmark's bounds is a figure; being beyond them is no failure.
            record.figures("sliced by plain", **line)
    # The benchmark's own exit status says whether its bounds hold.
    if '"within_bounds"' not in ran.stdout:
        record.failed("logprobs", "no ratio", ran.stderr.strip().splitlines()[-LAST_LINES:])
