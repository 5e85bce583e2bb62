"""Model folders: what is found, and what each kind of wrong folder is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.errors import DataError
from tandem.common.models import choose_attention, load_model, load_tokenizer, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("miniature"), tmp_path / "model"))


def test_miniature_is_the_shipped_model() -> None:
    assert (Path(resolve("miniature")) / "config.json").is_file()
    assert sum(p.numel() for p in load_model("miniature").parameters()) == 113_472


def test_the_dtype_is_the_one_asked_for(folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16", attention="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


def test_a_hub_name_is_left_to_the_hub() -> None:
    assert resolve("Qwen/Qwen2.5-Math-7B") == "Qwen/Qwen2.5-Math-7B"


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "nowhere", "a/b/c"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(DataError, match=rf"model.path={path}: there is no such folder"):
        resolve(path)


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"has no config\.json"):
        load_model(str(folder))
    with pytest.raises(DataError, match="is a file"):
        resolve(str(folder / "tokenizer.json"))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(str(folder))


def test_missing_cut_and_foreign_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="its weights can't be read"):
        load_model(str(folder))
    weights.write_bytes(data)
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    # Left alone, transformers would fill it with random numbers.
    with pytest.raises(DataError, match=r"missing .* such as model\.layers\.1\.mlp\.up_proj"):
        load_model(str(folder))
    weights.unlink()
    with pytest.raises(DataError, match="no weights"):
        load_model(str(folder))


def test_a_tokenizer_decodes_what_it_encodes() -> None:
    tokenizer = load_tokenizer("miniature")
    text = "49-6=43</think> <answer> \\boxed{43} </answer>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_auto_attention_on_a_cpu_is_sdpa() -> None:
    assert choose_attention("auto", "cpu", torch.bfloat16) == "sdpa"
    assert choose_attention("eager", "cpu", torch.float32) == "eager"
