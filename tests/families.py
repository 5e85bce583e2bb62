"""Model families of transformers, each made small from its config, with random weights.

What each one is for stands beside it. Windows and chunks are 8 tokens, so that short rows reach
them. ``docs/models.md`` is written from this list and from what the tests find.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 48
LONGEST = 40
"""Tokens of the longest row that is tried."""
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""The names of GPT-2's config."""
WINDOW: dict[str, Any] = {"sliding_window": 8}
MIXED: dict[str, Any] = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
HEAD: dict[str, Any] = {"head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type with what it has beyond matrices, rotary attention and a gated MLP."""

    name: str
    """As it stands in the documentation."""
    kind: str
    """transformers' ``model_type``."""
    shows: str
    """What of it a learner or an engine could get wrong."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of its config, over :data:`BASE`."""
    base: dict[str, Any] = field(default_factory=lambda: BASE)
    learner: str = ""
    """Why the learner and the reference model refuse it; empty = its log-probs are the model's own."""
    engine: str = ""
    """Why the torch engine refuses it; empty likewise."""
    shares: bool = True
    """Whether the learner shares prompts on a CPU."""
    renamed: bool = False
    """Whether transformers names parameters otherwise than the checkpoint does."""


def _of(name: str, kind: str, shows: str, **given: Any) -> Family:
    ours = {
        key: given.pop(key) for key in ("learner", "engine", "shares", "renamed") if key in given
    }
    base = given.pop("base", BASE)
    return Family(name=name, kind=kind, shows=shows, sizes=given, base=base, **ours)


FAMILIES = [
    _of("Llama", "llama", "an output matrix of its own"),
    _of(
        "Llama 3",
        "llama",
        "tied matrices, biases, stretched rotary embedding",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    _of("Qwen2", "qwen2", "biases of q, k and v, tied matrices", tie_word_embeddings=True),
    _of(
        "Qwen2 with windows",
        "qwen2",
        "a sliding window in some layers",
        use_sliding_window=True,
        max_window_layers=1,
        **WINDOW,
    ),
    _of("Qwen3", "qwen3", "norms of q and k", **HEAD),
    _of(
        "Qwen3 MoE",
        "qwen3_moe",
        "experts",
        num_experts=4,
        moe_intermediate_size=16,
        **HEAD,
        **EXPERTS,
        renamed=True,
    ),
    _of(
        "Qwen2 MoE",
        "qwen2_moe",
        "experts, one of them shared",
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **EXPERTS,
        renamed=True,
    ),
    _of("Mistral", "mistral", "a sliding window in all layers", **HEAD, **WINDOW),
    _of("Ministral", "ministral", "a sliding window in some layers", **HEAD, **MIXED),
    _of(
        "Mixtral",
        "mixtral",
        "experts, noise of the router, a sliding window",
        num_local_experts=4,
        router_jitter_noise=0.1,
        **EXPERTS,
        **WINDOW,
        renamed=True,
    ),
    _of("Gemma", "gemma", "scaled embeddings, tied matrices", **HEAD),
    _of(
        "Gemma 2",
        "gemma2",
        "caps of logits and of scores, a sliding window",
        final_logit_softcapping=10.0,
        attn_logit_softcapping=20.0,
        **HEAD,
        **WINDOW,
        shares=False,
    ),
    _of("Gemma 3", "gemma3_text", "two rotary embeddings, a sliding window", **HEAD, **MIXED),
    _of(
        "VaultGemma",
        "vaultgemma",
        "a cap of the logits, a sliding window",
        final_logit_softcapping=10.0,
        **HEAD,
        **MIXED,
        shares=False,
    ),
    _of(
        "Phi",
        "phi",
        "a bias of the output, dropout",
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attention_dropout=0.1,
    ),
    _of(
        "Phi 3", "phi3", "a fused q, k and v, a sliding window, dropout", resid_pdrop=0.1, **WINDOW
    ),
    _of(
        "Phi 3.5 MoE",
        "phimoe",
        "experts, a bias of the output, a sliding window",
        num_local_experts=4,
        lm_head_bias=True,
        **EXPERTS,
        **WINDOW,
        shares=False,
        renamed=True,
    ),
    _of(
        "Phi 3 128k",
        "phi3",
        "a rotary embedding that changes with the row's length",
        original_max_position_embeddings=16,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 16,
        },
        shares=False,
        learner="its rotary embedding changes with the longest row of a batch",
        engine="its rotary embedding changes with the row's length",
    ),
    _of("GPT-2", "gpt2", "learned positions, dropout", base=OLD),
    _of(
        "GPT-Neo",
        "gpt_neo",
        "local attention of its own making",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=128,
        eos_token_id=1,
        bos_token_id=2,
        shares=False,
        engine="its local attention counts from the end of the longest row",
    ),
    _of(
        "GPT-NeoX (Pythia)",
        "gpt_neox",
        "parallel residuals, dropout",
        hidden_dropout=0.1,
        attention_dropout=0.1,
        renamed=True,
    ),
    _of(
        "GPT-J",
        "gptj",
        "a bias of the output, dropout",
        base=OLD,
        rotary_dim=8,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        shares=False,
    ),
    _of("StarCoder", "gpt_bigcode", "one head of keys and values", base=OLD, multi_query=True),
    _of(
        "StarCoder2",
        "starcoder2",
        "a sliding window, dropout",
        residual_dropout=0.1,
        embedding_dropout=0.1,
        attention_dropout=0.1,
        **WINDOW,
    ),
    _of(
        "OPT",
        "opt",
        "learned positions, dropout",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        dropout=0.1,
        word_embed_proj_dim=32,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    ),
    _of(
        "BLOOM",
        "bloom",
        "ALiBi in place of positions, dropout",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        eos_token_id=1,
        bos_token_id=2,
        shares=False,
    ),
    _of(
        "Falcon",
        "falcon",
        "parallel attention, one head of keys and values, dropout",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        max_position_embeddings=128,
        eos_token_id=1,
        bos_token_id=2,
        shares=False,
    ),
    _of(
        "MPT",
        "mpt",
        "ALiBi in place of positions",
        base={},
        vocab_size=VOCABULARY,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=128,
        eos_token_id=1,
        bos_token_id=2,
        shares=False,
    ),
    _of("StableLM", "stablelm", "partly rotated heads, dropout", hidden_dropout=0.1, shares=False),
    _of("Cohere (Command R)", "cohere", "a factor of the logits", logit_scale=0.25),
    _of("Cohere 2", "cohere2", "a factor of the logits, windows", logit_scale=0.25, **MIXED),
    _of(
        "Granite",
        "granite",
        "multipliers of embeddings, residuals, scores and logits",
        logits_scaling=4.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    _of(
        "Granite MoE",
        "granitemoe",
        "experts, a divisor of the logits",
        logits_scaling=4.0,
        num_local_experts=4,
        **EXPERTS,
        renamed=True,
    ),
    _of("HyperCLOVA X", "hyperclovax", "a factor of the logits", logits_scaling=0.5),
    _of("nanochat", "nanochat", "a cap of the logits", final_logit_softcapping=5.0),
    _of("OLMo", "olmo", "clipped q, k and v, norms without weights", clip_qkv=1.0),
    _of("OLMo 2", "olmo2", "norms after the layers"),
    _of("OLMo 3", "olmo3", "norms after the layers, windows", **MIXED),
    _of("OLMoE", "olmoe", "experts", num_experts=4, **EXPERTS, renamed=True),
    _of("SmolLM3", "smollm3", "layers without rotary embedding", no_rope_layers=[1, 0]),
    _of(
        "EXAONE 4",
        "exaone4",
        "windows, global layers without rotary embedding",
        sliding_window_pattern=2,
        **MIXED,
    ),
    _of("Nemotron", "nemotron", "squared ReLU, norms with 1 + w", **HEAD, shares=False),
    _of("GLM", "glm", "partly rotated heads", **HEAD),
    _of("GLM 4", "glm4", "norms on both sides of the layers", **HEAD),
    _of("ERNIE 4.5", "ernie4_5", "interleaved rotary embedding", **HEAD),
    _of("Hunyuan", "hunyuan_v1_dense", "norms of q and k after the rotation", **HEAD),
    _of(
        "Seed-OSS",
        "seed_oss",
        "dropout of residuals",
        residual_dropout=0.1,
        attention_dropout=0.1,
        **HEAD,
    ),
    _of(
        "DeepSeek V3",
        "deepseek_v3",
        "latent keys and values of unlike sizes, experts",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        **EXPERTS,
        renamed=True,
    ),
    _of(
        "gpt-oss",
        "gpt_oss",
        "attention sinks, experts, windows",
        num_local_experts=4,
        **EXPERTS,
        **HEAD,
        **MIXED,
        shares=False,
    ),
    _of(
        "Llama 4",
        "llama4_text",
        "attention in chunks, experts",
        num_local_experts=2,
        attention_chunk_size=8,
        intermediate_size_mlp=48,
        **HEAD,
        shares=False,
    ),
    _of(
        "Falcon-H1",
        "falcon_h1",
        "Mamba beside attention, a multiplier of the logits",
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
        lm_head_multiplier=0.5,
        **HEAD,
        shares=False,
        engine="layers of hybrid",
    ),
    _of(
        "LFM2",
        "lfm2",
        "convolutions between attention",
        layer_types=["conv", "full_attention"],
        shares=False,
        engine="layers of conv",
    ),
    _of(
        "Qwen3-Next",
        "qwen3_next",
        "linear attention, experts",
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        **HEAD,
        **EXPERTS,
        shares=False,
        engine="layers of linear_attention",
        renamed=True,
    ),
]
NAMES = [family.name for family in FAMILIES]


def family(name: str) -> Family:
    """By its name."""
    return FAMILIES[NAMES.index(name)]


def model(of: Family, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model whose logits are spread out; its attention is what ``auto`` takes on a CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tandem.common.models import choose_attention

    config = AutoConfig.for_model(of.kind, **{**of.base, **of.sizes})
    attention = choose_attention("auto", "cpu", dtype, config)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if any(part in name for part in ("A_log", "dt_bias", ".D")):
                continue  # A recurrence with any other numbers needn't be stable.
            if parameter.ndim > 1:
                spread = 0.35 if "emb" in name or "wte" in name else 0.2
                parameter.normal_(0.0, spread)
            elif "norm" in name or "ln" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 0.3)
    torch.random.set_rng_state(state)
    return built
