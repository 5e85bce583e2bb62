"""The processes of a run: name, command and GPUs of each, and the parts that they are supervised as."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ....common.cores import usable_cores
from ....common.memory import KEPT
from ....common.run_folder import RunFolder
from ...host.redis_server import choose_port
from ...plan.hardware import GpuName
from ...plan.placement import (
    Placement,
    learner_threads,
    samples_meanwhile,
    trackers_of,
    workers_of,
)
from .parts import Part, ProcessSpec, Stage, seeing

if TYPE_CHECKING:
    from ....common.config import Config
    from .meeting import Convener

CALLBACKS = "callbacks"
"""Name of the process that has the callbacks called."""


def parts(
    config: Config, folder: RunFolder, placement: Placement, convener: Convener | None = None
) -> list[Part]:
    """All parts of a run on its head except its redis-server.

    Args:
        convener: calls the other hosts of the learner together; None if it has none.
    """

    def own_ranks() -> list[ProcessSpec]:
        if convener is not None and convener.meeting is not None:
            return learner(config, folder, placement, str(convener.meeting.port))
        # Each start gets a new port: the old one may linger in a half-closed rendezvous.
        port = choose_port("127.0.0.1", None, config.launch.port_range)
        return learner(config, folder, placement, str(port))

    outside = config.launch.learner == "outside"
    made = []
    if not outside:
        made.append(
            Part(
                name="learner",
                stage=Stage.LEARNER,
                specs=own_ranks,
                may_finish=True,
                others=convener,
            )
        )
    for stage, specs in (
        (Stage.ROLLOUT, rollout(config, folder, placement)),
        (Stage.ENVIRONMENTS, environments(config, folder)),
        (Stage.REWARD, reward(config, folder)),
        (Stage.TRACKERS, trackers(config, folder)),
        (Stage.TRACKERS, callbacks(config, folder)),
    ):
        made += [
            Part(
                name=spec.name,
                stage=stage,
                specs=partial(list, [spec]),
                # Whoever else starts the learner, a pool hears of the end of the run.
                may_finish=outside and stage is Stage.REWARD,
                dispensable=stage is Stage.TRACKERS,
                comes_back=spec.name == CALLBACKS,
            )
            for spec in specs
        ]
    return made


def forked_by_learner(config: Config, parts: Sequence[Part]) -> list[Part]:
    """The parts whose first processes the learner's process forks, since it loads most of what they need.

    Those are the workers of the torch engine on a CPU beside a learner of one rank. How many threads a numerical library
    has can be changed when it is loaded, how they wait can't: a worker of several threads is forked only where the
    learner has as many or more, and so the same way of waiting.
    """
    if sys.platform != "linux" or config.rollout.engine not in ("torch", "auto"):
        return []
    learners = [part for part in parts if part.stage == Stage.LEARNER and part.others is None]
    ranks = [spec for part in learners for spec in part.specs()]
    if len(ranks) != 1 or ranks[0].environment["CUDA_VISIBLE_DEVICES"]:
        return []
    (rank,) = ranks
    return [
        part
        for part in parts
        if part.stage == Stage.ROLLOUT
        and all(
            spec.environment == rank.environment and spec.threads <= rank.threads
            for spec in part.specs()
        )
    ]


def learner(
    config: Config, folder: RunFolder, placement: Placement, port: str
) -> list[ProcessSpec]:
    """Specifications of the head's ranks; ``port`` is the port of their rendezvous."""
    where = ("--run", str(folder.path))
    address = meeting_address(config)
    return ranks_of(
        where, folder.logs, config, placement.learner, host=0, address=address, port=port
    )


def meeting_address(config: Config) -> str:
    """The head's address at which the learner's ranks meet."""
    return config.launch.bind if config.learner.hosts > 1 else "127.0.0.1"


def ranks_of(
    where: Sequence[str],
    logs: Path,
    config: Config,
    gpus: Sequence[Sequence[GpuName]],
    *,
    host: int,
    address: str,
    port: str,
) -> list[ProcessSpec]:
    """Specifications of one host's ranks of the learner.

    Args:
        where: options that name the run.
        logs: folder of their logs.
        config: the run's config.
        gpus: the GPUs of each rank.
        host: the host's place among the learner's hosts.
        address: where rank 0 listens.
        port: its port.
    """
    first = host * config.ranks_per_host
    world = str(config.learner.ranks)
    return [
        of_role(
            where,
            logs,
            "learner",
            f"learner-{first + local}",
            (
                *("--rank", str(first + local), "--world-size", world),
                *("--master-address", address, "--master-port", port),
            ),
            threads=learner_threads(config, on_gpu=bool(own), cores=usable_cores()),
            gpus=own,
            alone=not samples_meanwhile(config),
        )
        for local, own in enumerate(gpus)
    ]


def rollout(config: Config, folder: RunFolder, placement: Placement) -> list[ProcessSpec]:
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
    """Specifications of the reward pools; offline there are none, since nothing is graded during a run."""
    pools = config.reward.pools if config.learner.source == "ledger" else 0
    return [_role(folder, "reward", index) for index in range(pools)]


def environments(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    """Specifications of the environment servers, where problems are played in environments."""
    servers = config.environments.servers if config.environments.is_on else 0
    return [_role(folder, "environments", index) for index in range(servers)]


def trackers(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    """One process each for W&B and TensorBoard if they are on: neither can harm the other or the run."""
    return [
        ProcessSpec(
            name=name,
            arguments=("track", "--run", str(folder.path), "--to", name, "--follow"),
            log=folder.logs / f"{name}.log",
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        for name in trackers_of(config)
    ]


def callbacks(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    """The process that has the user's callbacks called, if there are any."""
    if not config.run.callbacks:
        return []
    return [
        ProcessSpec(
            name=CALLBACKS,
            arguments=("callbacks", "--run", str(folder.path)),
            log=folder.logs / f"{CALLBACKS}.log",
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
    ]


def redis(folder: RunFolder, program: str, conf: str) -> ProcessSpec:
    return ProcessSpec(
        name="redis",
        arguments=("exec", program, conf),
        log=folder.logs / "redis.log",
        environment=KEPT,
    )


def _role(
    folder: RunFolder,
    name: str,
    index: int,
    *,
    threads: int = 1,
    gpus: Sequence[GpuName] = (),
) -> ProcessSpec:
    where = ("--run", str(folder.path))
    return of_role(where, folder.logs, name, f"{name}-{index}", threads=threads, gpus=gpus)


def of_role(
    where: Sequence[str],
    logs: Path,
    role: str,
    name: str,
    extra: Sequence[str] = (),
    *,
    threads: int = 1,
    gpus: Sequence[GpuName] = (),
    alone: bool = False,
) -> ProcessSpec:
    """Specification of one process of a role, on the run's own host or another one.

    Args:
        where: options that name the run.
        logs: folder of its log.
        role: the role's sub-command.
        name: its member id.
        extra: further options.
        threads: CPU threads of numerical libraries.
        gpus: the GPUs that it sees.
        alone: whether nobody else needs its cores while it computes.
    """
    return ProcessSpec(
        name=name,
        arguments=(role, *where, "--name", name, *extra),
        log=logs / f"{name}.log",
        threads=threads,
        alone=alone,
        environment=seeing(gpus),
    )
