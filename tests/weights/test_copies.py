"""A copy out of the model that doesn't come to its end: nobody is offered half a version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fault_processes
import pytest
import torch
from served import wait_served
from weight_processes import Named, as_bytes, config, model, specs_of

from tandem.common.records import Version

CONFIG = config(transport="shared_memory", bucket_mb=1)
DEADLINE = 30.0
"""For every wait, seconds."""


def v(step: int, term: int = 1) -> Version:
    return Version(term=term, step=step)


def layers(step: int) -> Named:
    """Four tensors, each larger than a bucket."""
    generator = torch.Generator().manual_seed(step)
    return [(f"{i}.weight", torch.randn(300, 1000, generator=generator)) for i in range(4)]


def weights_of(step: int) -> dict[str, bytes]:
    """Every bit of the version that a step publishes."""
    return as_bytes(layers(step))


def worker(run: Any, member: str = "rollout-0", **options: Any) -> Any:
    """A worker's process."""
    values = {"config": CONFIG, "specs": specs_of(layers(0)), **options}
    return run._child(fault_processes.worker, member, values)


def gathered(step: int, midway: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version; ``midway`` is called when half of them have been copied."""
    for number, item in enumerate(layers(step)):
        if number == 2:
            midway()
        yield item


@pytest.fixture
def reader(run: Any) -> tuple[Any, Any]:
    """A publisher and a worker that holds its first version."""
    publisher = run.publisher(config=CONFIG)
    child = worker(run)
    run.lines.wait_for("rollout-0 joined")
    publisher.publish(v(1), layers(1))
    assert child.next(DEADLINE) == (v(1), weights_of(1))
    wait_served(publisher, v(1), DEADLINE)
    return publisher, child


def test_a_copy_that_fails_half_way_leaves_the_old_version(reader: tuple[Any, Any]) -> None:
    publisher, child = reader

    def midway() -> None:
        raise RuntimeError("a rank has died")

    with pytest.raises(RuntimeError, match="a rank has died"):
        publisher.publish(v(2), gathered(2, midway))
    publisher.publish(v(3), layers(3))
    # It tells of every commit: there was none of 1.2.
    assert child.next(DEADLINE) == (v(3), weights_of(3))


def test_a_learner_killed_while_it_copies_leaves_the_old_version(run: Any) -> None:
    first = run.learner(config=CONFIG, big=True, halfway=2)
    child = worker(run, specs=specs_of(model(0, big=True)))
    first.pipe.send((1, 1))
    assert child.next(DEADLINE) == (v(1), as_bytes(model(1, big=True)))
    first.pipe.send((2, 2))
    assert first.next(DEADLINE) == "half"
    first.kill()
    second = run.learner(config=CONFIG, big=True)
    second.pipe.send((1, 3))
    assert child.next(DEADLINE) == (v(1, term=2), as_bytes(model(3, big=True)))
