"""What is told of an objective of the user's own that has a bug."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.common.errors import RunFailedError
from tandem.common.memory import is_out_of_memory
from tandem.learner.losses.finite import NonFiniteError
from tandem.learner.objectives import Objective, make
from tandem.learner.objectives.own import loss_of, statistics_of
from tandem.learner.rows.rows import Rows

LEARNER = Path(__file__).parent.parent
FILE = str(LEARNER / "broken_objectives.py")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LEARNER)


def case(name: str, hand: ModuleType) -> tuple[Objective, Rows, dict[str, Any]]:
    """The objective, and rows with log-probs that have a gradient."""
    objective = make(f"broken_objectives:{name}")
    these, leaf = hand.reference_case()
    scalars = {"step": 4.0, "constant": 4.0, "own_tokens": 5.0, "expert_tokens": 1.0}
    return objective, these.with_columns(logprobs=leaf.requires_grad_()), scalars


def line_of(code: str) -> int:
    return Path(FILE).read_text().splitlines().index(code) + 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("without_gradient", "its loss has no gradient"),
        ("a_number", "its loss is 0.5, not a tensor of one number"),
        ("a_vector", "its loss is a tensor of shape [10], not a tensor of one number"),
        ("nothing", "its loss is None, not a tensor of one number"),
        ("three", "not a loss and its sums"),
        ("a_text_among_sums", "its sum 'x' is 'text', not one number"),
        ("a_sum_without_a_name", "its sum 3 can't be called so: give it a name"),
        ("a_vector_among_sums", "its sum 'x' is a tensor of shape [10], not one number"),
        ("typo", "AttributeError: 'Rows' object has no attribute 'logprob'"),
        ("Derived", "AttributeError: 'Derived' object has no attribute 'scale'"),
    ],
)
def test_a_bug_ends_the_run_and_is_named(name: str, told: str, hand: ModuleType) -> None:
    with pytest.raises(RunFailedError) as caught:
        loss_of(*case(name, hand))
    said = str(caught.value)
    assert f"learner.objective.name=broken_objectives:{name} failed at step 4: " in said
    assert told in said


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("typo", "    return rows.logprob.sum()"),
        ("Derived", "        return total / self.scale, sums"),
    ],
)
def test_an_exception_is_told_with_the_users_line(name: str, line: str, hand: ModuleType) -> None:
    with pytest.raises(RunFailedError) as caught:
        loss_of(*case(name, hand))
    assert f"({FILE}, line {line_of(line)})" in str(caught.value)


def test_statistics_that_raise_end_the_run_too(hand: ModuleType) -> None:
    objective, rows, _ = case("with_statistics", hand)
    with pytest.raises(RunFailedError, match=r"failed at step 3: .*'behavior' .*broken_objectives"):
        statistics_of(objective, rows, 3)


def test_sums_may_be_numbers_and_tensors_of_one_number(hand: ModuleType) -> None:
    objective, rows, scalars = case("good", hand)
    loss, sums = loss_of(objective, rows, scalars)
    assert rows.logprobs is not None
    total = rows.logprobs.detach().sum()
    assert loss.shape == ()
    assert {name: float(value) for name, value in sums.items()} == {
        "number": 2.0, "tensor": float(total), "one": float(total),
    }  # fmt: skip
    assert all(value.shape == () and not value.requires_grad for value in sums.values())


def test_what_another_start_may_mend_stays_what_it_is(hand: ModuleType) -> None:
    with pytest.raises(torch.OutOfMemoryError) as memory:
        loss_of(*case("out_of_memory", hand))
    assert is_out_of_memory(memory.value)
    # The trainer quarantines a step whose log-probs aren't numbers.
    objective, rows, scalars = case("Derived", hand)
    assert rows.logprobs is not None
    rows = rows.with_columns(logprobs=rows.logprobs * torch.nan)
    with pytest.raises(NonFiniteError):
        loss_of(objective, rows, scalars)
