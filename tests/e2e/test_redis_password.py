"""A password in ``replay.redis_url`` reaches the run's Redis, and no file or process that others can read."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import Run, summary

from tandem.common.run_folder import JoinInfo
from tandem.launch.host import redis_server

MARKER = "pass:word@marker"
QUOTED = "pass%3Aword%40marker"
BRIEF = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")


@pytest.fixture
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A redis-server with a password."""
    port = redis_server.choose_port("127.0.0.1", None)
    place = tmp_path_factory.mktemp("redis")
    conf = place / "redis.conf"
    conf.write_text(
        f'port {port}\nbind 127.0.0.1\nrequirepass "{MARKER}"\ndir {place}\nappendonly yes\nappendfsync no\n'
    )
    with open(place / "log", "wb") as log:
        process = subprocess.Popen([str(redis_server.find().path), str(conf)], stdout=log)
    join = JoinInfo(run_id="", host="127.0.0.1", port=port, password=MARKER)
    try:
        redis_server.wait_ready(join, deadline=20, alive=lambda: process.poll() is None)
        yield f"redis://:{QUOTED}@127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def words_until_the_end(run: Run) -> set[str]:
    """The words of all processes that a command has started, while it is up."""
    seen: set[str] = set()
    try:
        while run.process.poll() is None:
            for child in run.tree.children(recursive=True):
                try:
                    seen.update(child.cmdline())
                except psutil.Error:
                    continue
            try:
                run.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
    finally:
        run.end()
    assert run.process.returncode == 0, run.said()
    return seen


def holding(folder: Path) -> set[str]:
    """Names of the files below a folder that hold the password."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        path.name
        for path in files
        if any(form.encode() in path.read_bytes() for form in (MARKER, QUOTED))
    }


@pytest.mark.timeout(400)
def test_a_sweep_hands_it_to_its_runs_in_their_environment(tmp_path: Path, url: str) -> None:
    words = ("run.steps=1,2", *BRIEF, f"replay={{redis_url: '{url}', window: 1}}")
    run = Run(tmp_path, "sweep", "miniature", *words, "--seeds", "1", "--jobs", "2", "--out", "all")
    seen = words_until_the_end(run)
    assert [word for word in seen if MARKER in word or QUOTED in word] == []
    assert any("redis_url" in word for word in seen)
    assert holding(tmp_path) == {"join.json"}
    assert "put it into TANDEM_REDIS_PASSWORD" in run.said()
    assert "redis_url" in (tmp_path / "all" / "sweep.md").read_text()


@pytest.mark.timeout(400)
@pytest.mark.byhand
def test_stages_are_summed_up_without_it(tmp_path: Path, url: str) -> None:
    words = ("sft.run.steps=1", "rl.run.steps=1", *BRIEF, f"rl.replay.redis_url={url}")
    # What the command forks has its words, in which the user has written the password.
    words_until_the_end(Run(tmp_path, "start", "miniature-sft-rl", *words))
    assert holding(tmp_path) == {"join.json"}
    overrides = summary(tmp_path / "runs" / "miniature-sft-rl")["overrides"]
    assert any(word.startswith("rl.replay.redis_url=") for word in overrides)
