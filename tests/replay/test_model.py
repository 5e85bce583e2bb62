"""Scripts and rules, held against each other over random histories.

In CI a few, the same ones each time. By hand as many as ``TANDEM_MODEL_EXAMPLES`` says, others each
time, and a look whether the model sees it where a script is wrong::

    TANDEM_MODEL_EXAMPLES=5000 bash tests/run.sh tests/replay/test_model.py -m byhand
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from ledger_histories import Histories
from ledger_machine import KINDS
from ledger_mutants import MUTANTS, mutated
from ledger_state import with_clock

from tandem.replay import connection

# Finding the shortest history that fails takes a while; without a failure this is seconds.
pytestmark = pytest.mark.timeout(600)
Machines = Callable[[str], type[Histories]]


def run(machine: type[Histories], examples: int, **changes: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            **{
                "max_examples": examples,
                "stateful_step_count": 40,
                "derandomize": True,
                "deadline": None,
                "database": None,
                "suppress_health_check": list(HealthCheck),
                **changes,
            }
        ),
    )


class OnAServer(Histories):
    """Histories whose server is really killed, and whose host loses what wasn't on disk."""

    server: Any

    def new_life(self, *, forgets: bool) -> None:
        self.server.kill()
        self._start()

    def _start(self) -> None:
        self.server.start()
        self.client.connection_pool.disconnect()
        self.model.new_life = self.scripts_gone = True

    def save(self) -> None:
        file = self.server.folder / "appendonly.aof"
        self.on_disk = (file.read_bytes(), copy.deepcopy(self.model))

    def crash(self) -> None:
        self.server.kill()
        data, model = self.on_disk
        (self.server.folder / "appendonly.aof").write_bytes(data)
        now, self.model = self.model.now, copy.deepcopy(model)
        self._start()
        self.forget_after_crash(now)


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory, servers: Any) -> Iterator[Any]:
    """A server that all histories of this file share, one after the other."""
    folder: Path = tmp_path_factory.mktemp("model")
    with servers.running(folder, appendonly="no") as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture
def machine(make: Any, plain_server: Any) -> Callable[[str], type[Histories]]:
    """A machine of a kind, of a class of its own."""
    values = {"make": make, "join": plain_server.join("run")}
    return lambda kind: type("Machine", (Histories,), {**values, "kind": KINDS[kind]})


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_and_rules_agree(machine: Machines, kind: str):
    with with_clock():
        run(machine(kind), 12)


def test_scripts_and_rules_agree_on_a_server_that_is_killed(make: Any, own_server: Any):
    values = {"make": make, "join": own_server.join("run"), "server": own_server}
    with with_clock():
        made = type("Machine", (OnAServer,), {**values, "kind": KINDS["window"]})
        run(made, 15, stateful_step_count=30)


@pytest.mark.byhand
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_scripts_and_rules_agree_in_many_histories(machine: Machines, kind: str):
    examples = int(os.environ.get("TANDEM_MODEL_EXAMPLES", "2000")) // len(KINDS)
    with with_clock():
        run(machine(kind), examples, derandomize=False, stateful_step_count=60, print_blob=True)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_changes_a_script_to_another_that_redis_takes(plain_server: Any, mutant: str):
    scripts = {name: connection.script_source(name) for name in connection.script_names()}
    texts = {mutated(mutant, name, text) for name, text in scripts.items()} - {*scripts.values()}
    assert texts
    client = plain_server.client()
    for text in texts:
        client.script_load(text)
    client.close()


@pytest.mark.byhand
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_script_that_breaks_a_rule_is_found_out(machine: Machines, mutant: str):
    with with_clock(lambda name, text: mutated(mutant, name, text)):
        with pytest.raises(Exception):  # noqa: B017 - whatever it is that goes wrong
            run_all_kinds(machine)


def run_all_kinds(machine: Machines) -> None:
    for kind in KINDS:
        run(machine(kind), 60, phases=[Phase.generate], report_multiple_bugs=False)
