"""``launch``: supervision, addresses and GPUs."""

from __future__ import annotations

from typing import Literal

from .section import Positive, Seconds, Section


class LaunchConfig(Section):
    """Supervision."""

    max_failures: Positive = 5
    """Deaths of one process without progress in between that end the run."""
    backoff_seconds: Seconds = 0.5
    """First pause before a restart; doubles up to 30 s."""
    drain_seconds: Seconds = 60.0
    """Time for the processes to drain and checkpoint after the first Ctrl-C."""
    stall_seconds: Seconds = 300.0
    """No step for so long: one line that names who waits for whom."""
    full_disk_seconds: Seconds = 600.0
    """A full disk is waited for so long; then the run drains, to go on when it is started again."""
    bind: str = "127.0.0.1"
    """Address that Redis and ZeroMQ bind."""
    gpus: Literal["none", "auto", "required"] = "auto"
    """``none``: CPUs only; ``auto``: GPUs where there is one for every rank and engine;
    ``required``: refuse a machine that has fewer."""
    share_gpu: bool = False
    """Engines get the learner's GPUs instead of GPUs of their own. Leave the learner room with
    ``rollout.vllm.gpu_memory_utilization``; weights go through the host's memory, since two ranks
    of NCCL can't share a GPU."""
