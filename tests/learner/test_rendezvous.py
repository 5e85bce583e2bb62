"""Where the learner's ranks meet, and which GPU each of them takes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from tandem.common.config import WeightsConfig
from tandem.common.errors import ConfigError, TandemError, WeightsError
from tandem.common.weights import nccl
from tandem.common.weights.protocol import Meeting
from tandem.launch.run.processes.supervision import HOPELESS
from tandem.learner import rendezvous
from tandem.learner.rendezvous import Seat, device_of, interfaces, process_group, variables


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


def _said_by_two_ranks(program: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(port)], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return said


def test_nobody_can_come_to_the_meeting_once_all_ranks_are_there() -> None:
    # gloo's own sockets are left.
    assert _said_by_two_ranks(MEET) == ["word ['127.0.0.1'] False\n"] * 2


GATHER = """
import sys
from tandem.learner.rendezvous import Seat, gather_names, process_group
rank, port = int(sys.argv[1]), int(sys.argv[2])
with process_group(Seat(rank=rank, world_size=2, local_rank=rank, port=port)):
    print(gather_names(["margin", "pairs"] if rank == 0 else []))
"""


def test_a_rank_may_have_nothing_to_name() -> None:
    # A rank without a row of its own, as in a last step of fewer groups than ranks.
    assert _said_by_two_ranks(GATHER) == ["[['margin', 'pairs'], []]\n"] * 2


def test_a_port_that_somebody_took_meanwhile_is_worth_another_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        seat = Seat(world_size=2, port=taken.getsockname()[1])
        with pytest.raises(TandemError, match="already in use") as caught, process_group(seat):
            pass
    assert caught.value.exit_code not in HOPELESS
    # 192.0.2.0/24 is nobody's (RFC 5737), which no other port can mend.
    monkeypatch.setattr(rendezvous, "interfaces", lambda seat, weights: {})
    seat = Seat(world_size=2, address="192.0.2.7", port=seat.port)
    with pytest.raises(ConfigError, match="can't be bound"), process_group(seat):
        pass


def test_gloo_takes_the_interface_that_reaches_rank_0() -> None:
    own = interfaces(Seat(rank=1, world_size=2, address="127.0.0.1"))["GLOO_SOCKET_IFNAME"]
    assert own.startswith("lo")
    with pytest.raises(ConfigError, match=r"no address of this host reaches nowhere"):
        interfaces(Seat(rank=1, world_size=2, address="nowhere.invalid"))


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a GPU, loopback and one interface of a private network."""
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)]
        for name, address in (("lo", "127.0.0.1"), ("eth7", "192.0.2.7"))
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("two_interfaces")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("weights", "name"),
    [("192.0.2.7", "eth7"), ("eth7", "eth7"), ("127.0.0.1", "lo"), (None, "lo")],
)
def test_nccl_on_one_learner_host_takes_the_interface_of_the_weight_channel(
    ranks: int, weights: str | None, name: str
) -> None:
    told = interfaces(Seat(world_size=ranks), weights)
    assert told == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": f"={name}"}


@pytest.mark.usefixtures("two_interfaces")
@pytest.mark.parametrize(
    ("interface", "given", "name"),
    [("192.0.2.7", None, "=eth7"), (None, None, "=lo"), ("192.0.2.7", "ib0", "ib0")],
)
def test_a_workers_nccl_takes_the_interface_of_the_weight_channel(
    interface: str | None, given: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")

    def enter(at: Meeting, seconds: float) -> None:
        raise WeightsError("nobody is there")

    monkeypatch.setattr(nccl, "enter", enter)
    channel = nccl.Nccl(WeightsConfig(interface=interface), torch.device("cpu"))
    at = Meeting(host="192.0.2.1", port=1, channel="a", rank=1, world_size=2)
    with pytest.raises(WeightsError, match="nobody is there"):
        channel._meet(at)
    assert os.environ["NCCL_SOCKET_IFNAME"] == name
