"""``model``: the policy that is trained."""

from __future__ import annotations

from typing import Literal

from .section import Section


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = "miniature"
    """A Hugging Face folder, a hub name, or ``miniature`` for the model that is shipped."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the learner's forward and backward pass; master weights stay fp32."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """``auto``: flash_attention_2 if CUDA and the package are there, else sdpa; eager if sdpa
    can't do what the model needs (a cap of the scores, attention sinks)."""
