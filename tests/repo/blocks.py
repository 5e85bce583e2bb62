"""The marked blocks of Markdown files, and how they are run; see :mod:`test_readme`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BLOCK_DEADLINE_S = 400
FINISHED_RUN_S = 460  # where nobody has made one before
MARKED = re.compile(
    r"(?:^<!--\s*test:\s*(?P<mark>[^>]*?)\s*-->[ \t]*\n(?:[ \t]*\n)*)?"
    r"^```(?P<language>bash|python)[ \t]*\n(?P<code>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"run|run after-run|no: .+")
"""What a mark may say."""
MEANT = re.compile(r"^[ \t]*<!--\s*tests?\b.*?-->", re.MULTILINE | re.DOTALL | re.IGNORECASE)
"""A comment that is meant as a mark."""


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


def lost_marks(text: str) -> list[str]:
    """The comments that are meant as marks, and aren't the mark of a block."""
    marks = {
        found.start() for found in MARKED.finditer(text) if MARK.fullmatch(found["mark"] or "")
    }
    return [found.group() for found in MEANT.finditer(text) if found.start() not in marks]


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


def run_after_run(block: Block, folder: Path, finished_run: Path) -> None:
    """Run a block beside a copy of a finished run: it may export into it or evaluate from it."""
    shutil.copytree(
        finished_run,
        sandbox(folder) / "runs" / "miniature",
        # They belong to nobody now.
        ignore=shutil.ignore_patterns("*.sock"),
        symlinks=True,
    )
    run(block, folder)
