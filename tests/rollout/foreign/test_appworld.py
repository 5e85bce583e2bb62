"""AppWorld, against a server that stands in for its own (its data can't be had everywhere)."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.config.environments import AppWorldEnvironment
from tandem.common.confinement import can_drop_user
from tandem.common.errors import ConfigError
from tandem.launch.run.opened.presets import load
from tandem.rollout.environments import appworld
from tandem.rollout.environments.appworld import (
    NO_CODE,
    AppWorld,
    AppWorldError,
    code_of,
    opening,
    share_passed,
)
from tandem.rollout.environments.hosts import Hosts
from tandem.rollout.environments.process import Bounds
from tandem.rollout.environments.server import check_folders, hosted

STANDIN = Path(__file__).resolve().parent / "appworld_standin.py"
COMMAND = f"{sys.executable} {STANDIN} {{port}}"
RIGHT = "<code>\napis.supervisor.complete_task(answer='42')\n</code>"
WRONG = "<code>\napis.supervisor.complete_task(answer=7)\n</code>"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., AppWorld]]:
    made: list[AppWorld] = []

    def make(**settings: Any) -> AppWorld:
        made.append(AppWorld(COMMAND, root=str(tmp_path), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def server_of(world: AppWorld) -> int:
    assert world._server is not None
    return world._server.pid


def test_the_task_is_shown_with_the_facts_about_the_person(world: Any) -> None:
    system, user = world().reset({"task_id": "sum_1"})
    assert (system["role"], user["role"]) == ("system", "user")
    for fact in ("Ann Lee", "ann@example.com", "5550100", "2023-05-18", "What is 19 + 23?"):
        assert fact in user["content"]


def test_the_reward_comes_with_the_completed_task(world: Any) -> None:
    one = world()
    one.reset({"task": {"task_id": "sum_1"}})
    assert one.step("<code>print('19 and 23')</code>") == ("19 and 23\n", 0.0, False)
    assert one.step(RIGHT) == ("Execution successful.", 1.0, True)


def test_a_wrong_answer_gets_the_share_of_the_tests_that_pass(world: Any) -> None:
    one = world()
    one.reset({"task_id": "sum_1"})
    assert one.step(WRONG) == ("Execution successful.", 0.5, True)


def test_errors_of_the_code_and_answers_without_code_are_told(world: Any) -> None:
    one = world()
    one.reset({"task_id": "sum_1"})
    assert "NameError" in one.step("<code>foo()</code>")[0]
    assert one.step("I don't know.") == (NO_CODE, 0.0, False)


def test_an_episode_ends_after_max_interactions(world: Any) -> None:
    one = world(max_interactions=2)
    one.reset({"task_id": "sum_1"})
    assert one.step("<code>print('1')</code>") == ("1\n", 0.0, False)
    assert one.step("<code>print('2')</code>") == ("2\n", 0.0, True)


def test_a_single_turn_is_evaluated_in_any_case(world: Any) -> None:
    one = world(single_turn=True)
    assert "single block" in one.reset({"task_id": "sum_1"})[1]["content"]
    assert one.step("<code>print('1')</code>") == ("1\n", 0.0, True)
    one.reset({"task_id": "sum_1"})
    assert one.step(RIGHT)[1:] == (1.0, True)


def test_the_preset_for_qwen3_asks_not_to_think(world: Any) -> None:
    loaded = hosted(load("qwen3-0.6b-appworld-1gpu").resolve([]).environments.use["appworld"])
    assert loaded is not None
    own = {key: loaded["params"][key] for key in loaded["params"].keys() - {"command", "root"}}
    user = world(**own).reset({"task_id": "sum_1"})[1]
    assert user["content"].endswith("What is 19 + 23? /no_think")


def test_a_server_is_used_again_and_begins_anew(world: Any) -> None:
    one = world()
    one.reset({"task_id": "sum_1"})
    first = server_of(one)
    one.step(RIGHT)
    assert "2 + 2" in one.reset({"task_id": "sum_2"})[1]["content"]
    assert server_of(one) == first
    assert one.step(RIGHT)[1] == 0.5, "the right answer of the task before"


def test_episodes_at_a_time_have_a_server_each(world: Any) -> None:
    one, two = world(), world()
    one.reset({"task_id": "sum_1"})
    two.reset({"task_id": "sum_2"})
    assert one.step(RIGHT)[1] == 1.0
    assert two.step("<code>apis.supervisor.complete_task(answer=4)</code>")[1] == 1.0


def test_two_episodes_that_find_the_same_port_free_have_a_server_each(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither server listens yet when both choose."""
    first = appworld.free_port()
    chosen = iter([first, first, appworld.free_port()])
    monkeypatch.setattr(appworld, "free_port", lambda: next(chosen))
    one, two = world(), world()
    with ThreadPoolExecutor() as both:
        list(both.map(lambda it: it.reset({"task_id": "sum_1"}), (one, two)))
    assert one._port != two._port
    assert one.step(RIGHT)[1] == 1.0
    assert two.step(WRONG)[1] == 0.5
    # The port is free again after its server's end.
    port = one._port
    one.close()
    monkeypatch.setattr(appworld, "free_port", lambda: port)
    two.close()
    two.reset({"task_id": "sum_2"})
    assert two._port == port


