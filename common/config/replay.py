"""``replay``: the ledger."""

from __future__ import annotations

from typing import Literal

from .section import NonNegative, Positive, Seconds, Section


class ReplayConfig(Section):
    """The ledger."""

    redis_url: str | None = None
    """URL of an existing server (``redis://user@host:port/db``, or ``rediss://`` for TLS); its password goes into
    TANDEM_REDIS_PASSWORD. null starts one in the run's folder."""
    redis_ca: str | None = None
    """File with certificates of authorities (PEM) that the server's may be of, besides the host's own."""
    redis_cert: str | None = None
    """File with a client certificate (PEM), if the server asks for one."""
    redis_key: str | None = None
    """File with its private key (PEM, without a passphrase); null: it is in the same file."""
    groups_per_step: Positive = 8
    """B: groups per learner step."""
    max_staleness: NonNegative = 1
    """η: greatest age, in steps, of the oldest token that is trained on."""
    window: Positive = 1
    """Number of steps within which groups may be taken out of order; 1 = strict order of ids."""
    late: Literal["drop", "wait"] = "wait"
    """What a cut does with the oldest unfinished group when it would become too stale."""
    dynamic_sampling: NonNegative = 0
    """Greatest number of groups without a signal (all rows have the same reward) that a step leaves out, so that
    later groups take their places (DAPO's dynamic sampling, arXiv 2503.14476 eq. 11); 0 = every group is trained on."""
    dynamic_sampling_means: tuple[float, float] | None = None
    """Least and greatest mean reward of a group's rows, expert rows included; a group beyond them gives way like one
    without a signal (PRIME filters by accuracy so, arXiv 2502.01456). null = any mean."""
    lease_seconds: Seconds = 120.0
    """A lease that isn't renewed for this long goes to the next worker."""
    group_deadline_seconds: Seconds = 1800.0
    """Absolute limit of one lease, renewals included."""
    max_attempts: Positive = 5
    """Number of failed attempts after which a group is rejected and listed."""
    max_inflight: Positive = 4096
    """Greatest number of leases at a time."""
    durability: Literal["process", "power", "server"] = "process"
    """``process`` survives any SIGKILL; ``power`` syncs every write to disk; ``server`` takes an existing server as it
    is, even if it keeps nothing over a restart."""
    maxmemory_mb: Positive = 2048
    """Memory limit of the server that is started, MiB."""
