"""The commands that the Markdown files show do work: marked blocks are run as they stand.

An HTML comment on the line before a fenced block says what is done with it:

``<!-- test: run -->``
    run from a folder that looks like the repository, with an empty ``runs/``;
``<!-- test: run after-run -->``
    the same, with a finished run of the miniature in ``runs/miniature``;
``<!-- test: no: REASON -->``
    not run, for the reason given.

In README.md every ``bash`` and ``python`` block must carry one of them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BLOCK_DEADLINE_S = 400
FINISHED_RUN_S = 460  # where no e2e stage has made one before
MAIN_JOB = "bash launch/start_all.sh\n"
MARKED = re.compile(
    r"(?:^<!--\s*test:\s*(?P<mark>[^>]*?)\s*-->[ \t]*\n(?:[ \t]*\n)*)?"
    r"^```(?P<language>bash|python)[ \t]*\n(?P<code>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a Markdown file."""

    place: str
    """File and line, for the test's name."""
    language: str
    """``bash`` or ``python``."""
    code: str
    """What stands between the fences."""
    mark: str
    """What the comment says after ``test:``; empty without one."""


def blocks(path: Path) -> list[Block]:
    """The bash and python blocks of a Markdown file, in order."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [
        Block(
            place=f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start('language')) + 1}",
            language=found["language"],
            code=found["code"],
            mark=found["mark"] or "",
        )
        for found in MARKED.finditer(text)
    ]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL = [block for page in PAGES for block in blocks(page)]
PLAIN = [block for block in ALL if block.mark == "run"]
AFTER_RUN = [block for block in ALL if block.mark == "run after-run"]


def place(block: Block) -> str:
    """The test's id."""
    return block.place


def sandbox(folder: Path) -> Path:
    """A folder that looks like the repository, whose ``runs/`` belongs to the test."""
    hidden = {"runs", ".git", ".import", ".venv", "build", "dist"}
    for entry in ROOT.iterdir():
        if entry.name not in hidden and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").symlink_to(BIN.parent)
    (folder / "runs").mkdir()
    return folder


def run(block: Block, folder: Path) -> None:
    """Run a block as a reader would; it must exit 0."""
    env = {**os.environ, "TANDEM_SKIP_SETUP": "1", "TANDEM_VENV": str(BIN.parent)}
    if block.language == "bash":
        command = ["bash", "-eu", "-o", "pipefail", "-c", block.code]
    else:
        command = [sys.executable, "-c", block.code]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{block.place} exited {done.returncode}:\n{done.stdout[-4000:]}"


def keep(made: Path, shared: Path) -> None:
    """Gives a run of the main job to the fixture ``finished_run`` of this and the later stages."""
    complete = shared / "miniature.complete"
    if complete.exists() or not (made / "summary.json").exists():
        return
    shutil.copytree(made, shared / "miniature", ignore=shutil.ignore_patterns("*.sock"))
    complete.touch()


@pytest.mark.timeout(BLOCK_DEADLINE_S + 60)
@pytest.mark.parametrize("block", PLAIN, ids=place)
def test_a_marked_block_runs(block: Block, tmp_path: Path) -> None:
    folder = sandbox(tmp_path)
    if block.code != MAIN_JOB or "TANDEM_TEST_RUNS" not in os.environ:
        run(block, folder)
        return
    shared = Path(os.environ["TANDEM_TEST_RUNS"])
    shared.mkdir(parents=True, exist_ok=True)
    with (shared / "miniature.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(block, folder)
        keep(folder / "runs" / "miniature", shared)


@pytest.mark.timeout(FINISHED_RUN_S + BLOCK_DEADLINE_S)
@pytest.mark.parametrize("block", AFTER_RUN, ids=place)
def test_a_block_for_a_finished_run_runs(block: Block, tmp_path: Path, finished_run: Path) -> None:
    folder = sandbox(tmp_path)
    # A copy: a block may export into it or evaluate from it. Its sockets belong to nobody now.
    shutil.copytree(
        finished_run,
        folder / "runs" / "miniature",
        ignore=shutil.ignore_patterns("*.sock"),
        symlinks=True,
    )
    run(block, folder)


def test_every_block_of_the_readme_says_whether_it_is_run() -> None:
    unmarked = [
        block.place
        for block in blocks(ROOT / "README.md")
        if not re.fullmatch(r"run|run after-run|no: .+", block.mark)
    ]
    assert not unmarked, f"no <!-- test: ... --> before these blocks: {unmarked}"


def test_a_mark_is_read_with_its_block(tmp_path: Path) -> None:
    text = "<!-- test: run -->\n```bash\ntrue\n```\n\n```python\npass\n```\n"
    found = [(m["mark"], m["language"], m["code"]) for m in MARKED.finditer(text)]
    assert found == [("run", "bash", "true\n"), (None, "python", "pass\n")]