@pytest.mark.parametrize("code", ["crash", "die"])
def test_after_an_error_the_server_is_ended_and_a_new_one_started(world: Any, code: str) -> None:
    one = world()
    one.reset({"task_id": "sum_1"})
    first = server_of(one)
    with pytest.raises(AppWorldError, match="/execute"):
        one.step(f"<code>{code}</code>")
    assert not psutil.pid_exists(first)
    one.reset({"task_id": "sum_1"})
    assert server_of(one) != first
    assert one.step(RIGHT)[1] == 1.0


def test_a_row_without_a_task_and_an_unknown_one_are_refused(world: Any) -> None:
    one = world()
    with pytest.raises(ValueError, match="task_id"):
        one.reset({"question": "?"})
    with pytest.raises(AppWorldError, match="/initialize"):
        one.reset({"task_id": "none"})


def test_a_command_that_ends_at_once_is_told(tmp_path: Path) -> None:
    one = AppWorld(f"{shutil.which('false')} {{port}}", root=str(tmp_path))
    with pytest.raises(AppWorldError, match="exited with 1"):
        one.reset({"task_id": "sum_1"})


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("<code>a = 1\nprint(a)</code> done", "a = 1\nprint(a)"),
        ("first ```python\nprint(1)\n``` then ```\nprint(2)\n```", "print(1)"),
        ("<think>try <code>bad()</code></think><code>good()</code>", "good()"),
        ("<code>\n```python\nprint(1)\n```\n</code>", "print(1)"),
        ("<code>print(1)", "print(1)"),
        ("```\nprint(1)", "print(1)"),
        ("<think>try <code>bad()</code>", None),
        ("<think>a</think><code>good()</code><think>or <code>bad()</code>", "good()"),
        ("Use <code> tags.\n<code>print(1)</code>", "print(1)"),
        ("<code>print(1)</code> and <code>print(2)</code>", "print(1)"),
        ("<code>print('<think>')</code>", "print('<think>')"),
        ("```\nprint('<think>')\n```", "print('<think>')"),
        ("```\ngood()\n```\n<think>or <code>bad()</code>", "good()"),
        ("<code>s='<code>'\nprint(s)</code>", "s='<code>'\nprint(s)"),
        ("First <code>print(1)</code>\n<code>print(2)</code>", "print(1)"),
        ("Now:\n<code>s='\n<code>\n'\nprint(s)</code>", "s='\n<code>\n'\nprint(s)"),
        ("x<code>" * 50_000 + "\n<code>print(1)", "print(1)"),
        ("print(1)", None),
        ("<code> </code>", None),
    ],
)
def test_the_code_of_an_answer(answer: str, code: str | None) -> None:
    assert code_of(answer) == code


def test_a_command_that_cannot_be_read_is_refused() -> None:
    for command, why in (("serve 'x {port}", "No closing quotation"), (" ", "names no program")):
        with pytest.raises(ValueError, match=why):
            AppWorldEnvironment(command=command)


def test_what_is_no_evaluation_is_no_reward() -> None:
    assert share_passed({"success": False, "num_tests": 4, "passes": [1], "failures": []}) == 0.25
    for found in ({}, None, "all passed", {"success": "yes"}, {"num_tests": 1, "passes": [1, 2]}):
        with pytest.raises(AppWorldError, match="evaluated"):
            share_passed(found)


def test_the_prompt_names_no_call_that_it_doesnt_explain() -> None:
    text = opening({"instruction": "Do it."})[1]["content"]
    calls = set(re.findall(r"apis\.\w+(?:\.\w+)?", text))
    assert calls == {
        "apis.api_docs.show_app_descriptions",
        "apis.api_docs.show_api_descriptions",
        "apis.api_docs.show_api_doc",
        "apis.supervisor",
        "apis.supervisor.complete_task",
    }


