"""Starts the judge's server of the tests (``judge_server.py``), and reads what it was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("judge_server.py")


class JudgeProcess:
    """A judge as a process of its own.

    Args:
        log: file of its requests.
        port: 0 = any free one.
        tls: files of its certificate and key.
        key: what requests must hold as a key.
    """

    def __init__(
        self, log: Path, port: int = 0, tls: tuple[Path, Path] | None = None, key: str = ""
    ) -> None:
        self.log = log
        log.touch()
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(port), str(log), *map(str, tls or ())],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JUDGE_KEY": key},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    def requests(self, method_path: str = "") -> list[dict[str, Any]]:
        """The requests so far whose path contains a text."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if method_path in line["path"]]

    def stop(self) -> None:
        """Kills it: its port refuses connections from then on."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> JudgeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
