"""`tandem --help` stays quick: it imports nothing that takes long."""

from __future__ import annotations

import re
import subprocess
import sys

SLOW = {
    "torch",
    "transformers",
    "vllm",
    "deepspeed",
    "pydantic",
    "pyarrow",
    "redis",
    "zmq",
    "sympy",
}


def imported_by(*arguments: str) -> set[str]:
    """The top-level names of the modules that a Python with these arguments imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"^import time:.*\|\s*([\w.]+)\s*$", done.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in lines}


def test_help_imports_nothing_slow(tandem_command: str) -> None:
    assert imported_by(tandem_command, "--help") & SLOW == set()


def test_an_import_is_seen() -> None:
    assert "json" in imported_by("-c", "import json.decoder")


def test_help_names_the_commands(tandem_command: str) -> None:
    done = subprocess.run(
        [tandem_command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    missing = [
        name
        for name in ("start", "rollout", "reward", "learner", "offline", "join-file")
        if name not in done.stdout
    ]
    assert not missing
