"""Adapters for tests: random tensors, and PEFT's model with them as what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tandem.common.adapters import adapted_layers, adapter_tensors
from tandem.common.config.learner import LoraConfig

SIZE = 0.15
"""Standard deviation of A and B: large enough for other greedy tokens than the base model's."""


def drawn(model: Any, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    """Random A and B of every layer that ``lora`` names, by the names by which they travel."""
    generator = torch.Generator().manual_seed(seed)
    names = adapter_tensors(adapted_layers(model, lora), lora.rank)
    return {
        name: (torch.randn(shape, generator=generator) * SIZE).to(model.dtype)
        for name, shape in names
    }


def with_adapters(model: Any, lora: LoraConfig, tensors: dict[str, torch.Tensor]) -> Any:
    """PEFT's model with these adapters, not merged; takes over the model."""
    import peft

    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        use_rslora=lora.rslora,
        target_modules=lora.targets if lora.targets == "all-linear" else list(lora.targets),
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, settings)
    take_on(adapted, tensors)
    return adapted.eval()


def take_on(adapted: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Gives PEFT's model these adapters; every one of its own gets other values."""
    theirs = {n: p for n, p in adapted.named_parameters() if ".lora_" in n}
    names = {f"base_model.model.{n}".replace(".weight", ".default.weight"): n for n in tensors}
    assert names.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(tensors[names[name]])


def merged(model: Any, lora: LoraConfig, tensors: dict[str, torch.Tensor]) -> Any:
    """A plain model with the adapters in its weights; takes over the model."""
    return with_adapters(model, lora, tensors).merge_and_unload().eval()


def greedy(model: Any, prompt: list[int], new: int, end: int) -> tuple[list[int], float]:
    """What ``generate`` makes of a prompt, up to and with the end token; and the least distance of the
    two best logits on the way."""
    row = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            input_ids=row,
            attention_mask=torch.ones_like(row),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=end,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(made.logits, dim=1).topk(2, dim=-1).values[0]
    tokens = made.sequences[0, len(prompt) :].tolist()
    return tokens, float((best[:, 0] - best[:, 1]).min())


def logprobs(model: Any, row: list[int]) -> torch.Tensor:
    """``[S - 1]`` log-probs of a row's tokens but the first."""
    tokens = torch.tensor([row])
    with torch.no_grad():
        scores = model(input_ids=tokens).logits.log_softmax(-1)
    return scores[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    """A model folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Factories of engines, named by import path.

taken: list[LoraConfig] = []


def no_adapters(model: Any, rollout: Any, *, max_rows: int) -> Any:
    """Of an engine that knows of none."""
    raise AssertionError


def takes(model: Any, rollout: Any, *, max_rows: int, lora: LoraConfig) -> Any:
    """Of one that does."""
    import rollout_tiny_models as tiny_models

    from tandem.rollout.decoding.torch_engine import TorchEngine

    taken.append(lora)
    return TorchEngine(tiny_models.model(), tiny_models.tokenizer(), lora=lora)
