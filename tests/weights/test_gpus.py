"""What only GPUs can run of the weight channel; NCCL needs two of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import weight_processes as processes
from served import wait_served
from weight_processes import as_bytes, model

from tandem.common.records import Version

pytestmark = pytest.mark.gpu
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def v(step: int) -> Version:
    return Version(term=1, step=step)


@two
@pytest.mark.parametrize("topology", ["star", "broadcast"])
def test_nccl_carries_every_bit(run: Any, topology: str) -> None:
    run.config = processes.config(transport="nccl", topology=topology)
    publisher = run.publisher()
    count = torch.cuda.device_count() - 1 if topology == "broadcast" else 1
    workers = [
        run.worker(
            f"rollout-{i}",
            specs=processes.specs_of(model(0, big=True)),
            device=f"cuda:{i + 1}",
        )
        for i in range(count)
    ]
    for step in range(3):
        named = [(name, tensor.cuda(0)) for name, tensor in model(step, big=True)]
        before = torch.cuda.memory_allocated(0)
        publisher.publish(v(step), named)
        # Two buckets of a megabyte may be on their way; a whole version never is.
        assert torch.cuda.memory_allocated(0) - before <= 2 << 20
        for worker in workers:
            assert worker.next(60) == (v(step), as_bytes(model(step, big=True)))
    assert publisher.stats()["failed"] == 0


def test_a_learner_on_a_gpu_serves_workers_through_the_hosts_memory(run: Any) -> None:
    run.config = processes.config(transport="auto")
    publisher = run.publisher()
    worker = run.worker(specs=processes.specs_of(model(0, big=True)))
    for step in range(3):
        named = [(name, tensor.cuda(0)) for name, tensor in model(step, big=True)]
        publisher.publish(v(step), named)
        assert worker.next(60) == (v(step), as_bytes(model(step, big=True)))
    wait_served(publisher, v(2), 20)
    assert publisher.stats()["transfers"]["rollout-0"]["transport"] == "shared_memory"


@two
def test_a_worker_that_dies_in_mid_bucket_does_not_hang_the_learner(run: Any) -> None:
    run.config = processes.config(transport="nccl", stage_seconds=5, open_seconds=20)
    publisher = run.publisher()
    options = {"specs": processes.specs_of(model(0, big=True))}
    dying = run.worker("rollout-0", device="cuda:1", **options)
    publisher.publish(v(0), [(n, t.cuda(0)) for n, t in model(0, big=True)])
    assert dying.next(60)[0] == v(0)
    dying.kill()
    publisher.publish(v(1), [(n, t.cuda(0)) for n, t in model(1, big=True)])
    other = run.worker("rollout-1", device="cuda:1", **options)
    assert other.next(60) == (v(1), as_bytes(model(1, big=True)))
