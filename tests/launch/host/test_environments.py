"""Before a run starts, each of its environments is loaded once; what can't be loaded is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common import config as configs
from tandem.common.errors import ConfigError
from tandem.launch.host import environments
from tandem.launch.host.environments import check_environments

MODULE = """
import subprocess

class World:
    def __init__(self, size=1):
        self.size = 1 / size

    def reset(self, row):
        return ""

    def step(self, text):
        return "", 0.0, True

class Sized:
    def __init__(self, size):
        raise AssertionError

class Hungry:
    def __init__(self):
        self.food = bytearray(3 << 30)

class Refusing:
    def __init__(self):
        raise ValueError("two things:\\n one\\n two")

class Dying:
    def __init__(self):
        import os
        os.abort()

class Stopped:
    def __init__(self):
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)

class Flooding:
    def __init__(self):
        while True:
            print("x" * (1 << 20))

class NoRow:
    def reset(self):
        return ""

    def step(self, text):
        return "", 0.0, True

class TwoTexts(World):
    def step(self, text, more):
        return "", 0.0, True

class NoSteps:
    def reset(self, row):
        return ""

class Typed:
    def reset(self, **row):
        return None

    def look(self, where: subprocess.Popen):
        '''Looks.'''

class NoColumns:
    def reset(self):
        return None

print("a module that prints")
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "my_world.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def go(**use: Any) -> None:
        tree = {
            "run": {"steps": 1},
            "data": {"train": [{"path": "a.parquet"}]},
            "environments": {"use": use},
        }
        check_environments(configs.build(tree, []))

    return go


def test_environments_in_the_working_folder_are_found_and_leave_nothing_behind(check: Any) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    check(good={"form": "text", "target": "my_world:World", "params": {"size": 2}})
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_slow_one_has_as_long_as_in_the_run(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "SECONDS", 0.5)
    with open(tmp_path / "my_world.py", "a") as module:
        module.write("import time\ntime.sleep(1)\n")
    check(slow={"form": "text", "target": "my_world:World"})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (("text", "my_world:Lost"), "AttributeError: module 'my_world' has no attribute 'Lost'"),
        (("text", "nowhere.at_all:World"), "ModuleNotFoundError: No module named 'nowhere'"),
        (("text", "my_world:NoSteps"), "NoSteps has no method step"),
        (("tools", "my_world:Typed"), "tool look: where has the hint"),
        (("tools", "my_world:NoColumns"), "NoColumns.reset takes nothing by name"),
        (("text", "my_world:World", {"size": 0}), "ZeroDivisionError"),
        (("text", "my_world:Refusing"), "ValueError: two things: one two (my_world.py"),
        (("text", "my_world:NoRow"), "NoRow.reset can't be called with a row: too many"),
        (
            ("text", "my_world:TwoTexts"),
            "TwoTexts.step can't be called with an answer's text: miss",
        ),
    ],
)
def test_one_that_cannot_be_loaded_is_named_with_the_reason(
    check: Any, spec: tuple[Any, ...], words: str
) -> None:
    form, target, *params = spec
    bad = {"form": form, "target": target, "params": params[0] if params else {}}
    with pytest.raises(ConfigError, match=r"environments.use.bad.target=") as refused:
        check(good={"form": "text", "target": "my_world:World"}, bad=bad)
    assert words in str(refused.value)
    assert "<frozen" not in str(refused.value)


def test_a_module_that_isnt_python_is_named_with_its_line(check: Any, tmp_path: Path) -> None:
    (tmp_path / "my_world.py").write_text("class World\n    pass\n")
    with pytest.raises(ConfigError) as refused:
        check(bad={"form": "text", "target": "my_world:World"})
    assert str(refused.value).endswith("SyntaxError: expected ':' (my_world.py, line 1)")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"form": "verifiers", "python": "/no/python", "config": {}}, "python names '/no/python'"),
        (
            {"form": "appworld", "command": "/no/uvicorn --port {port}"},
            "command names '/no/uvicorn'",
        ),
        ({"form": "appworld", "command": "true --port 8000"}, "has no {port}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_foreign_environments_program_that_isnt_there_is_named(
    check: Any, spec: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(far=spec)
    assert words in str(refused.value)
    check(
        far={**spec, "python": "true"} if "python" in spec else {**spec, "command": "true {port}"}
    )


@pytest.mark.parametrize(
    ("target", "params", "way_out"),
    [
        ("nowhere.at_all:World", {}, "Install it, put its folder on PYTHONPATH"),
        ("my_world:Sized", {"length": 3}, "It is given params={'length': 3}"),
        ("my_world:World", {"size": "2"}, "It is given params={'size': '2'}"),
        ("my_world:Hungry", {}, "Raise environments.memory_mb=2048"),
        ("my_world:Dying", {}, "If it needs more memory, raise environments.memory_mb=2048"),
        ("my_world:Stopped", {}, ""),
        ("my_world:Flooding", {}, ""),
        ("my_world:Refusing", {}, ""),
    ],
)
def test_the_way_out_fits_the_reason(
    check: Any, target: str, params: dict[str, Any], way_out: str
) -> None:
    with pytest.raises(ConfigError, match="can't be loaded") as refused:
        check(bad={"form": "text", "target": target, "params": params})
    assert way_out in str(refused.value)
    for other in ("PYTHONPATH", "memory_mb", "params"):
        assert (other in str(refused.value)) == (other in way_out)
