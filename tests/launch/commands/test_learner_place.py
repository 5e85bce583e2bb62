"""Where a rank of the learner gets its place from: options, torchrun or Slurm."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tandem.common.config import Config
from tandem.common.errors import ConfigError
from tandem.launch.commands.learner import add_arguments, placed, seat

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def config(ranks: int = 4, hosts: int = 2) -> Config:
    tree: dict[str, Any] = {
        "run": {"steps": 1},
        "data": {"train": [{"path": "x.jsonl", "name": "x"}]},
        "learner": {"ranks": ranks, "hosts": hosts},
        "launch": {"bind": "10.0.0.9"},
    }
    return Config.model_validate(tree)


def test_torchrun_places_a_rank() -> None:
    found = seat(placed(options(), TORCHRUN), config())
    assert (found.rank, found.world_size, found.local_rank) == (3, 4, 1)
    assert (found.address, found.port, found.agent_store) == ("10.0.0.1", 29500, None)


def test_a_store_that_torchrun_serves_is_used() -> None:
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    found = seat(placed(options(), TORCHRUN | told), config())
    # A name of its own at every restart: an earlier attempt has left its keys in the store.
    assert found.agent_store == "tandem/2"


def test_slurm_places_a_rank_whose_port_is_given() -> None:
    found = seat(placed(options("--master-port", "29500"), SLURM), config())
    assert (found.rank, found.local_rank, found.address, found.port) == (3, 1, "10.0.0.9", 29500)
    with pytest.raises(ConfigError, match=r"needs --master-port.*Slurm names none"):
        placed(options(), SLURM)


def test_torchrun_under_slurm_counts_before_slurm() -> None:
    assert placed(options(), TORCHRUN | SLURM | {"SLURM_PROCID": "0"})["rank"] == 3


def test_options_place_a_rank_on_its_host() -> None:
    words = ("--rank", "3", "--world-size", "4", "--master-port", "5")
    assert seat(placed(options(*words), {}), config()).local_rank == 1
    alone = seat(placed(options(), {}), config(ranks=1, hosts=1))
    assert (alone.rank, alone.world_size, alone.port) == (0, 1, None)


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (("--rank", "2"), TORCHRUN, "--rank 2 contradicts RANK=3 of torchrun"),
        (("--master-port", "1"), TORCHRUN, "--master-port 1 contradicts MASTER_PORT=29500"),
        (("--world-size", "8"), SLURM, "--world-size 8 contradicts SLURM_NTASKS=4 of Slurm"),
        ((), {"RANK": "1"}, "WORLD_SIZE, LOCAL_RANK is missing"),
        ((), TORCHRUN | {"RANK": "x"}, "RANK='x' should be a number"),
        ((), TORCHRUN | {"RANK": "4"}, "--rank 4 isn't a rank of --world-size 4"),
        (("--rank", "1"), {}, "--rank 1 isn't a rank of --world-size 1"),
        (("--world-size", "2"), {}, "needs --master-port"),
    ],
)
def test_contradictions_are_refused_by_name(
    words: tuple[str, ...], environment: dict[str, str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        placed(options(*words), environment)


def test_as_many_ranks_as_the_run_has_are_started() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks were started, and the run has learner.ranks=2"):
        seat(placed(options(), TORCHRUN), config(ranks=2))
