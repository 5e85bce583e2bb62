"""Compares log-probs with the model's own: those from its ``forward(...).logits`` for a few rows.

The learner and the torch engine compute log-probs in ways of their own, which are faster and need
less memory. At start each compares its results with the model's, on rows that reach every branch of
the model that the run's rows can reach, and refuses the model if they differ. Otherwise a
difference would go unnoticed in training, with wrong off-policy ratios as its only trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .errors import ConfigError
from .memory import is_out_of_memory
from .plain import one_line

BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Greatest difference of a log-prob or an entropy, in nats, by the dtype of the parameters: at least
twice the effect of other orders of summation on small models with random weights."""
SMALL = 5.0
"""Nats. Rounding errors grow with the value: for a log-prob greater than this, such as a trained
model's for random tokens (-35 for the miniature), the bound is greater in proportion."""
NOISE = 4.0
"""The bound is at least this many times the difference between two of the model's own attention
implementations, since deeper models, and those whose training made them very sure, are less exact."""
MOST_NOISE = 4.0
"""In full precision that raises the bound by this factor at most: a larger difference isn't rounding."""
SHORT = (5, (3, 9), 0.7), (2, (6,), 1.0)
"""Prompt length, response lengths and temperature of the groups of short rows."""
LONG = 4, 12
"""Response lengths of a group that reaches beyond a window."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeRow:
    """A prompt with a response of random tokens."""

    group: int
    """Rows of a group share their prompt."""
    prompt: NDArray[np.int64]
    """``[P]`` token ids, at least one."""
    response: NDArray[np.int64]
    """``[L]`` token ids, at least one."""
    temperature: float
    """Divides the logits."""
    window: int | None
    """Window, in tokens, that the row reaches beyond; None if there is none."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """``[P + L]`` token ids of prompt and response."""
        return np.concatenate([self.prompt, self.response])

    @property
    def long(self) -> bool:
        """Whether the row reaches beyond a window."""
        return self.window is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Scores of the response tokens of some rows, one row after the other."""

    logprobs: Tensor
    """``[N]`` log-probs in nats."""
    entropies: Tensor
    """``[N]`` entropies in nats."""

    @classmethod
    def of_logits(cls, logits: Tensor, tokens: Tensor, temperature: float) -> Scores:
        """Scores from the logits ``[N, V]`` of one row, in float32 or better."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = torch.log_softmax(logits / temperature, -1)
        return cls(
            logprobs=logprobs.gather(1, tokens[:, None]).squeeze(1),
            # e^x x is 0 at x = −∞, but the product is NaN.
            entropies=-(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(-1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Greatest differences, in nats; infinite if a value is not a number."""

    logprob: float = 0.0
    """Greatest difference of a log-prob."""
    entropy: float = 0.0
    """Greatest difference of an entropy."""
    row: ProbeRow | None = None
    """The row with the greatest difference."""

    @classmethod
    def of(cls, found: Scores, own: Scores, row: ProbeRow) -> Difference:
        """The difference between two scores of a row."""
        return cls(
            logprob=_greatest(found.logprobs, own.logprobs),
            entropy=_greatest(found.entropies, own.entropies),
            row=row,
        )

    def __or__(self, other: Difference) -> Difference:
        """The greater of each difference."""
        return Difference(
            logprob=max(self.logprob, other.logprob),
            entropy=max(self.entropy, other.entropy),
            row=self.row if self.most >= other.most and self.row is not None else other.row,
        )

    @property
    def most(self) -> float:
        """The greater of the two differences."""
        return max(self.logprob, self.entropy)


def _greatest(ours: Tensor, theirs: Tensor) -> float:
    if not len(ours):
        return 0.0
    theirs = theirs.to(ours.device)
    # A forbidden token has −∞ on both sides.
    apart = torch.where(ours == theirs, torch.zeros_like(ours), ours - theirs)
    return float(apart.abs().nan_to_num(torch.inf, torch.inf, torch.inf).max())


