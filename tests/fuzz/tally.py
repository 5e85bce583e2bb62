"""What came of one target's cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MOST_BREACHES = 5
"""Of one target; then no more cases of it are tried."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one script or decoder."""

    name: str
    """Of the target."""
    cases: int = 0
    """Cases tried."""
    fine: int = 0
    """Records or answers."""
    changed: int = 0
    """Of the answers: those to calls that changed the ledger."""
    errors: Counter[str] = field(default_factory=Counter)
    """By name."""
    breaches: list[str] = field(default_factory=list)
    """What should never be, a line each."""
    seconds: float = 0.0
    """Wall time."""


HEAD = (
    f"{'target':26} {'cases':>8} {'fine':>8} {'changed':>8} {'breaches':>8} {'seconds':>7}  errors"
)


def line(tally: Tally) -> str:
    """One line of the table, and its breaches."""
    errors = " ".join(f"{name}={n}" for name, n in tally.errors.most_common(4))
    counts = f"{tally.cases:8} {tally.fine:8} {tally.changed:8} {len(tally.breaches):8}"
    shown = [f"{tally.name:26} {counts} {tally.seconds:7.1f}  {errors}"]
    return "\n".join(shown + [f"    BREACH {breach}" for breach in tally.breaches])
