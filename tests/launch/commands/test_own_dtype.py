"""The dtype in which `tandem evaluate` and `tandem serve` load a model of which no setting names one."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tandem.common import models
from tandem.common.config import Config
from tandem.launch.commands import evaluate, serve


def folder(place: Path, dtype: str | None) -> str:
    """The miniature, as it would be if it were stored in this dtype."""
    made = place / str(dtype)
    shutil.copytree(models.resolve("miniature"), made)
    settings = json.loads((made / "config.json").read_text())
    del settings["torch_dtype"]
    settings["dtype"] = dtype
    (made / "config.json").write_text(json.dumps(settings))
    return str(made)


def evaluated(*words: str, model: list[str]) -> Config:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    named = [word for one in model for word in ("--model", one)]
    return evaluate._config(parser.parse_args([*words, *named, "--data", "none.parquet"]))[0]


@pytest.mark.parametrize(
    ("stored", "fast", "dtype"),
    [
        ("bfloat16", True, "bfloat16"),
        ("bfloat16", False, "float32"),
        # Whether a CPU has operations in float16 depends on torch and vLLM.
        ("float16", True, "float32"),
        ("float8_e4m3fn", True, "float32"),
        (None, True, "float32"),
    ],
)
def test_on_a_cpu_a_model_is_loaded_as_it_is_stored_where_that_is_fast(
    stored: str | None, fast: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(models, "has_fast_bfloat16", lambda: fast)
    model = folder(tmp_path, stored)
    assert evaluated(model=[model]).engine_dtype == dtype
    assert serve._of_model(model, [], None).engine_dtype == dtype


@pytest.mark.parametrize(
    ("stored", "capability", "dtype"),
    [
        ("bfloat16", "0, 8.0, GPU-a\\n1, 9.0, GPU-b", "bfloat16"),
        ("bfloat16", "0, 9.0, GPU-a\\n1, 7.5, GPU-b", "float32"),
        # The mask leaves the first two.
        ("bfloat16", "0, 9.0, GPU-a\\n1, 8.0, GPU-b\\n2, 7.5, GPU-c", "bfloat16"),
        ("bfloat16", "0, [N/A], GPU-a", "bfloat16"),
        ("float16", "0, 7.5, GPU-a", "float16"),
    ],
)
def test_on_a_gpu_a_model_is_loaded_as_it_is_stored_where_that_is_fast(
    stored: str, capability: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nprintf "{capability}\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert serve._of_model(folder(tmp_path, stored), [], None).engine_dtype == dtype


def test_a_setting_or_a_preset_stands_above_the_models_own_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "has_fast_bfloat16", lambda: True)
    model = folder(tmp_path, "bfloat16")
    for words in (["model.dtype=float32"], ["rollout.dtype=float32"]):
        assert evaluated(*words, model=[model]).engine_dtype == "float32"
        assert serve._of_model(model, words, None).engine_dtype == "float32"
    assert evaluated("miniature", model=[model]).engine_dtype == "float32"


def test_models_that_are_stored_differently_are_compared_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "has_fast_bfloat16", lambda: True)
    both = [folder(tmp_path, "bfloat16"), folder(tmp_path, "float32")]
    for order in (both, both[::-1]):
        assert evaluated(model=order).engine_dtype == "float32"
    assert evaluated(model=both[:1]).engine_dtype == "bfloat16"
