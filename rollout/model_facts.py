"""What an engine must know about its model: parameters, vocabulary, context, end tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import prompts
from ..common.adapters import adapted_layers, adapter_tensors
from ..common.config.learner import LoraConfig
from ..common.errors import ConfigError, DataError
from ..common.models import local_folder, read_model_config
from ..common.plain import read_object
from .engine import ParameterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an engine must know about its model."""

    specs: tuple[ParameterSpec, ...]
    """Every tensor that new weights consist of: the model's parameters in its order, tied ones once; or
    those of the adapters."""
    parameters: int
    """Number of the model's parameters, tied ones counted once, without adapters."""
    vocabulary: int
    """Number of token ids, which are all below it."""
    context: int
    """Greatest number of tokens of prompt and response together."""
    end_tokens: frozenset[int]
    """Token ids that end a response."""


def facts_of(
    model: Any, tokenizer: Any, *, context: int | None = None, lora: LoraConfig | None = None
) -> ModelFacts:
    """Reads the facts from a transformers model, whose weights may be on the meta device.

    Args:
        model: a causal model in the engine's dtype.
        tokenizer: names the end token.
        context: greatest number of tokens of prompt and response together; None = the model's own limit.
        lora: ``learner.lora``: what new weights consist of if it is set.

    Raises:
        DataError: no end token is named.
        ConfigError: the model has no such layers as ``lora`` names.
    """
    text = model.config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
    return ModelFacts(
        specs=tuple(
            ParameterSpec(name=name, shape=shape, dtype=dtype)
            for name, shape, dtype in _tensors(model, lora)
        ),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        context=min(limit, context or limit),
        end_tokens=frozenset(prompts.end_tokens(tokenizer, model)),
    )


def _tensors(model: Any, lora: LoraConfig | None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor that new weights consist of."""
    if lora is None:
        for name, parameter in model.named_parameters():
            yield name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
        return
    for name, shape in adapter_tensors(adapted_layers(model, lora), lora.rank):
        yield name, shape, str(model.dtype).removeprefix("torch.")


def model_facts(
    path: str,
    *,
    dtype: str,
    context: int | None,
    tokenizer: Any,
    lora: LoraConfig | None = None,
) -> ModelFacts:
    """Reads the facts from a model folder without loading its weights.

    Args:
        path: a Hugging Face folder or a hub name.
        dtype: dtype of the engine's parameters.
        context: greatest number of tokens of prompt and response together; None = the model's own limit.
        tokenizer: names the end token.
        lora: see :func:`facts_of`.

    Raises:
        DataError: no end token is named.
        ConfigError: the model has no such layers as ``lora`` names.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        # These are the parameters that the learner sends: from the same class, ties included.
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    try:
        model.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:
        pass  # The folder has none, so the model's own config decides.
    return facts_of(model, tokenizer, context=context, lora=lora)


def require_checkpoint_names(path: str, specs: Iterable[ParameterSpec]) -> None:
    """Refuses a model whose parameters have other names in transformers than in its checkpoint.

    Weights travel under transformers' names, and an engine that reads checkpoints knows the checkpoint's:
    it would ignore unknown ones, such as experts that transformers holds in one tensor.

    Args:
        path: a model folder, or a hub name, whose weights are fetched: the engine needs them anyway. One without
            safetensors passes.
        specs: the model's parameters.

    Raises:
        ConfigError: a parameter isn't in the checkpoint under its name.
        DataError: the hub didn't give the weights.
    """
    folder = local_folder(path, ("config.json", "*.safetensors", "*.safetensors.index.json"))
    known = _checkpoint_names(folder)
    if not known:
        return
    # Some checkpoints hold the model without its head, and their names lack the first part.
    unknown = [
        spec.name
        for spec in specs
        if spec.name not in known and spec.name.partition(".")[2] not in known
    ]
    if unknown:
        kind = read_model_config(str(folder)).get("model_type")
        raise ConfigError(
            f"rollout.engine=vllm can't take up new weights of model type {kind!r}: transformers "
            f"names {len(unknown)} of its parameters otherwise than the checkpoint does, such as "
            f"{unknown[0]}: set rollout.engine=torch"
        )


def _checkpoint_names(folder: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = read_object(
            index.read_bytes(), str(index), DataError, "get the model's files again"
        )
        return set(content.get("weight_map") or {})
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                names |= set(tensors.keys())
        except (OSError, SafetensorError):
            # Whoever loads it will say what is wrong with it.
            return set()
    return names
