"""``model``: the policy that is trained."""

from __future__ import annotations

from typing import Literal

from .section import Section


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = "miniature"
    """A Hugging Face folder, a hub name, or ``miniature`` or ``miniature-tools`` for a model that is shipped."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the learner's forward and backward pass; master weights stay fp32. float16 searches for the scale of
    its loss (``docs/memory.md``); it trains only on GPUs."""
    attention: Literal["auto", "flash_attention_2", "varlen", "flex", "sdpa", "eager"] = "auto"
    """The learner packs rows without padding under flash_attention_2, varlen (torch's own kernel for variable
    lengths) and flex. ``auto`` in bfloat16 on CUDA is flash_attention_2 if the package flash-attn is there, else
    varlen; elsewhere sdpa; and eager if sdpa can't do what the model needs (a cap of the scores, attention
    sinks)."""
    kernels: Literal["auto", "liger", "plain"] = "auto"
    """The learner's kernels of norms, rotary positions and gated MLPs: Liger's fused ones, or transformers' plain
    operations. ``auto`` is Liger's on a GPU, if liger-kernel is installed, has some for the model, and they give the
    model's own log-probs."""
