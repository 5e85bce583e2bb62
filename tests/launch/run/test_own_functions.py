"""What a config names of the user's own is looked at before a run makes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.launch.cli import main
from tandem.launch.run.opened import choices
from tandem.launch.run.opened.presets import load

MODULE = """
number = 3

def loss(rows, scalars, settings):
    return rows.logprobs.sum()

def two(rows, scalars):
    return rows.logprobs.sum()

def paid(completions, **columns):
    return [1.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "leaves.py").write_text("import os; os._exit(0)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reward(name: str) -> str:
    return f"reward.components=[{{name: accuracy}}, {{name: '{name}', weight: 0.5}}]"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learner.objective.name=mine:missing", "has no attribute 'missing'"),
        ("learner.objective.name=mine:number", "neither a subclass of Objective nor a function"),
        ("learner.objective.name=mine:two", "can't be called with (rows, scalars, settings)"),
        ("learner.objective.name=leaves:loss", "does its module end the interpreter?"),
        (reward("mine:missing"), "has no attribute 'missing'"),
        (reward("mine:number"), "mine:number isn't a function: 3"),
        (reward("leaves:paid"), "does its module end the interpreter?"),
    ],
)
def test_a_function_that_can_not_be_called_is_refused_before_the_start(
    word: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "miniature-easy", "run.steps=1", word]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_functions_that_are_there_are_accepted() -> None:
    words = ["learner.objective.name=mine:loss", "rollout.engine=mine:make", reward("mine:paid")]
    choices.check_named(load("miniature-easy").resolve(words))


def test_a_host_without_pools_needs_no_reward_function() -> None:
    words = [reward("elsewhere:paid"), "reward.pools=0"]
    choices.check_named(load("miniature-easy").resolve(words))
