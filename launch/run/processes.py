"""The processes of a run: name, command and GPUs of each, and the parts that they are supervised as."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...common.run_folder import RunFolder
from ..host.redis_server import choose_port
from ..plan.placement import Placement, trackers_of, workers_of
from .parts import Part, ProcessSpec, Stage

if TYPE_CHECKING:
    from ...common.config import Config

CALLBACKS = "callbacks"
"""Name of the process that has the callbacks called."""


def parts(config: Config, folder: RunFolder, placement: Placement) -> list[Part]:
    """All parts of a run except its redis-server."""
    made = [
        Part(
            name="learner",
            stage=Stage.LEARNER,
            # Each start gets a new port: the old one may linger in a half-closed rendezvous.
            specs=lambda: learner(
                config,
                folder,
                placement,
                str(choose_port("127.0.0.1", None, config.launch.port_range)),
            ),
            may_finish=True,
        )
    ]
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
                dispensable=stage is Stage.TRACKERS,
                comes_back=spec.name == CALLBACKS,
            )
            for spec in specs
        ]
    return made


def learner(
    config: Config, folder: RunFolder, placement: Placement, port: str
) -> list[ProcessSpec]:
    """Specifications of all ranks; ``port`` is the port of their rendezvous."""
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
