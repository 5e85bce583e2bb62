"""Import paths: how they are written, and what is told of one that leads nowhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError
from tandem.common.import_path import (
    has_module,
    is_import_path,
    is_installed,
    load,
    source_of,
    split_path,
)


@pytest.mark.parametrize(
    "path", ["json:loads", "os.path:join", "os.path.join", "pathlib:Path.cwd", "größe:maß"]
)
def test_a_name_with_a_dot_or_colon_is_an_import_path(path: str):
    assert is_import_path(path)
    assert all(split_path(path))


@pytest.mark.parametrize(
    "text", ["", "luffy", ":f", "m:", "m.", ".f", "a..b", "a b:c", "rm -rf.x", "m:f()", "m:f:g", "1.5"]
)  # fmt: skip
def test_anything_else_is_none(text: str):
    assert not is_import_path(text)
    with pytest.raises(ConfigError, match="isn't an import path: write "):
        split_path(text)


def test_what_a_path_names_is_imported():
    assert load("pathlib:Path.cwd", key="k") == Path.cwd
    assert load("os.path.join", key="k")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_module:f", "No module named 'no_such_module'.*PYTHONPATH, or start Tandem in"),
        ("no_such.module:f", "No module named 'no_such'.*PYTHONPATH, or start Tandem in"),
        # What is there isn't found elsewhere.
        ("json:no_such_name", "has no attribute 'no_such_name'$"),
    ],
)
def test_a_path_that_leads_nowhere_is_told_with_its_setting_and_the_way_out(path: str, why: str):
    with pytest.raises(ConfigError, match=rf"rollout.engine={path} .*{why}"):
        load(path, key="rollout.engine")


def test_a_module_that_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "raising_module.py").write_text("raise RuntimeError('of its own')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"RuntimeError: of its own$"):
        load("raising_module:f", key="k")


def test_a_module_may_be_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_me.py").write_text("number = 3")
    monkeypatch.setattr("sys.path", [*sys.path])
    assert not has_module("beside_me:number")
    monkeypatch.chdir(tmp_path)
    assert has_module("beside_me:number")
    assert "beside_me" not in sys.modules
    assert load("beside_me:number", key="k") == 3


def test_what_is_installed_is_not_hidden_by_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colorsys.py").write_text("")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.chdir(tmp_path)
    assert load("colorsys:rgb_to_hsv", key="k")(0, 0, 0) == (0.0, 0.0, 0)


def test_a_plain_folder_beside_a_run_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    # As where W&B isn't installed, and its folder of offline runs is in the working folder.
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not is_installed("wandb")
    assert is_installed("mine")
    assert not is_installed("nothing")


def test_the_file_of_a_module_is_found_without_importing_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("raise ValueError('imported')")
    inner = tmp_path / "a_package" / "inner.py"
    inner.touch()
    assert source_of("a_package.inner:f") == source_of("a_package.inner.f") == inner
    assert source_of("a_package:f") == tmp_path / "a_package" / "__init__.py"
    # What is installed comes before what is in the working folder, as when it is imported.
    (tmp_path / "json.py").touch()
    assert source_of("json:loads") == Path(sys.modules["json"].__file__ or "")
    for path in ("a_package.other:f", "a_package.inner.other:f", "no_such_module:f", "sys:path"):
        assert source_of(path) is None
