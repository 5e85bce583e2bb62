"""Run one rank of the learner. Rank 0 needs the run's folder, where its journal and checkpoints are.

`tandem start` and `tandem join` place the ranks themselves. By hand, a rank's place is given by options; under torchrun
or srun it is read from their environment.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import ConfigError
from .options import locate
from .roles import add_arguments as add_role_arguments
from .roles import run_role

if TYPE_CHECKING:
    from ...common.config import Config
    from ...learner.rendezvous import Seat

PLACERS: Mapping[str, Mapping[str, str]] = {
    "torchrun": {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"},
    "Slurm": {
        "rank": "SLURM_PROCID",
        "world_size": "SLURM_NTASKS",
        "local_rank": "SLURM_LOCALID",
    },
}
"""Who may have started this process, by the variables in which they say its place; the first one counts, since
torchrun may run under Slurm."""
MEETING = {"master_address": "MASTER_ADDR", "master_port": "MASTER_PORT"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a role, and this rank's place among the ranks."""
    add_role_arguments(parser)
    parser.add_argument("--rank", type=int, help="rank of this process, from 0 (default 0)")
    parser.add_argument("--world-size", type=int, help="number of ranks (default 1)")
    parser.add_argument(
        "--local-rank", type=int, help="its place among the ranks of its host, from 0"
    )
    parser.add_argument(
        "--master-address", help="where rank 0 listens (default: the run's launch.bind)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        help="port of the ranks' rendezvous; needed with more than one rank",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="a folder of this host's for a rank without the run's folder",
    )


def run(arguments: argparse.Namespace) -> int:
    """Works until the run has ended or it is asked to drain."""
    place = placed(arguments, os.environ)
    if place["rank"] == 0 and arguments.run is None:
        raise ConfigError("the learner keeps its journal in the run's folder: give --run DIR")
    folder = arguments.folder
    if folder is None and arguments.join is not None:
        run_id = locate(arguments)[0].run_id
        folder = f"hosts/{socket.gethostname()}-{run_id}"
    return run_role(
        "learner",
        arguments,
        lambda config: {
            "seat": seat(place, config),
            "scratch": None if folder is None else Path(folder).expanduser().absolute(),
        },
    )


def placed(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, int | str]:
    """A rank's place by its options and by the variables of whoever has started it.

    Raises:
        ConfigError: they contradict one another, or make no place.
    """
    given = {
        name: getattr(arguments, name)
        for name in ("rank", "world_size", "local_rank", *MEETING)
        if getattr(arguments, name) is not None
    }
    placer = next(
        (one for one, names in PLACERS.items() if any(v in environment for v in names.values())),
        None,
    )
    if placer is not None:
        names = PLACERS[placer]
        lacking = [v for v in names.values() if v not in environment]
        if lacking:
            there = ", ".join(v for v in names.values() if v in environment)
            raise ConfigError(
                f"{there} place this rank as {placer} does, and {', '.join(lacking)} is missing: set all of "
                f"them, or none and give --rank and --world-size"
            )
        names = {**names, **{n: v for n, v in MEETING.items() if v in environment}}
        for name, variable in names.items():
            value: int | str = environment[variable]
            if name != "master_address":
                if not str(value).isdecimal():
                    raise ConfigError(f"{variable}={value!r} should be a number from 0")
                value = int(value)
            if given.setdefault(name, value) != value:
                option = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{option} {given[name]} contradicts {variable}={value} of {placer}: leave the option out, or "
                    f"unset the variable"
                )
    rank, world = int(given.setdefault("rank", 0)), int(given.setdefault("world_size", 1))
    whose = f" ({placer})" if placer else ""
    if not 0 <= rank < world:
        raise ConfigError(
            f"--rank {rank} isn't a rank of --world-size {world}{whose}: ranks count from 0"
        )
    if world > 1 and not given.get("master_port"):
        raise ConfigError(
            "--world-size over 1 needs --master-port, the same for every rank"
            + (f": {placer} names none" if placer else "")
        )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and placer == "torchrun":
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        given["agent_store"] = f"tandem/{attempt}"
    return given


def seat(place: Mapping[str, int | str], config: Config) -> Seat:
    """The rank's seat among the learner's ranks.

    Raises:
        ConfigError: the run has another number of ranks.
    """
    from ...learner.rendezvous import Seat
    from ..run.processes.roles import meeting_address

    rank, world = int(place["rank"]), int(place["world_size"])
    if world != config.learner.ranks:
        raise ConfigError(
            f"{world} rank{'s' * (world > 1)} were started, and the run has learner.ranks="
            f"{config.learner.ranks}: start as many"
        )
    agent = place.get("agent_store")
    return Seat(
        rank=rank,
        world_size=world,
        local_rank=int(place.get("local_rank", rank % config.ranks_per_host)),
        address=str(place.get("master_address") or meeting_address(config)),
        port=int(place["master_port"]) if place.get("master_port") else None,
        agent_store=None if agent is None else str(agent),
    )
