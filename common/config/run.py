"""``run``: what the run is called, where it lives and how long it goes."""

from __future__ import annotations

from .section import NonNegative, Positive, Section


class RunConfig(Section):
    """What the run is called, where it lives and how long it goes."""

    dir: str | None = None
    """The run's folder; None = ``runs/<preset>``."""
    seed: int = 0
    """Seeds the order of problems, sampling noise and mixing."""
    steps: NonNegative | None = None
    """Ledger batches to train on. Set this or ``passes``."""
    passes: Positive | None = None
    """Passes over the data; the last step may then be short."""
    deterministic: bool = False
    """The same seed gives the same parameters bit for bit, whoever is killed on the way: on-policy,
    one group an engine batch, no group deadline (what :data:`DETERMINISTIC` lists is set so). Holds
    for the torch engine on CPUs with as many threads and ranks; slower. One clock is left: a text
    on which a grader hangs."""
