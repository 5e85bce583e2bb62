"""The plan's memory of the learner beside measured memory, for models and settings that fit a CPU.

    .venv/bin/python tests/benchmarks/memory.py
    .venv/bin/python tests/benchmarks/memory.py --only 25m-bf16 25m-lora

Each case is one ``tandem plan miniature-on-policy --measure --json`` with a random model of its size: the longest
step of the learner, in a process of its own. Prints a line of JSON a case with measured bytes by those on paper, for
each part and in all, and at the end whether all of the last are within 15%.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BOUND = 0.15
MODELS = {
    "25m": {"hidden": 384, "layers": 8, "heads": 6, "kv": 2, "mlp": 1536, "vocabulary": 16384},
    "100m": {"hidden": 768, "layers": 12, "heads": 12, "kv": 4, "mlp": 2560, "vocabulary": 16384},
}
LENGTHS = ("data.max_prompt_tokens=64", "rollout.max_new_tokens=193")
BUDGET = {"25m": 4096, "100m": 2048}
CASES: dict[str, tuple[str, ...]] = {
    "miniature": (),
    "25m": (),
    "25m-bf16": ("model.dtype=bfloat16",),
    "25m-bf16-zero0": ("model.dtype=bfloat16", "learner.zero_stage=0"),
    "25m-bf16-zero2": ("model.dtype=bfloat16", "learner.zero_stage=2"),
    "25m-recomputed": ("learner.gradient_checkpointing=true",),
    "25m-bf16-recomputed": ("model.dtype=bfloat16", "learner.gradient_checkpointing=true"),
    "25m-padded": ("model.attention=eager",),
    "25m-small-batch": ("learner.micro_batch_tokens=256",),
    "25m-lora": ("learner.lora={}",),
    "25m-critic": ("learner.objective.name=ppo",),
    "25m-offload": ("learner.zero_stage=2", "learner.offload=optimizer"),
    "25m-bf16-offload": (
        *("model.dtype=bfloat16", "learner.zero_stage=2", "learner.offload=optimizer"),
    ),
    "25m-parameters": ("learner.zero_stage=3", "learner.offload=parameters"),
    "25m-reference": ("learner.objective.kl_coefficient=0.01",),
    "100m": (),
    "100m-bf16": ("model.dtype=bfloat16",),
    "100m-bf16-offload": (
        *("model.dtype=bfloat16", "learner.zero_stage=2", "learner.offload=optimizer"),
    ),
    "100m-recomputed": ("learner.gradient_checkpointing=true",),
    "100m-lora-bf16": ("learner.lora={}", "model.dtype=bfloat16"),
}
"""Name, which begins with the model's, to settings."""


def write_model(name: str, folder: Path) -> None:
    """A random Qwen2 of a size."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = MODELS[name]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        intermediate_size=size["mlp"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def measured(case: str, models: Path) -> dict[str, object]:
    """A case's comparison, as ``tandem plan`` prints it."""
    size = case.partition("-")[0]
    settings = list(CASES[case])
    if size in MODELS:
        folder = models / size
        if not folder.exists():
            write_model(size, folder)
        settings = [
            f"model.path={folder}",
            *LENGTHS,
            f"learner.micro_batch_tokens={BUDGET[size]}",
            *settings,
        ]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tandem.launch.cli", "plan", "miniature-on-policy"),
            *("--measure", "--json", *settings),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr}")
    found: dict[str, object] = json.loads(done.stdout)["measured"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--bytes", action="store_true", help="print the bytes too")
    wanted = parser.parse_args(arguments)
    worst = 0.0
    with tempfile.TemporaryDirectory() as models:
        for case in wanted.only:
            found = measured(case, Path(models))
            paper, real = found["paper"], found["measured"]
            assert isinstance(paper, dict)
            assert isinstance(real, dict)
            ratio = float(str(found["ratio"]))
            worst = max(worst, abs(ratio - 1))
            line = {part: round(real[part] / max(1, size), 3) for part, size in paper.items()}
            print(json.dumps({"case": case, **line, "in all": round(ratio, 3)}), flush=True)
            if wanted.bytes:
                print(json.dumps({"paper": paper, "measured": real, "step": found["step"]}))
    print(json.dumps({"farthest": round(worst, 3), "within": worst <= BOUND}))
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
