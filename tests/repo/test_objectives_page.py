"""docs/objectives.md is what docs/objectives.py writes, and the table is what the code has."""

from __future__ import annotations

import importlib.util
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType

import pytest

from tandem.common.config import ObjectiveConfig
from tandem.common.objectives import OBJECTIVES

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


def test_every_key_that_an_objective_reads_or_sets_is_in_the_config(writer: ModuleType) -> None:
    known = set(writer.keys())
    assert known == set(ObjectiveConfig.model_fields)
    for name, entry in OBJECTIVES.items():
        assert set(entry.reads) <= known, name
        assert set(entry.defaults) <= known, name
        ObjectiveConfig(name=name)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    able = sum(not entry.missing for entry in OBJECTIVES.values())
    assert f"[all {able} of them](docs/objectives.md)" in readme


def test_every_key_is_read_by_some_objective() -> None:
    read = {key for entry in OBJECTIVES.values() for key in entry.reads}
    assert set(ObjectiveConfig.model_fields) - read == {"name", "params"}


def test_settings_and_config_have_the_same_keys_and_defaults() -> None:
    pytest.importorskip("torch")
    from tandem.learner.objectives import ObjectiveSettings

    config = ObjectiveConfig()
    names = {field.name for field in fields(ObjectiveSettings)}
    assert names - {"expert_negative"} == set(ObjectiveConfig.model_fields) - {
        "name",
        "truncation",
        "stragglers",
    }
    for field in fields(ObjectiveSettings):
        default = field.default if field.default is not MISSING else {}
        if field.name != "expert_negative":
            assert getattr(config, field.name) == default, field.name


def test_the_tables_columns_are_those_that_the_code_asks_for() -> None:
    pytest.importorskip("torch")
    from tandem.learner.objectives import REGISTRY, make

    assert set(REGISTRY) == set(OBJECTIVES)
    for name, entry in OBJECTIVES.items():
        assert make(name).columns == set(entry.columns), name
        assert (make(name).unit != "row") == (entry.unit != "row"), name
