"""``expert``: how expert traces enter groups."""

from __future__ import annotations

from typing import Literal

from ..prefixes import PrefixSchedule
from .section import NonNegative, Positive, Section, Share


class ExpertConfig(Section):
    """How expert traces enter groups."""

    per_group: NonNegative = 0
    """Number of traces that take the place of own samples, if the problem has any (LUFFY: 1)."""
    when: Literal["always", "all_failed"] = "always"
    """``always``: traces are chosen at admission, and that many fewer own samples are asked for.
    ``all_failed``: all G own samples are asked for, and if none of them is correct, traces
    replace some of them, drawn by key."""
    accept: tuple[str, ...] = ("correct",)
    """Verdicts with which a trace may enter. Offline, the default lets wrong ones that are paid nothing enter as well
    if the objective learns from single wrong ones too (``kto``), whether it is given or not."""
    negative: bool = False
    """Let expert tokens with a negative advantage into the loss."""
    prefix: PrefixSchedule | None = None
    """How samples begin with a part of a trace that the policy continues; null = traces enter whole.
    ``fixed``: evenly spaced from ``prefix_low`` to ``prefix_high``; ``random``: drawn between
    them; ``linear``: from ``prefix_high`` down to 0; ``linear_max`` and ``reverse_linear``: drawn
    from 0 to a greatest share that falls, or grows, by tenths; ``cosine``: drawn between a least
    share, which falls to ``prefix_low`` on half a cosine, and ``prefix_high`` (Prefix-RFT)."""
    prefix_low: Share = 0.0
    """Least share of a trace."""
    prefix_high: Share = 0.95
    """Greatest share of a trace; at least its last token is left to the policy."""
    prefix_steps: Positive | None = None
    """Steps over which the schedules in time run; null = ``run.steps``."""
