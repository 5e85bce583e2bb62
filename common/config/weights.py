"""``weights``: how updated weights reach running workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import NonNegative, Positive, Seconds, Section


class WeightsConfig(Section):
    """How updated weights reach running workers."""

    transport: Literal["auto", "nccl", "shared_memory", "gloo", "snapshot"] = "auto"
    """``auto``: nccl where learner and worker have GPUs of their own, else shared memory on one
    host, else gloo; a worker that one of them fails twice is served by the next, at last by a
    snapshot."""
    topology: Literal["star", "broadcast"] = "star"
    """``star``: a channel for each worker, which fails by itself. ``broadcast``: one channel for
    all workers that are ready, so that the learner sends a version once: for many nodes."""
    snapshot_folder: str | None = None
    """Where snapshots of the weights lie, on a file system that learner and workers share; None =
    ``weights`` in the run's folder. The newest two are kept."""
    snapshot_every: NonNegative = 0
    """Steps between snapshots; 0 = only where a worker can be served in no other way."""
    every: Positive = 1
    """Steps between publications; needs ``max_staleness >= every - 1``."""
    bucket_mb: Positive = 64
    """Size of one bucket on the wire."""
    interface: str = "127.0.0.1"
    """Address that the weight channel binds; the channel itself has no credentials."""
    open_seconds: Seconds = 30.0
    """Deadline for a member to open its channel."""
    stage_seconds: Seconds = 120.0
    """Deadline for a member to hold and have checked all bytes."""
    commit_seconds: Seconds = 60.0
    """Deadline for a member to serve the new version, and again for what checks it."""
    check_bound: Annotated[float, Field(ge=0)] | None = None
    """Greatest difference, in nats, between the learner's log-probs of the check's tokens and an
    engine's that passes for rounding in a worker's first check; None = by the dtype. Later ones
    are held against those before them. An engine that rounds its weights further (fp8) needs a
    greater one; 0 = versions aren't checked."""
