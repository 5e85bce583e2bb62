"""docs/models.md, docs/objectives.md and docs/presets.md are what the files beside them write."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tandem.common.objectives import KEYS, OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]
MUST_AGREE = {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3"}


def _writer(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models() -> ModuleType:
    return _writer("models")


@pytest.fixture(scope="module")
def objectives() -> ModuleType:
    return _writer("objectives")


@pytest.fixture(scope="module")
def presets() -> ModuleType:
    return _writer("presets")


@pytest.mark.parametrize("name", ["models", "objectives", "presets"])
def test_the_page_is_up_to_date(name: str, request: pytest.FixtureRequest) -> None:
    writer = request.getfixturevalue(name)
    found = writer.PAGE.read_text(encoding="utf-8")
    assert found == writer.page(), f"run python docs/{name}.py"


def test_enough_families_agree(models: ModuleType) -> None:
    agree = {f.kind for f in models.families() if not f.learner and not f.engine}
    assert agree >= MUST_AGREE
    assert len({family.kind for family in models.families()}) >= 30
    assert len(agree) >= 22


def test_every_key_is_explained_and_read_by_some_objective(objectives: ModuleType) -> None:
    assert set(objectives.keys()) == KEYS | {"name"}
    commands = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert f"[all {len(OBJECTIVES)} of them](objectives.md)" in commands


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_says_what_it_is(name: str, objectives: ModuleType) -> None:
    kind = OBJECTIVES[name]
    assert objectives.summary(kind).endswith(".")
    assert len(objectives.summary(kind).splitlines()) == 1
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
