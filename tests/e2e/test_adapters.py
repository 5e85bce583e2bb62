"""Offline runs with adapters: killed and resumed to the same bytes, exported, and refused on another base."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import TANDEM, Run, step

from tandem.common.models import resolve

LORA = ("learner.lora.rank=2", "learner.lora.alpha=4", "learner.lora.dropout=0.1")
SETTINGS = (
    *("run.deterministic=true", "run.steps=12", "learner.optimizer.lr=5e-3"),
    *("learner.checkpoint_every=4", "evaluate.at_start=false", "evaluate.at_end=false"),
)


def offline(cwd: Path, name: str, *words: str) -> Run:
    return Run(cwd, "offline", "miniature-sft", f"run.dir={name}", *LORA, *SETTINGS, *words)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.byhand
@pytest.mark.timeout(600)
def test_a_run_with_adapters_resumes_to_the_same_bytes_and_exports_both_forms(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    shutil.copytree(resolve("miniature"), base)
    at = f"model.path={base}"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = offline(tmp_path, "whole", at)
    assert first.wait() == 0, first.said()
    begun = offline(tmp_path, "cut", at)
    begun.wait_for(lambda: step(cut) >= 6, "steps")
    begun.end()

    # On other weights the adapters mean something else.
    weights = base / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-2] + b"\x3d\x3d")
    refused = offline(tmp_path, "cut", at)
    assert refused.wait() != 0
    assert "has adapters of a base model with the digest" in refused.said()
    weights.write_bytes(content)
    other = offline(tmp_path, "cut", at, "learner.lora.rank=3")
    assert other.wait() != 0
    assert "learner.lora.rank: 2 -> 3" in other.said()

    again = offline(tmp_path, "cut", at)
    assert again.wait() == 0, again.said()
    trained = {one["step"]: one["train/loss"] for one in records(whole) if "train/loss" in one}
    assert sorted(trained) == list(range(1, 13))
    assert {
        one["step"]: one["train/loss"] for one in records(cut) if "train/loss" in one
    } == trained
    assert trained[12] < 0.7 * trained[1]
    assert files(cut / "model") == files(whole / "model")
    assert files(cut / "adapter") == files(whole / "adapter")
    assert all(0 < one["weights/bytes_share"] < 0.1 for one in records(whole) if "train/lr" in one)
    (line,) = [
        line
        for line in (whole / "logs" / "learner-0.log").read_text().splitlines()
        if "rank 2" in line
    ]
    assert "5.4% of the model's" in line

    newest = max((whole / "checkpoints").glob("step-*"))
    kept = json.loads((newest / "state.json").read_text())["state"]["lora"]
    assert (kept["rank"], kept["targets"]) == (2, "all-linear")
    exported = subprocess.run(
        [*TANDEM, "export", "whole", "--out", "out"], cwd=tmp_path, capture_output=True, text=True
    )
    assert exported.returncode == 0, exported.stderr
    assert files(tmp_path / "out") == files(whole / "model")
    assert files(tmp_path / "out-adapter") == files(whole / "adapter")
    check_forms(whole, base)


def check_forms(run: Path, base: Path) -> None:
    """The merged model has the logits of base and adapter, and isn't the base.

    In float64, since the miniature's logits of 30 carry rounding of 1e-4 in float32; the merged weights were
    rounded to float32 once.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.arange(40).reshape(2, 20) % 24
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).double()
    whole = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).double()
    with torch.no_grad():
        alone = plain(ids).logits
        merged = whole(ids).logits
        apart = PeftModel.from_pretrained(plain, run / "adapter").double()(ids).logits
    torch.testing.assert_close(merged, apart, atol=5e-5, rtol=0)
    assert float((merged - alone).abs().max()) > 0.1
