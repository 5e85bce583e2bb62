"""The policy as one module: token ids in, log-probs and entropies of given tokens out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from . import shared_prompts
from .logprobs import token_logprobs
from .shared_prompts import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("tandem.learner")

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
        self.shares_prompts = False

    def forward(
        self,
        input_ids: Tensor,
        index: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        entropy_gradient: bool = False,
        layout: Layout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``[N]`` log-probs and ``[N]`` entropies; see :class:`~.microbatch.MicroBatch`."""
        extra = {}
        if layout is not None:
            extra = {"position_ids": layout.positions, shared_prompts.ARGUMENT: layout}
        hidden = self.body(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
        logprobs, entropy = token_logprobs(
            picked, self.head.weight, targets, temperature, entropy_gradient=entropy_gradient
        )
        return logprobs, entropy

    def share_prompts(self) -> bool:
        """Switches to attention over shared prompts where the model can do it.

        Tries it on a few rows: a model with an attention of its own kind (sliding windows,
        its own masks) gives other log-probs, and keeps padded rows.
        """
        config = self.model.config
        before = config._attn_implementation
        device = next(self.model.parameters()).device
        if before != "sdpa" or device.type != "cpu":
            return False
        shared_prompts.register()
        try:
            expected = self._score_trial(None)
            self.model.set_attn_implementation(shared_prompts.IMPLEMENTATION)
            found = self._score_trial(_trial_layout())
            close = 1e-3 if found.dtype == torch.float32 and _is_float32(self.model) else 0.2
            self.shares_prompts = bool((found - expected).abs().max() < close)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            log.info(f"keeps padded rows: {type(error).__name__}: {error}")
        if not self.shares_prompts:
            self.model.set_attn_implementation(before)
        return self.shares_prompts

    @torch.no_grad()
    def _score_trial(self, layout: Layout | None) -> Tensor:
        """``[4]`` log-probs of the responses ``[c, d]`` and ``[e]``, ``[f]`` of two prompts."""
        size = self.model.config.get_text_config().vocab_size
        first = torch.arange(8) * 7 % size
        targets = torch.tensor([3, 4, 5, 6]) * 5 % size
        if layout is None:
            # Rows: prompt of 3 and 2 tokens, twice each; then what is read of the response.
            rows = [[0, 1, 2, 3], [0, 1, 2], [4, 5, 6], [4, 5]]
            ids = torch.zeros(4, 4, dtype=torch.int64)
            for number, places in enumerate(rows):
                ids[number, : len(places)] = first[places]
            index = torch.tensor([2, 3, 6, 10])
            return self(ids, index, targets, None)[0]
        return self(first[None, :7], torch.tensor([2, 3, 2, 6]), targets, None, False, layout)[0]


def _trial_layout() -> Layout:
    """Of the rows in :meth:`Policy._score_trial`."""
    return Layout(
        rows=4,
        width=4,
        positions=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
        gather=torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 4, 5, 6, 0, 4, 5, 0, 0]),
        back=torch.tensor([0, 1, 2, 3, 8, 9, 10]),
    )


def _is_float32(model: nn.Module) -> bool:
    return next(model.parameters()).dtype == torch.float32


def count_parameters(module: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def device_of(rank: int) -> torch.device:
    """``cuda:<rank>`` where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")
