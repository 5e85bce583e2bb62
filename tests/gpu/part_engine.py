"""The torch engine beside transformers' ``generate``: ``tests/benchmarks/engines.py`` on the device."""

from __future__ import annotations

import argparse

import engines
import torch
from record import Recorder
from sizes import Sizes

from tandem.rollout.vllm import vllm_version


def run(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """Both lengths, in bfloat16; vLLM too where it is installed and there is a GPU."""
    given = argparse.Namespace(pairs=1, wall=True, dtype="bfloat16")
    sides = ["generate", "torch"]
    if device.type == "cuda" and vllm_version.installed():
        sides.append("vllm")
    else:
        why = "no GPU" if device.type == "cpu" else "vLLM isn't installed"
        record.not_run("vllm", why)
    with record.case("engines"):
        for found in engines.measure(sizes.engine, given, sides):
            rates = found["tokens_per_second"]
            for side, ratio in found["ratio"].items():
                record.figures(
                    f"{side}, {found['case']}",
                    engine=side,
                    lengths=found["case"],
                    dtype="bfloat16",
                    tokens_per_second=rates[side],
                    generate_tokens_per_second=rates["generate"],
                    ratio=ratio,
                )
