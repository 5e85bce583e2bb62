"""A critic as one module: token ids in, the value of the state before each given token out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..rows.microbatch import Layout
from . import layouts
from .policy import Policy, checkpoint_in_evaluation


class ValueHead(nn.Module):
    """``V = w · h + b`` of a hidden state h, computed in float32. It begins at 0, so that V does.

    Args:
        width: size of a hidden state, H.
        like: the parameters get its dtype and device.
    """

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=like.dtype, device=like.device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` to ``[n]`` float32."""
        values = nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        return values.squeeze(-1)


class ValueModel(nn.Module):
    """The body of a language model under a :class:`ValueHead`.

    V_t is the value of the state before token t: the head reads the position that predicts the token, the
    same as its log-prob does. As in :class:`~.policy.Policy`, the model stays in evaluation mode.

    Args:
        policy: a language model, whose output head is left out.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.body = policy.body
        self._config = policy.model.config
        embeddings = policy.model.get_input_embeddings().weight
        self.head = ValueHead(policy.model.config.get_text_config().hidden_size, embeddings)
        self._checkpointed = checkpoint_in_evaluation(self)
        self.train(self.training)

    def train(self, mode: bool = True) -> ValueModel:
        """Turns gradient checkpointing on or off; nothing else depends on the mode."""
        self.training = mode
        self.body.eval()
        for layer in self._checkpointed:
            layer.training = mode
        return self

    def forward(self, input_ids: Tensor, index: Tensor, layout: Layout | None = None) -> Tensor:
        """``[N]`` float32 values; see :class:`~tandem.learner.rows.microbatch.MicroBatch`."""
        extra: dict[str, Any] = {}
        if layout is not None:
            extra = layouts.arguments(layout, self._config._attn_implementation)
        hidden = self.body(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
        values: Tensor = self.head(picked)
        return values
