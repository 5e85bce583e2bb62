"""The policy as one module: token ids in, log-probs and entropies of given tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from .logprobs import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of models whose logits are more than hidden states times the output matrix."""


class Policy(nn.Module):
    """Wraps a causal language model so that only the wanted positions get logits.

    Rows are padded on the right and attention is causal, so no token can see padding and no
    mask is passed: with one, SDPA would leave its fast causal path. ``use_cache`` is off, without
    which transformers takes a call without a mask for something else.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        for key in _LOGIT_CHANGES:
            if getattr(config, key, None) not in (None, 1.0):
                raise ConfigError(
                    f"model type {config.model_type!r} changes its logits ({key}), which the "
                    f"learner's log-probs don't do: use another model"
                )
        # Dropout would make π_θ differ from the policy that sampled.
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if getattr(config, "attention_dropout", 0.0):
            config.attention_dropout = 0.0
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.0
        self.model = model
        self.body = model.base_model
        self.head = model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        index: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """``[N]`` log-probs and ``[N]`` entropies; see :class:`~.microbatch.MicroBatch`."""
        hidden = self.body(input_ids=input_ids, use_cache=False).last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
        logprobs, entropy = token_logprobs(
            picked, self.head.weight, targets, temperature, entropy_gradient=entropy_gradient
        )
        return logprobs, entropy


def count_parameters(module: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def device_of(rank: int) -> torch.device:
    """``cuda:<rank>`` where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")