def started(spec: AppWorldEnvironment) -> None:
    """Loads an environment as an environment server does at its start."""
    bounds = Bounds(reset_seconds=30, step_seconds=30, episode_seconds=30, memory_mb=2048)

    async def body() -> None:
        loaded = hosted(spec)
        assert loaded is not None
        hosts = Hosts({"appworld": loaded}, bounds, 1)
        try:
            await hosts.check("appworld")
        finally:
            await hosts.close()

    asyncio.run(body())


def test_a_program_may_be_named_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "world").mkdir()
    monkeypatch.chdir(tmp_path)
    for place in ("serve.py", "world/serve.py"):
        (tmp_path / place).symlink_to(STANDIN)
    # A server is started in the root.
    spec = AppWorldEnvironment(command="venv/bin/python ./serve.py {port}", root="world")
    started(spec)
    loaded = hosted(spec)
    assert loaded is not None
    # Its process looks at these from a folder of its own.
    assert str(tmp_path / "world/serve.py") in loaded["reads"]
    assert all(path.startswith("/") for path in loaded["reads"])
    one = AppWorld(**loaded["params"])
    try:
        one.reset({"task_id": "sum_1"})
    finally:
        one.close()


@pytest.mark.parametrize("root", [None, ".", "world"])
def test_the_root_is_told_from_where_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str | None
) -> None:
    (tmp_path / "world").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "data/tasks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    loaded = hosted(AppWorldEnvironment(command=COMMAND, root=root))
    assert loaded is not None
    # As a process does before it loads its environment.
    monkeypatch.chdir(tmp_path / "own")
    one = AppWorld(**loaded["params"], outputs="of_one")
    try:
        one.reset({"task_id": "sum_1"})
    finally:
        one.close()
    assert (tmp_path / (root or ".") / "experiments/outputs/of_one/tasks/sum_1").is_dir()
    assert str(tmp_path / (root or ".")) in loaded["reads"]


def test_nothing_is_written_into_a_working_directory_that_isnt_appworlds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says itself where AppWorld's root is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    spec = AppWorldEnvironment(command=f"env APPWORLD_ROOT={tmp_path}/elsewhere {COMMAND}")
    loaded = hosted(spec)
    assert loaded is not None
    assert loaded["params"]["root"] is None
    # What the processes may have to read, wherever it stands in the command.
    assert {str(tmp_path / "elsewhere"), str(STANDIN)} < set(loaded["reads"])
    assert str(tmp_path) not in loaded["reads"]
    started(spec)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data", "elsewhere"]
    (tmp_path / "data/tasks").mkdir()
    started(spec)
    assert (tmp_path / "experiments/outputs").is_dir()


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ("nowhere", "nowhere can't be found (No such file or directory): set it to the folder"),
        ("a_file", "no folder can be made in {}/a_file/experiments/outputs (Not a directory)"),
        ("/proc", "made in /proc/experiments/outputs (No such file or directory)"),
    ],
)
def test_a_root_without_a_place_for_outputs_is_refused_at_the_start(
    tmp_path: Path, root: str, why: str
) -> None:
    (tmp_path / "a_file").touch()
    spec = AppWorldEnvironment(command=COMMAND, root=str(tmp_path / root))
    loaded = hosted(spec)
    assert loaded is not None
    with pytest.raises(ConfigError, match=re.escape(why.format(tmp_path))) as refused:
        check_folders("apps", loaded)
    assert "environments.use.apps.root" in str(refused.value)
    assert "PYTHONPATH" not in str(refused.value)
    assert "let the user" not in str(refused.value)


AS_ANOTHER = """
import os, sys
from tandem.common.config.environments import AppWorldEnvironment
from tandem.common.confinement import can_drop_user
from tandem.common.errors import ConfigError
from tandem.common.confinement import drop_user
from tandem.common.errors import ConfigError
from tandem.rollout.environments.server import check_folders, hosted
drop_user()
try:
    check_folders("apps", hosted(AppWorldEnvironment(command="true {port}", root=sys.argv[1])))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("mode", "below", "why"),
    [
        (0o700, "world", "can't be found (Permission denied)"),
        (0o755, "", "(Permission denied): let the user who starts Tandem write there"),
    ],
)
def test_a_root_that_the_user_may_not_use_is_refused(mode: int, below: str, why: str) -> None:
    if not can_drop_user():
        pytest.skip("only root's processes become other users")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, mode)
        (Path(folder) / "world").mkdir()
        command = [sys.executable, "-c", AS_ANOTHER, str(Path(folder) / below)]
        ran = subprocess.run(command, capture_output=True, text=True)
    assert "environments.use.apps.root" in ran.stdout, ran.stderr
    assert why in ran.stdout
