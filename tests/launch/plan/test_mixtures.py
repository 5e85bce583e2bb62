"""The sizes of mixtures of experts and of tied models, against small models of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from tandem.common.config import LoraConfig
from tandem.launch.plan import sizes
from tandem.launch.plan.sizes import shape_of


@pytest.mark.parametrize(
    ("name", "width"),
    [("Qwen3 MoE", 16), ("Qwen2 MoE", 16), ("Mixtral", 48), ("OLMoE", 48), ("Granite MoE", 48)],
)
def test_a_mixture_has_all_its_experts_and_multiplies_by_those_that_are_chosen(
    name: str, width: int, tmp_path: Path
) -> None:
    built = families.model(families.family(name))
    built.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape is not None
    count = sum(one.numel() for one in built.parameters())
    assert shape.parameters == shape.counted == count
    # Two layers, each with two of four experts that a token doesn't pass; and the input's embedding.
    assert shape.multiplied == count - 2 * 3 * 32 * 2 * width - 48 * 32
    norms = sum(
        one.numel() for key, one in built.named_parameters() if "q_norm" in key or "k_norm" in key
    )
    without = replace(shape, counted=None)
    assert without.parameters == count - norms
    assert without.multiplied == shape.multiplied - norms
    adapted = [
        module
        for key, module in built.named_modules()
        if key.endswith("_proj") and isinstance(module, torch.nn.Linear)
    ]
    assert shape.adapters(LoraConfig(rank=2)) == 2 * sum(sum(one.weight.shape) for one in adapted)


def test_a_model_is_tied_by_default_as_its_class_in_transformers_is() -> None:
    """Saved configs leave a setting out that has its default."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kinds = {family.kind for family in families.FAMILIES}
    # Encoders that may be used as decoders are left out.
    kinds |= {"biogpt", "granite_swa", "modernbert-decoder", "youtu", "zamba", "zamba2"}
    kinds |= {"cohere_compass_text", *sizes._TIED}
    for kind in sorted(kinds & set(CONFIG_MAPPING)):
        settings = AutoConfig.for_model(kind)
        content = settings.to_dict()
        tied = content.pop("tie_word_embeddings", settings.tie_word_embeddings)
        shape = sizes.from_config(kind, content)
        if shape is not None:
            assert (kind, shape.tied) == (kind, tied)


@pytest.mark.parametrize("name", ["DeepSeek V3", "Llama 4", "Qwen3-Next", "gpt-oss"])
def test_the_sizes_of_other_mixtures_are_not_known(name: str, tmp_path: Path) -> None:
    families.model(families.family(name)).config.save_pretrained(tmp_path)
    assert shape_of(str(tmp_path)) is None


@pytest.mark.parametrize("key", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_a_mixture_with_dense_layers_has_no_known_sizes(key: dict[str, Any]) -> None:
    config = families.model(families.family("Qwen3 MoE")).config.to_dict()
    assert sizes.from_config("mixed", config) is not None
    assert sizes.from_config("mixed", config | key) is None
