"""Run one rank of the learner. It needs the run's folder, where its journal and checkpoints are."""

from __future__ import annotations

import argparse

from ...common.errors import ConfigError
from .roles import add_arguments as add_role_arguments
from .roles import run_role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a role, and this rank's place among the ranks."""
    add_role_arguments(parser)
    parser.add_argument("--rank", type=int, default=0, help="rank of this process, from 0")
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks")
    parser.add_argument(
        "--master-port",
        type=int,
        default=0,
        help="port of the ranks' rendezvous; needed with more than one rank",
    )


def run(arguments: argparse.Namespace) -> int:
    """Works until the run has ended or it is asked to drain."""
    if not 0 <= arguments.rank < arguments.world_size:
        raise ConfigError(
            f"--rank {arguments.rank} isn't a rank of --world-size {arguments.world_size}: "
            f"ranks count from 0"
        )
    if arguments.world_size > 1 and not arguments.master_port:
        raise ConfigError("--world-size over 1 needs --master-port, the same for every rank")
    if arguments.run is None:
        raise ConfigError("the learner keeps its journal in the run's folder: give --run DIR")
    port = arguments.master_port
    if not port:
        from ..host.redis_server import choose_port

        # A single rank meets nobody: any port does.
        port = choose_port("127.0.0.1", None)
    return run_role(
        "learner",
        arguments,
        rank=arguments.rank,
        world_size=arguments.world_size,
        master_port=port,
    )
