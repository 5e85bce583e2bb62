"""One flipped bit in a file that a resume reads before anything starts: refused, told, or harmless.

Checkpoints and the journal have tests of their own (tests/learner), a whole run for each file is in
tests/faults/test_flipped_bits.py, and docs/status.md says what is detected where.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.common.config import build, read_yaml, to_yaml
from tandem.common.errors import TandemError
from tandem.common.run_folder import JoinInfo, RunFolder, read_join
from tandem.launch.run.opened.opening import open_folder
from tandem.launch.run.opened.presets import load
from tandem.launch.trackers.following import Sent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """As a run that was killed leaves it."""
    monkeypatch.chdir(tmp_path)
    preset = load("miniature")
    opening = open_folder(preset, ["run.steps=20", "learner.optimizer.lr=3e-4"], fresh=False)
    opening.folder.make()
    opening.folder.write_config(to_yaml(opening.config))
    opening.folder.write_run(
        {
            "run_id": opening.run_id,
            "preset": "miniature",
            "preset_path": str(preset.path),
            "overrides": list(opening.overrides),
            "state": "running",
            "wall_seconds": 12.5,
            "began": 1.7e9,
            "alive": 1.7e9 + 3,
        }
    )
    opening.folder.write_join(
        JoinInfo(run_id=opening.run_id, host="127.0.0.1", port=7000, password="secret")
    )
    return opening.folder


LAST = 50
"""Bytes at a file's end, where the digest stands, that are all flipped."""


def flips(path: Path, most: int) -> Iterator[int]:
    """Flips bits one at a time: so many, and all of the last bytes; the file is whole at the end."""
    whole = path.read_bytes()
    last = range(8 * max(0, len(whole) - LAST), 8 * len(whole))
    others = range(last.start)
    for bit in [*sorted(random.Random(3).sample(others, min(most, len(others)))), *last]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        yield bit
    path.write_bytes(whole)


def outcome(read: Callable[[], Any]) -> tuple[Any, str]:
    """What was read, or why it was refused."""
    try:
        return read(), ""
    except TandemError as error:
        return None, str(error)


def test_run_json(folder: RunFolder) -> None:
    right = folder.read_run()
    refused = tried = 0
    for bit in flips(folder.run_json, 400):
        found, why = outcome(folder.read_run)
        assert str(folder.run_json) in why if why else found == right, bit
        tried += 1
        refused += bool(why)
    # What else is white space.
    assert refused > 0.8 * tried


def test_join_json(folder: RunFolder) -> None:
    right = read_join(folder.join)
    for bit in flips(folder.join, 400):
        found, why = outcome(lambda: read_join(folder.join))
        assert str(folder.join) in why if why else found == right, bit


def test_config_yaml(folder: RunFolder) -> None:
    *above, seal = folder.config.read_bytes().splitlines(keepends=True)
    accepted = 0
    for bit in flips(folder.config, 400):
        _, why = outcome(folder.check_config)
        if why:
            assert str(folder.config) in why
            continue
        # The digest isn't found any more: a comment that nobody reads, or no YAML.
        accepted += 1
        *lines, last = folder.config.read_bytes().splitlines(keepends=True)
        assert lines == above, bit
        if not last.startswith(b"#"):
            assert outcome(lambda: build(read_yaml(folder.config), stored=True))[1], (bit, last)
    assert 0 < accepted < 8 * len(seal)


@pytest.mark.byhand
def test_a_resume_refuses_them_all_before_it_changes_anything(folder: RunFolder) -> None:
    right = open_folder(load("miniature"), [], fresh=False)
    for path in (folder.config, folder.run_json):
        for bit in flips(path, 20):
            before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
            found, why = outcome(lambda: open_folder(load("miniature"), [], fresh=False))
            if why:
                assert path.name in why, (path, bit)
            else:
                assert (found.kind, found.run, found.changed) == (right.kind, right.run, {})
                assert to_yaml(found.config) == to_yaml(right.config)
            assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before


def test_an_edited_config_is_resumed_without_its_last_line(folder: RunFolder) -> None:
    text = folder.config.read_text().replace("stall_seconds: 300", "stall_seconds: 301")
    folder.config.write_text(text)
    with pytest.raises(TandemError, match="if you have edited it, remove its last line"):
        open_folder(load("miniature"), [], fresh=False)
    folder.config.write_text(text[: text.rindex("#")])
    changed = open_folder(load("miniature"), [], fresh=False).changed
    assert changed == {"launch.stall_seconds": (301.0, 300.0)}


def test_what_a_tracker_has_been_sent(tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    right = Sent(rows=12, step=10, evaluations={"heldout@0", "heldout@10"})
    right.write(path)
    for bit in flips(path, 400):
        found, why = outcome(lambda: Sent.read(path))
        assert str(path) in why if why else found == right, bit
