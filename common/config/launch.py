"""``launch``: supervision, addresses and GPUs."""

from __future__ import annotations

from typing import Literal

from .section import Positive, Seconds, Section


class LaunchConfig(Section):
    """Supervision, addresses and GPUs."""

    max_failures: Positive = 5
    """Number of deaths of one process, without progress in between, that end the run."""
    backoff_seconds: Seconds = 0.5
    """First pause before a restart; it doubles up to 30 s."""
    drain_seconds: Seconds = 60.0
    """Time for the processes to drain and checkpoint after the first Ctrl-C."""
    stall_seconds: Seconds = 300.0
    """Time without a step after which one line says who waits for whom."""
    full_disk_seconds: Seconds = 600.0
    """How long a full disk is waited for; then the run drains, and can be resumed."""
    bind: str = "127.0.0.1"
    """Address that Redis, ZeroMQ and, with environments, the workers' token endpoints bind."""
    gpus: Literal["none", "auto", "required"] = "auto"
    """``none``: CPUs only; ``auto``: GPUs if there is one for every rank and engine;
    ``required``: refuse a machine that has fewer."""
    share_gpu: bool = False
    """Whether engines get the learner's GPUs instead of GPUs of their own. Leave room for the learner
    with ``rollout.vllm.gpu_memory_utilization``. Weights then go through host memory, since two
    ranks of NCCL can't share a GPU."""
