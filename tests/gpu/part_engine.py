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
    _beside_generate("torch", given, sizes, record)
    if device.type == "cuda" and vllm_version.installed():
        _beside_generate("vllm", given, sizes, record)
    else:
        why = "no GPU" if device.type == "cpu" else "vLLM isn't installed"
        record.not_run("vllm", why)


def _beside_generate(
    engine: str, given: argparse.Namespace, sizes: Sizes, record: Recorder
) -> None:
    with record.case(engine):
        for found in engines.measure(sizes.engine, given, ["generate", engine]):
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
