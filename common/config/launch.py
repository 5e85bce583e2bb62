"""``launch``: supervision, addresses and GPUs."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from .section import Positive, Seconds, Section


def _ports(text: str) -> str:
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if match and 1024 <= int(match[1]) < int(match[2]) <= 65535:
        return text
    raise ValueError("should be FIRST-LAST, two ports from 1024 to 65535, e.g. 29500-29563")


Ports = Annotated[str, AfterValidator(_ports)]


class LaunchConfig(Section):
    """Supervision, addresses and GPUs."""

    max_failures: Positive = 5
    """Number of deaths of one process, without progress in between, that end the run."""
    backoff_seconds: Seconds = 0.5
    """First pause before a restart; it doubles up to 30 s."""
    drain_seconds: Seconds = 60.0
    """Time for the processes to drain and checkpoint after the first Ctrl-C."""
    hosts_seconds: Seconds = 300.0
    """How long the hosts of a run wait for one another: the head for a host that the learner needs, and a
    host that has joined for the head's Redis."""
    lost_seconds: Seconds = 60.0
    """Silence after which a host counts as lost; if ranks of the learner are on it, all ranks start anew."""
    stall_seconds: Seconds = 300.0
    """Time without a step after which one line says who waits for whom."""
    full_disk_seconds: Seconds = 600.0
    """How long a full disk is waited for; then the run drains, and can be resumed."""
    bind: str = "127.0.0.1"
    """Address that Redis, ZeroMQ and, with environments, the workers' token endpoints bind, and at which the
    learner's ranks meet. A host that has joined binds its own address from which it reaches this one."""
    ports: Ports | None = None
    """Range of ports, such as ``29500-29563``, for firewalls that must know them: the run's own Redis listens at the
    first, and everything else of Tandem that listens (ZeroMQ, the meeting points of ranks and weights, the
    endpoint of episodes) takes free ones of the others. The data connections of gloo and NCCL know
    no ports and are outside. null = any free ports."""
    join: str | None = None
    """A join file that was made beforehand, from which a new run takes its id and its Redis' password and port, where
    members get theirs otherwise than from this run (`tandem cluster` makes one). null = the run makes its own."""
    learner: Literal["here", "outside"] = "here"
    """Who starts the learner's ranks: ``here``: ``tandem start``, and ``tandem join`` on other hosts;
    ``outside``: torchrun, srun or a person, by ``tandem learner``."""
    gpus: Literal["none", "auto", "required"] = "auto"
    """``none``: CPUs only; ``auto``: GPUs if there is one for every rank and engine;
    ``required``: refuse a machine that has fewer."""
    share_gpu: bool = False
    """Whether engines get the learner's GPUs instead of GPUs of their own. Leave room for the learner
    with ``rollout.vllm.gpu_memory_utilization``. Weights then go through host memory, since two
    ranks of NCCL can't share a GPU."""

    @property
    def binds_all(self) -> bool:
        """Whether ``bind`` stands for all of a host's addresses."""
        return self.bind in ("0.0.0.0", "::")

    @property
    def port_range(self) -> range | None:
        """``ports`` as numbers, the last one included."""
        if self.ports is None:
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)
