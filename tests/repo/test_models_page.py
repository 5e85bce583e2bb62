"""docs/models.md is what docs/models.py writes of the families that the tests try."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUST_AGREE = {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3"}


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "docs/models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(writer: ModuleType) -> None:
    found = writer.PAGE.read_text(encoding="utf-8")
    assert found == writer.page(), "run python docs/models.py"


def test_enough_families_agree(writer: ModuleType) -> None:
    agree = {f.kind for f in writer.families() if not f.learner and not f.engine}
    assert agree >= MUST_AGREE
    assert len({family.kind for family in writer.families()}) >= 30
    assert len(agree) >= 22
