"""Environments that foreign servers play, behind a real environment server of ours."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from environment_runs import Playing, Run, make_run

from tandem.common.records import Verdict
from tandem.replay.store import RunStore

FOREIGN = Path(__file__).resolve().parents[1] / "foreign"
APPWORLD = f"{sys.executable} {FOREIGN / 'appworld_standin.py'} {{port}}"
RIGHT = "<code>apis.supervisor.complete_task(answer=42)</code>"


@pytest.fixture(scope="module")
def run(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("foreign")
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        use = {
            "cards": {
                "form": "verifiers",
                "python": str(python),
                "config": {},
                "path": [str(FOREIGN / "standin")],
            },
            "far/cards": {
                "form": "verifiers",
                "python": str(python),
                "config": {},
                "path": [str(FOREIGN / "standin")],
            },
            "appworld": {"form": "appworld", "command": APPWORLD, "root": root},
        }
        made = make_run(server, folder, use=use, reset_seconds=30.0)
        yield made
        made.store.close()


def row(name: str) -> dict[str, Any]:
    return {"task": {"name": name}}


def test_episodes_of_verifiers(play: Any) -> None:
    async def body(playing: Playing) -> None:
        for name in ("cards", "far/cards"):
            played = await playing.play(name, row("played"))
            assert (played.reward, played.failure) == (0.0, None)
        failed = await playing.play("cards", row("failed"))
        assert (failed.reward, failed.failure) == (None, Verdict.ENV_FAILED)
        assert "planted" in failed.detail

    play(body)


def test_an_episode_whose_server_of_verifiers_dies_is_played_again_in_a_new_session(
    play: Any,
) -> None:
    async def body(playing: Playing) -> None:
        played = await playing.play("cards", row("dies"))
        assert played.failure is Verdict.ENV_FAILED
        assert "lost 2 times: environments-0 handed it back: verifiers' server" in played.detail
        # Its other environments are played all the while.
        assert playing.client.slots("appworld") > 0
        assert playing.sessions == 2
        assert (await playing.play("cards", row("played"))).failure is None

    play(body)


def test_episodes_of_appworld(play_one: Any) -> None:
    answers = iter(
        ["<code>print('19')</code>", "<code>apis.supervisor.complete_task(answer=42)</code>"]
    )
    played, asked = play_one("appworld", {"task": {"task_id": "sum_1"}}, lambda _: next(answers))
    assert (played.reward, played.failure) == (1.0, None)
    assert played.turn_rewards == (0.0, 1.0)
    assert asked[1]["messages"][-1]["content"] == "19\n"


def test_an_error_of_appworlds_server_is_a_failure(play_one: Any) -> None:
    played, _ = play_one("appworld", {"task_id": "sum_1"}, lambda _: "<code>crash</code>")
    assert (played.reward, played.failure) == (None, Verdict.ENV_FAILED)
    assert "500" in played.detail
    played, _ = play_one("appworld", {"task_id": "none"})
    assert played.failure is Verdict.ENV_RESET


def test_nothing_is_left_when_the_server_ends(run: Run, running: Any, play_one: Any) -> None:
    assert play_one("appworld", {"task_id": "sum_1"}, lambda _: RIGHT)[0].failure is None
    spec = yaml.safe_load(RunStore(run.store).config_yaml())["environments"]["use"]["appworld"]
    outputs = Path(spec["root"]) / "experiments/outputs"
    assert list(outputs.iterdir())
    below = psutil.Process(running.pid).children(recursive=True)
    assert below
    running.terminate()
    assert running.wait(30) == 0
    psutil.wait_procs(below, timeout=20)
    assert not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not list(outputs.iterdir())
