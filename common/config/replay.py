"""``replay``: the ledger."""

from __future__ import annotations

from typing import Literal

from .section import NonNegative, Positive, Seconds, Section


class ReplayConfig(Section):
    """The ledger."""

    redis_url: str | None = None
    """URL of an existing server (``redis://host:port/db``); None starts one in the run's folder."""
    groups_per_step: Positive = 8
    """B: groups per learner step."""
    max_staleness: NonNegative = 1
    """η: greatest age, in steps, of the oldest token that is trained on."""
    window: Positive = 1
    """Number of steps within which groups may be taken out of order; 1 = strict order of ids."""
    late: Literal["drop", "wait"] = "wait"
    """What a cut does with the oldest unfinished group when it would become too stale."""
    lease_seconds: Seconds = 120.0
    """A lease that isn't renewed for this long goes to the next worker."""
    group_deadline_seconds: Seconds = 1800.0
    """Absolute limit of one lease, renewals included."""
    max_attempts: Positive = 5
    """Number of failed attempts after which a group is rejected and listed."""
    max_inflight: Positive = 4096
    """Greatest number of leases at a time."""
    durability: Literal["process", "power"] = "process"
    """``process`` survives any SIGKILL; ``power`` syncs every write to disk."""
    maxmemory_mb: Positive = 2048
    """Memory limit of the server that is started, MiB."""
