"""An objective of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .keys import Aggregated, Entropy, Kl, Learned


@dataclass(frozen=True, kw_only=True)
class OwnObjective(Kl, Entropy, Aggregated, Learned):
    """The keys that the updates read of any objective, and ``params``.

    A class that derives from a built-in one has that one's keys in ``params``, and that one's default for each
    key that is at its default here.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of an objective of your own, passed on unchanged."""
    rejected: bool = False
    """Whether an objective of your own learns, offline, from responses that the data call worse or unwanted as well, as
    ``dpo`` and ``kto`` do."""

    # Only the user can know whether it learns from traces alone.
    alone = "always"

    @property
    def rejects(self) -> bool:
        return self.rejected
