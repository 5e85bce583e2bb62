"""Where the learner's ranks meet, and which GPU each of them takes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from tandem.common.errors import ConfigError
from tandem.learner.rendezvous import Seat, device_of, interfaces, variables


@pytest.mark.parametrize(("rank", "gpus", "index"), [(0, 1, 0), (3, 1, 0), (3, 8, 3)])
def test_deepspeed_is_told_the_gpu_that_the_rank_is_on(
    rank: int, gpus: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a run each rank sees one GPU, its own, as the first; DeepSpeed sets the device to LOCAL_RANK.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    told = variables(Seat(rank=rank, world_size=4, local_rank=rank, port=1234))
    assert (told["RANK"], told["WORLD_SIZE"]) == (str(rank), "4")
    assert told["LOCAL_RANK"] == str(index) == str(device_of(rank).index)


def test_on_cpus_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert variables(Seat(rank=3, world_size=4, local_rank=3, port=1234))["LOCAL_RANK"] == "3"


MEET = """
import sys
from tandem.learner.rendezvous import Seat, broadcast_bytes, process_group
import psutil
rank, port = int(sys.argv[1]), int(sys.argv[2])
with process_group(Seat(rank=rank, world_size=2, local_rank=rank, port=port)):
    word = broadcast_bytes(b"word" if rank == 0 else None)
    listening = {c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    print(word.decode(), sorted({a.ip for a in listening}), port in {a.port for a in listening})
"""


def test_nobody_can_come_to_the_meeting_once_all_ranks_are_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, str(rank), str(port)], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    # gloo's own sockets are left.
    assert said == ["word ['127.0.0.1'] False\n"] * 2


def test_gloo_takes_the_interface_that_reaches_rank_0() -> None:
    own = interfaces(Seat(rank=1, world_size=2, address="127.0.0.1"))["GLOO_SOCKET_IFNAME"]
    assert own.startswith("lo")
    with pytest.raises(ConfigError, match=r"no address of this host reaches nowhere"):
        interfaces(Seat(rank=1, world_size=2, address="nowhere.invalid"))
