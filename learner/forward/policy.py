"""The policy as one module: token ids in, log-probs and entropies of given tokens out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError

from ...common.agreement import BOUNDS, Difference, Probe, one_line
from ...common.errors import ConfigError
from ..rows.microbatch import MicroBatch
from . import shared_prompts
from .head import head_of
from .logprobs import token_logprobs
from .shared_prompts import Layout
from .verification import difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..adapters import Adapters

log = logging.getLogger("tandem.learner")

LONGEST = 2048
"""Length of the longest row, in tokens, if nothing is known about rows."""

EXACT = BOUNDS[torch.float32]
"""Difference of log-probs, in nats, that float32 rounding causes."""


class Policy(nn.Module):
    """Wraps a causal language model so that only the needed positions get logits.

    Rows are padded on the right and attention is causal, so no token can see padding and no mask is
    passed: with a mask, SDPA would leave its fast causal path. ``use_cache`` is off, because otherwise
    transformers misinterprets a call without a mask.

    The model stays in evaluation mode, even while it trains: dropout, router noise and the like would
    make π_θ differ from the policy that sampled.

    Args:
        model: its parameters must be whole; DeepSpeed may partition them afterwards.
        adapters: those that are in the model, if there are any. Their dropout is the only one that training
            turns on.

    Raises:
        ConfigError: the model has no output matrix, or changes its logits in an unknown way.
    """

    def __init__(self, model: PreTrainedModel, adapters: Adapters | None = None) -> None:
        super().__init__()
        self.model = model
        self._adapters = adapters
        self.body = _body_of(model)
        self.head = head_of(model)
        if adapters is not None:
            self._frozen = {
                name
                for name, parameter in self.named_parameters(remove_duplicate=False)
                if not parameter.requires_grad
            }
            self.register_state_dict_post_hook(_leave_frozen_out)
        self._checkpointed = checkpoint_in_evaluation(self)
        self.shares_prompts = False
        self.train(self.training)

    def train(self, mode: bool = True) -> Policy:
        """Turns gradient checkpointing and the adapters' dropout on or off; nothing else depends on the mode."""
        self.training = mode
        self.model.eval()
        if self._adapters is not None:
            self._adapters.drop(mode)
        for layer in self._checkpointed:
            layer.training = mode
        return self

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
        extra: dict[str, Any] = {} if layout is None else shared_prompts.arguments(layout)
        hidden = self.body(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
        head = self.head
        logprobs, entropy = token_logprobs(
            picked,
            head.weight,
            targets,
            temperature,
            bias=head.bias,
            scale=head.scale,
            cap=head.cap,
            entropy_gradient=entropy_gradient,
        )
        return logprobs, entropy

    def score(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a micro-batch, without gradient."""
        there = micro.to(next(self.model.parameters()).device)
        with torch.no_grad():
            return self(
                there.input_ids,
                there.index,
                there.targets,
                there.temperature,
                False,
                there.layout,
            )

    def share_prompts(self, probe: Probe | None = None) -> bool:
        """Switches to attention over shared prompts if the model can do it.

        It is tested on the probe's rows: a model with a different kind of attention gives other
        log-probs, and keeps padded rows.

        Args:
            probe: the model's probe; None makes one for rows of :data:`LONGEST` tokens.
        """
        config = self.model.config
        before = config._attn_implementation
        if before != "sdpa" or next(self.model.parameters()).device.type != "cpu":
            return False
        if probe is None:
            probe = Probe.of(self.model, LONGEST)
        shared_prompts.register()
        try:
            padded = difference(probe, self.score, share_prompts=False)
            self.model.set_attn_implementation(shared_prompts.IMPLEMENTATION)
            shared = difference(probe, self.score, share_prompts=True)
            # In half precision a small fault is hidden by the bound, but not in comparison with padded rows.
            self.shares_prompts = shared.most <= min(probe.bound, 3 * padded.most + EXACT)
            if not self.shares_prompts:
                log.info(
                    f"keeps padded rows: with shared prompts log-probs are off by "
                    f"{shared.logprob:.2g} nats, with padded rows by {padded.logprob:.2g}"
                )
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            log.info(f"keeps padded rows: {type(error).__name__}: {error}")
        if not self.shares_prompts:
            self.model.set_attn_implementation(before)
        return self.shares_prompts

    def require_own(self, probe: Probe, forward: Any = None, whose: str = "the learner's") -> None:
        """Compares log-probs and entropies with the model's own, padded and with shared prompts.

        Args:
            probe: the model's probe.
            forward: how micro-batches are scored; None = :meth:`score`.
            whose: names what computed the log-probs, for the error.

        Raises:
            ConfigError: they differ by more than the dtype's bound.
        """
        if not probe.rows:
            return
        greatest = Difference()
        try:
            for share in {False, self.shares_prompts}:
                greatest |= difference(probe, forward or self.score, share_prompts=share)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError | DistError):
                raise
            raise ConfigError(
                f"{probe.model}: {whose} log-probs can't be computed: {one_line(error)}: use "
                f"another model"
            ) from error
        attention = self.model.config._attn_implementation
        way_out = "use another model"
        if attention != "eager":
            way_out = f"set model.attention=eager (it is {attention}), or use another model"
        probe.require(greatest, whose, way_out)


def _leave_frozen_out(policy: Policy, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The policy's state without the base model's parameters, which no checkpoint keeps."""
    for name in policy._frozen:
        state.pop(prefix + name, None)


def _body_of(model: PreTrainedModel) -> nn.Module:
    """The part of the model that gives the last hidden states: everything but its head."""
    if model.base_model is not model:
        return model.base_model
    embeddings = model.get_input_embeddings()
    for child in model.children():
        if any(module is embeddings for module in child.modules()):
            return child
    return model


def checkpoint_in_evaluation(whole: nn.Module) -> list[nn.Module]:
    """Layers of a module that are checkpointed, arranged so that they compute as in evaluation mode.

    transformers checkpoints a layer that is in training mode. It checks this before it calls the layer's
    hooks, so these put the layer itself into evaluation mode, at first and when it is recomputed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    def begin(module: nn.Module, inputs: Any) -> None:
        module.training = False

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        module.training = whole.training

    layers = [
        module
        for module in whole.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    for layer in layers:
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end, always_call=True)
    return layers


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, tied ones counted once."""
    return sum(map(size_of, module.parameters()))


def size_of(parameter: Tensor) -> int:
    """Number of elements of a parameter, also of one that ZeRO-3 has spread over the ranks."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def device_of(rank: int) -> torch.device:
    """``cuda:<rank>`` if there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")
