"""Which GPU each rank of the learner takes."""

from __future__ import annotations

import pytest
import torch

from tandem.learner.rendezvous import Seat, device_of, variables


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
