"""Random models of a few thousand parameters, and a tokenizer of 32 ids, for engine tests."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 32
EOS = 1


def tokenizer() -> Any:
    """The miniature's tokenizer: 32 ids, ``<eos>`` is 1."""
    from tandem.launch.miniature.tokenizer import build

    return build()


def model(kind: str = "qwen2", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random causal model whose logits are spread out enough for samples to differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if kind == "gpt2":
        sizes = {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "eos_token_id": EOS,
            "bos_token_id": None,
        }
    if kind == "qwen3":
        sizes["head_dim"] = 8
    if kind == "qwen2":
        sizes["tie_word_embeddings"] = True
    config = AutoConfig.for_model(kind, **sizes)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.35 if "embed" in name or "wte" in name else 0.2)
            elif "norm" in name or "ln" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 0.3)
    torch.random.set_rng_state(state)
    return built.eval()


def weights(of: Any) -> dict[str, torch.Tensor]:
    """A model's parameters, copied, by name."""
    return {name: p.detach().clone() for name, p in of.named_parameters()}
