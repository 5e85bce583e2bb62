"""Scripts and rules, held against each other over random histories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from ledger_histories import Histories
from ledger_state import with_clock

COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture
def machine(make: Any, own_server: Any) -> Iterator[type[Histories]]:
    """The machine on a server of its own, whose time it sets."""

    class Machine(Histories):
        pass

    Machine.make, Machine.join = make, own_server.join("run")
    with with_clock():
        yield Machine


def test_scripts_and_rules_agree(machine: type[Histories]):
    run_state_machine_as_test(
        machine,
        settings=settings(derandomize=True, max_examples=100, stateful_step_count=40, **COMMON),
    )
