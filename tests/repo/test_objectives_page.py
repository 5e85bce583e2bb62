"""docs/objectives.md is what docs/objectives.py writes, and the table is what the code has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tandem.common.objectives import KEYS, OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("objectives_page", ROOT / "docs/objectives.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(writer: ModuleType) -> None:
    found = writer.PAGE.read_text(encoding="utf-8")
    assert found == writer.page(), "run python docs/objectives.py"


def test_every_key_is_explained_and_read_by_some_objective(writer: ModuleType) -> None:
    assert set(writer.keys()) == KEYS | {"name"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    able = sum(not kind.missing for kind in OBJECTIVES.values())
    assert f"[all {able} of them](docs/objectives.md)" in readme


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_says_what_it_is(name: str, writer: ModuleType) -> None:
    kind = OBJECTIVES[name]
    assert writer.summary(kind).endswith(".")
    assert len(writer.summary(kind).splitlines()) == 1
    assert kind.equation
    assert kind.source
    assert kind.use


def test_the_tables_columns_are_those_that_the_code_asks_for() -> None:
    pytest.importorskip("torch")
    from tandem.learner.objectives import REGISTRY, make

    assert set(REGISTRY) == set(OBJECTIVES)
    for name, kind in OBJECTIVES.items():
        assert make(name).columns == kind().columns == set(kind.needs), name
        assert (make(name).unit != "row") == (kind.unit != "row"), name
