"""Which engine a config's name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common import config as c
from tandem.common.errors import ConfigError
from tandem.rollout.engine import Engine
from tandem.rollout.engines import make_engine

OWN = """
class Own:
    keyed_noise = False
    version = None
    def __init__(self, model, rollout, max_rows):
        self.told = (model.path, rollout.group_size, max_rows)
"""


def make(engine: str) -> Engine:
    rollout = c.RolloutConfig(engine=engine, group_size=2, groups_per_batch=3)
    return make_engine(c.ModelConfig(), rollout, max_rows=7)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_import_path_makes_an_engine_of_ones_own(module: Path) -> None:
    methods = "".join(
        f"    def {name}(self, *args): ...\n"
        for name in (
            *("start", "generate", "abort", "pause", "resume", "load", "restamp"),
            *("parameter_specs", "stats", "close"),
        )
    )
    (module / "own_engine.py").write_text(OWN + methods)
    engine = make("own_engine:Own")
    assert getattr(engine, "told", None) == ("miniature", 2, 7)


def test_what_it_makes_must_be_an_engine(module: Path) -> None:
    (module / "half_engine.py").write_text(OWN)
    with pytest.raises(
        ConfigError, match=r"half_engine:Own made a Own, which isn't an Engine: .*load"
    ):
        make("half_engine:Own")


@pytest.mark.parametrize("path", ["no_such_module:make", "json:no_such_factory"])
def test_a_path_that_leads_nowhere_is_told(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.engine={path} can't be imported"):
        make(path)


@pytest.mark.parametrize("name", ["vLLM", "module..factory", "a-b:c", ""])
def test_another_word_is_no_engine(name: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine='.*auto, torch, vllm, or an import"):
        c.build({"rollout": {"engine": name}})