def probe_rows(model: Any, longest: int) -> list[ProbeRow]:
    """Rows that reach every branch of a model: shared prompts, different lengths, and lengths beyond
    every window that rows of the run can reach.

    Args:
        model: a transformers causal model.
        longest: greatest number of tokens of prompt and response in the run's rows.
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or longest
    most = min(longest, context)
    if most < 2:
        return []
    groups: list[tuple[int, tuple[int, ...], float, int | None]]
    groups = [(*group, None) for group in SHORT]
    for window in windows(config):
        if window + 1 < most:
            groups.append((min(most, 2 * window) - max(LONG), LONG, 1.0, window))
    rng = np.random.Generator(np.random.Philox(key=0))
    # Either matrix may have rows for tokens that the other lacks.
    sizes = [
        len(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    usable = np.setdiff1d(np.arange(min(sizes)), list(_special(config)))
    rows = []
    for number, (length, responses, temperature, beyond) in enumerate(groups):
        prompt = rng.choice(usable, min(max(length, 1), most - 1))
        rows += [
            ProbeRow(
                group=number,
                prompt=prompt,
                response=rng.choice(usable, min(size, most - len(prompt))),
                temperature=temperature,
                window=beyond,
            )
            for size in responses
        ]
    return rows


def windows(config: Any) -> list[int]:
    """Lengths, in tokens, at which a model may begin to compute differently: its windows, its chunks,
    and where its rotary embedding changes with the length."""
    found: set[int] = set()
    stack = [config.to_dict()]
    while stack:
        for key, value in stack.pop().items():
            if isinstance(value, dict):
                stack.append(value)
            elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
                # `max_window_layers` is a number of layers, not a length.
                named = ("window" in key or "chunk" in key) and not key.endswith("layers")
                if named or key == "original_max_position_embeddings":
                    found.add(value)
    return sorted(found)


def untried_lengths(model: Any, longest: int) -> list[int]:
    """Greatest row lengths that stay within windows which :func:`probe_rows` left out."""
    config = model.config.get_text_config()
    return [window + 1 for window in windows(config) if window + 1 >= longest]


def _special(config: Any) -> Iterator[int]:
    """Token ids with a meaning to the model, such as the placeholder of an image."""
    for key, value in config.to_dict().items():
        if key.endswith(("_token_id", "_token_ids", "_token_index")) and value is not None:
            yield from value if isinstance(value, (list, tuple)) else (value,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """Rows of random tokens, the model's own scores for them, and how far other scores may be off."""

    rows: list[ProbeRow]
    """Rows from :func:`probe_rows`."""
    own: list[Scores]
    """The model's own scores of each row."""
    bound: float
    """Greatest difference, in nats, that counts as rounding."""
    model: str
    """Type and dtype of the model, for messages."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, longest: int) -> Probe:
        """Scores rows with the model: each alone, in evaluation mode, logits only where they are needed.

        Short rows go through transformers' plain attention (``eager``), since the faster ones ignore
        features that they don't support, such as a cap of the scores. Long rows keep the model's
        attention, since the plain one's memory grows with the square of their length.

        Args:
            model: a transformers causal model whose parameters are whole.
            longest: greatest number of tokens of prompt and response in the run's rows.

        Raises:
            ConfigError: there is no output matrix, or the log-probs aren't numbers.
        """
        if model.get_output_embeddings() is None:
            raise ConfigError(
                f"model type {model.config.model_type!r} has no output matrix: use another model"
            )
        rows = probe_rows(model, longest)
        bound = BOUNDS[model.dtype]
        half = model.dtype in (torch.float16, torch.bfloat16)
        training = [module for module in model.modules() if module.training]
        model.eval()
        own: list[Scores] = []
        noise = 0.0
        try:
            for row in rows:
                if row.long:
                    own.append(_own(model, row))
                    continue
                with _plain_attention(model):
                    own.append(_own(model, row))
                noise = max(noise, NOISE * Difference.of(_own(model, row), own[-1], row).most)
            # A forbidden token's −∞ isn't rounding.
            sizes = torch.cat([one.logprobs for one in own]).abs() if own else torch.zeros(1)
            greatest = float(sizes.where(sizes.isfinite(), 0.0).max())
            bound = max(bound, bound * greatest / SMALL)
            bound = max(bound, noise if half else min(noise, MOST_NOISE * bound))
        finally:
            for module in training:
                module.training = True
        dtype = str(model.dtype).removeprefix("torch.")
        named = f"model type {model.config.model_type!r} in {dtype}"
        return cls(rows=rows, own=own, bound=bound, model=named)

    def allows(self, difference: Difference) -> bool:
        """Whether a difference counts as rounding."""
        return difference.most <= self.bound

    def require(self, difference: Difference, whose: str, way_out: str) -> None:
        """Refuses the model if other scores differ from its own.

        Args:
            difference: the greatest over all rows.
            whose: names what computed the other scores, as in "the learner's".
            way_out: what to do about it.

        Raises:
            ConfigError: the difference is over the bound.
        """
        if self.allows(difference):
            return
        row = difference.row
        if row is not None and row.window is not None:
            # Rows that don't reach the window are not affected.
            way_out += (
                f"; or keep data.max_prompt_tokens + rollout.max_new_tokens within {row.window}"
            )
        length = 0 if row is None else len(row.ids)
        raise ConfigError(
            f"{self.model}: {whose} log-probs are off the model's own by up to "
            f"{difference.logprob:.2g} nats, and entropies by {difference.entropy:.2g}, on a row of "
            f"{length} tokens tried at start; the bound is {self.bound:.2g}: {way_out}"
        )


def _own(model: Any, row: ProbeRow) -> Scores:
    ids = torch.from_numpy(row.ids).to(model.get_input_embeddings().weight.device)
    count = len(row.response)

    def pick(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = inputs[0]
        # The whole row's logits may be larger than the model.
        whole = isinstance(hidden, Tensor) and hidden.shape[:-1] == (1, len(ids))
        return (hidden[:, -count - 1 : -1], *inputs[1:]) if whole else None

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"model type {model.config.model_type!r} fails in its own forward, on a row of "
            f"{len(ids)} tokens tried at start: {one_line(error, kind=True)}"
        ) from error
    finally:
        hook.remove()
    if len(logits) != count:
        logits = logits[-count - 1 : -1]
    if logits.isnan().any():
        raise ConfigError(
            f"model type {model.config.model_type!r}: its logits aren't numbers: look whether its "
            f"weights are, or whether model.attention={model.config._attn_implementation} suits it"
        )
    return Scores.of_logits(logits, ids[-count:], row.temperature)


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    can = getattr(model, "_can_set_attn_implementation", lambda: False)
    if before == "eager" or not can():
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
