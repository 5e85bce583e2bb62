"""The processes of a run: name, command and GPUs of each. The job starts them, a dry run prints them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.run_folder import RunFolder
from ..plan.placement import Placement, trackers_of, workers_of

if TYPE_CHECKING:
    from ...common.config import Config

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start one process."""

    name: str
    """Names its log, and the member in the registry."""
    arguments: tuple[str, ...]
    """For :mod:`tandem.launch.lifeline`: a tandem sub-command, or ``exec`` and a program."""
    log: Path
    """Its output is appended here."""
    threads: int = 1
    """CPU threads of numerical libraries."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own."""
    pass_fds: tuple[int, ...] = ()
    """Descriptors that it inherits."""


def command_of(spec: ProcessSpec, parent: str) -> list[str]:
    """The command line of a process; ``parent`` is the pid that it lives and dies with."""
    # -P: a file of the user's working directory must not shadow a library's module.
    return [sys.executable, "-P", "-m", "tandem.launch.lifeline", parent, *spec.arguments]


def environment_of(spec: ProcessSpec) -> dict[str, str]:
    """What is added to the environment of a process."""
    threads = dict.fromkeys(THREAD_VARIABLES, str(spec.threads))
    more = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**threads, **more, **spec.environment}


def learner(
    config: Config, folder: RunFolder, placement: Placement, port: str
) -> list[ProcessSpec]:
    """Every rank; ``port`` is that of their rendezvous."""
    ranks = config.learner.ranks
    return [
        _role(
            folder,
            "learner",
            rank,
            ("--rank", str(rank), "--world-size", str(ranks), "--master-port", port),
            threads=config.learner.threads,
            gpus=placement.learner[rank],
        )
        for rank in range(ranks)
    ]


def rollout(config: Config, folder: RunFolder, placement: Placement) -> list[ProcessSpec]:
    """Every rollout worker."""
    return [
        _role(
            folder,
            "rollout",
            index,
            threads=config.rollout.threads,
            gpus=placement.rollout[index],
        )
        for index in range(workers_of(config))
    ]


def reward(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    """Every reward pool; offline nothing is graded while a run goes on."""
    pools = config.reward.pools if config.learner.source == "ledger" else 0
    return [_role(folder, "reward", index) for index in range(pools)]


def trackers(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    """One process for each of W&B and TensorBoard that is on: none can harm the other or the run."""
    return [
        ProcessSpec(
            name=name,
            arguments=("track", "--run", str(folder.path), "--to", name, "--follow"),
            log=folder.logs / f"{name}.log",
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        for name in trackers_of(config)
    ]


def redis(folder: RunFolder, program: str, conf: str) -> ProcessSpec:
    """The run's own redis-server."""
    return ProcessSpec(
        name="redis", arguments=("exec", program, conf), log=folder.logs / "redis.log"
    )


def _role(
    folder: RunFolder,
    role: str,
    index: int,
    extra: Sequence[str] = (),
    *,
    threads: int = 1,
    gpus: Sequence[int] = (),
) -> ProcessSpec:
    name = f"{role}-{index}"
    return ProcessSpec(
        name=name,
        arguments=(role, "--run", str(folder.path), "--name", name, *extra),
        log=folder.logs / f"{name}.log",
        threads=threads,
        environment={
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        },
    )
