"""Checks sampled log-probs: are those that the engines recorded the ones that the learner computes?

Faults between a learner and its engines are silent: a temperature that isn't recorded, labels shifted
by one, weights that weren't loaded. The ratio ρ = π_θ/μ shows them, if nothing else has moved it. So
it is examined for the first mini-batch of a step, before the step's first update, on the tokens with
the least lag. At lag 0 the weights that sampled a token also score it, and log ρ is the noise of two
implementations, for which each dtype has a bound.

At a greater lag the policy has moved as well, and nothing says how far it should have. There the means
are compared with the run's own recent history: it is an alarm if a mean exceeds :data:`MULTIPLE` times
the greatest of the last :data:`HISTORY` at the same lag, plus :data:`MOVED` for each step of lag, by
which a policy that learns fast may move without a history. In half precision the mean of k3 has no bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...common.config import Config
from ...common.ratio_check import PREFIX
from ..losses.finite import widened
from ..losses.ratios import clamped, effective_sample_share, k3
from ..objectives import Objective
from ..rendezvous import gather_over_ranks, max_over_ranks, sum_over_ranks
from ..rows.rows import Rows
from .diagnostics import percentile

BOUNDS: Mapping[str, Mapping[str, float]] = {
    "float32": {"log_ratio": 2e-5, "log_ratio_p99": 1e-3, "k3": 1e-8, "k3_p99": 5e-7},
    # No mean of k3: a single token that rounding moves by 7 nats has a k3 of 1,000.
    "bfloat16": {"log_ratio": 0.1, "log_ratio_p99": 3.0, "k3_p99": 2.0},
}
"""Bounds at lag 0 in nats, by the less exact dtype of learner and engines. In a thousand updates the
miniature has reached at most a twentieth of them in float32, and with engines in bfloat16, early on
when it learns fastest, a third: means up to 0.03 and 0.06, percentiles up to 1.1 and 0.4. For float16, which is
more exact than bfloat16, its bounds are taken until there are measurements."""
MOVED: Mapping[str, float] = {"log_ratio": 0.1, "k3": 0.1}
"""Figures that are checked at a greater lag, and how far a step may move them without a history; nats."""
FEW = 100
"""Number of tokens below which a 99th percentile is just the greatest value, and isn't checked."""
MULTIPLE = 10.0
"""Factor by which a mean may exceed the greatest recent value at a greater lag."""
HISTORY = 20
"""Number of values at a lag that count as recent. Values with an alarm aren't among them."""


def measure(
    rows: Sequence[Rows],
    logprobs: Sequence[Tensor],
    objective: Objective,
    *,
    whole_rows: bool = False,
) -> dict[str, float]:
    """Figures of the own tokens with the least lag, over all ranks, whatever the micro-batches.

    ``lag`` and ``tokens`` say which tokens they cover; ``log_ratio``, ``k3`` and their 99th percentiles
    are in nats; ``ess`` is the effective sample size as a share, ``clipped`` the share at which the clip
    decides (for objectives with a clip). Empty if no token has a lag.

    Args:
        rows: rows of this rank's micro-batches.
        logprobs: ``[N]`` log π_θ of each.
        objective: knows what is clipped.
        whole_rows: use only rows whose own tokens are all of one version: others continued with keys
            and values of the version before.
    """
    seen = [_seen(r, p, objective, whole_rows) for r, p in zip(rows, logprobs, strict=True)]
    lag, ratios, clipped = (
        torch.cat([part[column] for part in seen]) if seen else torch.zeros(0)
        for column in range(3)
    )
    least = -max_over_ranks([-float(lag.min()) if len(lag) else -math.inf])[0]
    if not math.isfinite(least):
        return {}
    ratios, clipped = ratios[lag == least], clipped[lag == least]
    weights, distances, sizes = ratios.exp(), k3(ratios), ratios.abs()
    tokens, size, distance, weight, square, decided = sum_over_ranks(
        [
            float(len(ratios)),
            *(float(v.sum()) for v in (sizes, distances, weights, weights * weights, clipped)),
        ]
    )
    count = int(tokens)
    figures = {
        "lag": least,
        "tokens": tokens,
        "log_ratio": size / tokens,
        "log_ratio_p99": percentile(sizes, 0.99, count, gather_over_ranks),
        "k3": distance / tokens,
        "k3_p99": percentile(distances, 0.99, count, gather_over_ranks),
        "ess": effective_sample_share(weight, square, tokens),
    }
    if objective.clips_own:
        figures["clipped"] = decided / tokens
    return figures


