"""An objective of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .keys import Aggregated, Entropy, Kl, Learned


@dataclass(frozen=True, kw_only=True)
class OwnObjective(Kl, Entropy, Aggregated, Learned):
    """What the updates read of any objective, and ``params``.

    A class that derives from a built-in one has the keys of that one in ``params``.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    """For an objective of your own, as they are."""

    # Whether it learns from traces alone is for the user to know.
    alone = "always"

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.needs)
