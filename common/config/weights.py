"""``weights``: how updated weights reach running workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import NonNegative, Positive, Seconds, Section

LOADS_BY = 0.75
"""Share of ``commit_seconds`` after which new weights wait for running samples no longer."""


class WeightsConfig(Section):
    """How updated weights reach running workers."""

    transport: Literal["auto", "nccl", "shared_memory", "gloo", "snapshot"] = "auto"
    """``auto``: nccl if learner and worker have GPUs of their own, else shared memory on one
    host, else gloo; a worker for which one of them fails twice gets the next one, and in the end a
    snapshot."""
    topology: Literal["star", "broadcast"] = "star"
    """``star``: one channel per worker, each of which fails by itself. ``broadcast``: one channel for
    all workers that are ready, so that the learner sends a version once; for many nodes."""
    snapshot_folder: str | None = None
    """Folder of weight snapshots, on a file system that learner and workers share. Each run has a folder of its
    own in it, named by the run's id. null = ``weights`` in the run's folder. The newest two are kept, and those that workers are reading."""
    snapshot_every: NonNegative = 0
    """Steps from one snapshot to the next; 0 = only if a worker can't be served in any other way."""
    every: Positive = 1
    """Steps from one publication to the next; needs ``max_staleness >= every - 1``."""
    bucket_mb: Positive = 64
    """Size of one bucket on the wire."""
    interface: str | None = None
    """Address or interface that the weight channel binds, which has no credentials of its own; null = that
    of ``launch.bind``."""
    open_seconds: Seconds = 30.0
    """Deadline for a member to open its channel."""
    stage_seconds: Seconds = 120.0
    """Deadline for a member to have received and checked all bytes."""
    commit_seconds: Seconds = 60.0
    """Deadline for a member to serve the new version, and again for its check."""
    check_bound: Annotated[float, Field(ge=0)] | None = None
    """Greatest difference, in nats, between the learner's and an engine's log-probs of the check's
    tokens that counts as rounding in a worker's first check; null = by the dtype. Later checks
    are compared with earlier ones. An engine that rounds its weights further (fp8) needs a
    greater bound; 0 = versions aren't checked."""