def _seen(
    rows: Rows, logprobs: Tensor, objective: Objective, whole_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``[n]`` lag, log ρ and whether the clip decides, for the own tokens that count, on the CPU.

    In float64: k3 of a log-ratio of 1e-6 is 5e-13, far below float32's rounding of 1.
    """
    which = ~rows.expert & (rows.lag >= 0)
    if whole_rows:
        low = torch.full((rows.count,), torch.iinfo(torch.int64).max, device=rows.lag.device)
        high = torch.full_like(low, -1)
        low = low.scatter_reduce(0, rows.row[which], rows.lag[which], "amin")
        high = high.scatter_reduce(0, rows.row[which], rows.lag[which], "amax")
        which &= rows.by_token(low == high)
    log_ratios = clamped(widened(logprobs).double() - rows.behaviour.double())
    clipped = objective.clipped(rows, log_ratios)
    return rows.lag[which].cpu(), log_ratios[which].cpu(), clipped[which].double().cpu()


class RatioCheck:
    """Compares each step's figures with their bounds. Every rank has the same.

    Args:
        config: the run's config.
        objective: the objective of the training.
    """

    def __init__(self, config: Config, objective: Objective) -> None:
        self._objective = objective
        exact = config.model.dtype == config.engine_dtype == "float32"
        self._floor = BOUNDS["float32" if exact else "bfloat16"]
        self._slack = config.learner.ratio_check.slack
        self._on_alarm = config.learner.ratio_check.on_alarm
        self._whole_rows = not config.rollout.recompute_kv
        plain = "own" in objective.plain_temperature
        self._possible = not plain or config.rollout.temperature == 1
        self._history: dict[tuple[int, str], deque[float]] = {}

    def look(
        self, rows: Sequence[Rows], logprobs: Sequence[Tensor], *, settled: bool = False
    ) -> tuple[dict[str, float], bool]:
        """``ratio/…`` figures of a step with bounds and ``alarm`` (empty if it has no such tokens), and
        whether the step is refused because of them.

        Args:
            rows: rows of this rank's micro-batches in the step's first mini-batch.
            logprobs: ``[N]`` log-probs of each, under the weights of the step's start.
            settled: the step was made before, so it isn't refused.
        """
        if not self._possible:
            return {}, False
        figures = measure(rows, logprobs, self._objective, whole_rows=self._whole_rows)
        if not figures:
            return {}, False
        bounded, alarm = self.hold(figures)
        refused = alarm and not settled and self._on_alarm != "tell"
        return {PREFIX + name: value for name, value in bounded.items()}, refused

    def hold(self, figures: Mapping[str, float]) -> tuple[dict[str, float], bool]:
        """The figures of :func:`measure` with their bounds and ``alarm``, and whether it is one."""
        lag, tokens = int(figures["lag"]), figures["tokens"]
        bounds = self._bounds(lag, tokens)
        alarm = any(figures[name] > bound for name, bound in bounds.items())
        # The log-probs aren't numbers, for which the step will be undone anyway.
        if lag and not alarm and all(math.isfinite(figures[name]) for name in MOVED):
            for name in MOVED:
                self._recent(lag, name).append(figures[name])
        bounded = {**figures, **{f"{name}_bound": bound for name, bound in bounds.items()}}
        bounded["alarm"] = float(alarm)
        return bounded, alarm

    def _bounds(self, lag: int, tokens: float) -> dict[str, float]:
        bounds = dict(self._floor)
        if lag:
            bounds = {
                name: bounds[name]
                + lag * moved
                + MULTIPLE * max(self._recent(lag, name), default=0.0)
                for name, moved in MOVED.items()
                if name in bounds
            }
        if tokens < FEW:
            bounds = {name: bound for name, bound in bounds.items() if name in MOVED}
        # A mean over few tokens is noise: over a hundred it may be twice as large, over one eleven times.
        wide = 1 + 10 / math.sqrt(tokens)
        return {
            name: self._slack * bound * (wide if name in MOVED else 1.0)
            for name, bound in bounds.items()
        }

    def _recent(self, lag: int, name: str) -> deque[float]:
        return self._history.setdefault((lag, name), deque(maxlen=HISTORY))

    def state(self) -> dict[str, float]:
        """The history, for a checkpoint: steps that are trained again from it are compared with the same
        bounds."""
        return {
            f"{PREFIX}{name}/{lag}/{place}": value
            for (lag, name), values in self._history.items()
            for place, value in enumerate(values)
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of :meth:`state`; without it in the checkpoint there is no history."""
        self._history.clear()
        kept = [key.split("/") for key in state if key.startswith(PREFIX)]
        for _, name, lag, place in sorted(kept, key=lambda parts: int(parts[-1])):
            self._recent(int(lag), name).append(float(state[f"{PREFIX}{name}/{lag}/{place}"]))
