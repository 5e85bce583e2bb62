"""The policy as one module: token ids in, log-probs and entropies of given tokens out."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.nn import functional as F

from ...common.agreement import BOUNDS, Difference, Probe
from ...common.errors import ConfigError
from ...common.memory import is_out_of_memory
from ...common.plain import one_line
from ..rows.microbatch import Layout, LayoutName, MicroBatch
from . import fused, layouts
from .divergence import Lesson, token_divergence
from .head import head_of
from .layouts import Way, rounded
from .logprobs import token_logprobs
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

    Attention is causal, so no token can see padding on the right and no mask is passed: with a mask, SDPA would
    leave its fast causal path. ``use_cache`` is off, because otherwise transformers misinterprets a call without
    a mask, and on a packed line lets rows see each other.

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
        self.layout: LayoutName = "padded"
        """How micro-batches are laid out for it; see :meth:`choose_layout`."""
        self.train(self.training)

    def train(self, mode: bool = True) -> Policy:
        """Turns gradient checkpointing and the adapters' dropout on or off; nothing else depends on the mode."""
        self.training = mode
        if self.model.training:
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
        lesson: Lesson | None = None,
    ) -> tuple[Tensor, ...]:
        """``[N]`` log-probs and ``[N]`` entropies, and with a lesson the ``[N]`` divergences from its teacher; see
        :class:`~..rows.microbatch.MicroBatch`."""
        head = self.head
        count = len(index)
        picked = self._hidden(input_ids, index, layout)
        more = len(picked) - count
        targets = F.pad(targets, (0, more))
        if temperature is not None:
            temperature = F.pad(temperature, (0, more), value=1.0)
        wanted = torch.is_grad_enabled() and (lesson is None or lesson.logprobs)
        with torch.set_grad_enabled(wanted):
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
        found = logprobs[:count], entropy[:count]
        return found if lesson is None else (*found, token_divergence(picked[:count], head, lesson))

    def _hidden(self, input_ids: Tensor, index: Tensor, layout: Layout | None) -> Tensor:
        """``[N', H]`` hidden states at the index, and in bfloat16 on a CPU at some places more."""
        extra: dict[str, Any] = {}
        if self.head.weight.dtype == torch.bfloat16 and not input_ids.is_cuda:
            settings = self.model.config.get_text_config()
            limit = getattr(settings, "max_position_embeddings", None)
            input_ids, index, layout = rounded(input_ids, index, layout, limit)
        if layout is not None:
            extra = layouts.arguments(layout, self.model.config._attn_implementation)
        hidden = self.body(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
        picked: Tensor = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
        return picked

    @torch.no_grad()
    def hidden(self, micro: MicroBatch) -> Tensor:
        """``[N, H]`` hidden states that predict a micro-batch's tokens, without gradient."""
        there = micro.to(next(self.model.parameters()).device)
        return self._hidden(there.input_ids, there.index, there.layout)[: len(there.index)]

    def score(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a micro-batch, without gradient."""
        there = micro.to(next(self.model.parameters()).device)
        with torch.no_grad():
            logprobs, entropy = self(
                there.input_ids,
                there.index,
                there.targets,
                there.temperature,
                False,
                there.layout,
            )
        return logprobs, entropy

    def choose_kernels(
        self, probe: Probe | None = None, kernels: str = "auto", whose: str = "the learner's"
    ) -> None:
        """Takes Liger's fused kernels, if there are some and they give the model's own log-probs, and logs it.

        Args:
            probe: the model's probe; None makes one for rows of :data:`LONGEST` tokens.
            kernels: ``model.kernels`` of the config.
            whose: names the policy in the log.

        Raises:
            ConfigError: ``kernels`` is ``liger``, and the model can't have them.
        """
        if kernels == "plain":
            return
        reason = fused.refusal(self.model)
        if reason is None:
            reason = self._fault_of_kernels(probe or Probe.of(self.model, LONGEST))
        if reason is not None and kernels == "liger":
            raise ConfigError(
                f"model.kernels=liger: {reason}: set model.kernels=auto, which goes on without them"
            )
        if self.model.device.type == "cuda":
            taken = "Liger's" if reason is None else f"transformers' ({reason})"
            log.info(f"{whose} kernels of norms, rotary positions and MLPs are {taken}")

    def _fault_of_kernels(self, probe: Probe) -> str | None:
        """Puts Liger's kernels into the model; returns what was wrong with them, if it took them out again."""
        plain = difference(probe, self.score, "padded")
        try:
            put_back = fused.fuse(self.model)
        except (ImportError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            return f"Liger's can't be put into this model: {one_line(error, kind=True)}"
        try:
            found = difference(probe, self.score, "padded")
            fault = _beyond(found, plain, probe, "transformers' operations")
        except Exception as error:
            put_back()
            if is_out_of_memory(error):
                raise
            return f"Liger's fail in this model: {one_line(error, kind=True)}"
        if fault is not None:
            put_back()
        return fault

    def choose_layout(
        self, probe: Probe | None = None, attention: str = "auto", whose: str = "the learner's"
    ) -> LayoutName:
        """Switches to the fastest attention that the model can do, and logs which one it is.

        It is tested on the probe's rows: a model with a different kind of attention gives other
        log-probs, and keeps padded rows.

        Args:
            probe: the model's probe; None makes one for rows of :data:`LONGEST` tokens.
            attention: ``model.attention`` of the config.
            whose: names the policy in the log.
        """
        before = self.model.config._attn_implementation
        way = layouts.fastest(attention, before, self.model.device.type, self.model.dtype)
        reason = way.reason
        if way.layout != "padded":
            fault = self._fault(way, probe or Probe.of(self.model, LONGEST))
            if fault is None:
                self.layout = way.layout
            else:
                self.model.set_attn_implementation(before)
                reason = f"not {way}: {fault}"
        taken = Way(layout=self.layout, implementation=self.model.config._attn_implementation)
        log.info(f"{whose} attention is {taken}{f' ({reason})' if reason else ''}")
        return self.layout

    def _fault(self, way: Way, probe: Probe) -> str | None:
        """Switches to an attention; returns what is wrong with it, or None."""
        layouts.register()
        try:
            padded = difference(probe, self.score, "padded")
            self.model.set_attn_implementation(way.implementation)
            found = difference(probe, self.score, way.layout)
        except (ImportError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            # An ImportError is that of a torch without the kernel.
            if is_out_of_memory(error):
                raise
            return one_line(error, kind=True)
        return _beyond(found, padded, probe, "padded rows")

    def require_own(self, probe: Probe, forward: Any = None, whose: str = "the learner's") -> None:
        """Compares log-probs and entropies with the model's own, in every layout that is used.

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
            used: set[LayoutName] = {self.layout}
            if self.layout != "packed":
                used.add("padded")
            for layout in used:
                greatest |= difference(probe, forward or self.score, layout)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if is_out_of_memory(error) or isinstance(error, DistError):
                raise
            raise ConfigError(
                f"{probe.model}: {whose} log-probs can't be computed: {one_line(error, kind=True)}: use "
                f"another model"
            ) from error
        attention = layouts.named(self.model.config._attn_implementation)
        way_out = "use another model"
        if attention != "eager":
            way_out = f"set model.attention=eager (it is {attention}), or use another model"
        probe.require(greatest, whose, way_out)


def _beyond(found: Difference, other: Difference, probe: Probe, what: str) -> str | None:
    """Says that a way of scoring is wrong, if it is: by how much it and another one differ from the model's own."""
    # In half precision a small fault is hidden by the bound, but not in comparison with the other way.
    if found.most <= min(probe.bound, 3 * other.most + EXACT):
        return None
    return (
        f"with it log-probs are off by {found.logprob:.2g} nats, with {what} by {other.logprob:.2g}"
    )


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

    # A critic takes a policy's layers and drops the rest of it, which hooks that hold it would keep.
    held = weakref.ref(whole)

    def begin(module: nn.Module, inputs: Any) -> None:
        module.training = False

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        owner = held()
        if owner is not None:
            module.training = owner.training

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
