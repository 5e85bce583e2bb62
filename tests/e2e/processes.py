"""Whole runs as real processes: starts a ``tandem`` command, follows it, and looks at its tree."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
from pty_screen import OnPty

TANDEM = [sys.executable, "-P", "-m", "tandem.launch.cli"]
DEADLINE = 150.0


class Run:
    """A ``tandem start`` under way."""

    def __init__(self, cwd: Path, *words: str) -> None:
        self.output = cwd / f"output-{time.monotonic_ns()}.txt"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [*TANDEM, *words],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.tree = psutil.Process(self.process.pid)

    def said(self) -> str:
        """All that it has printed."""
        return self.output.read_text()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits while the run goes on."""
        end = time.monotonic() + DEADLINE
        while not condition():
            if self.process.poll() is not None:
                self.fail(f"it ended before {what}")
            if time.monotonic() > end:
                self.fail(f"no {what} in {DEADLINE:.0f} s")
            time.sleep(0.05)

    def wait(self, deadline: float = DEADLINE) -> int:
        """Its exit code."""
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.fail(f"still running after {deadline:.0f} s")

    def fail(self, why: str) -> NoReturn:
        """Ends it, or it would run beside all later tests, and raises what it has said."""
        said = self.said()
        self.end()
        raise AssertionError(f"{why}:\n{said}") from None

    def role(self, name: str) -> psutil.Process:
        """The process of a part, such as ``rollout-0`` or ``redis``."""
        for child in self.tree.children():
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if name == "redis" and any("redis-server" in word for word in words[:1]):
                return child
            if name in words:
                return child
        raise LookupError(f"{name} is not running:\n{self.said()}")

    def kill(self, name: str) -> int:
        """``kill -9`` of a part; returns its pid."""
        process = self.role(name)
        process.send_signal(signal.SIGKILL)
        return process.pid

    def kill_and_await(self, name: str) -> None:
        """``kill -9`` of a part; returns when another process has taken its place."""
        old = self.kill(name)

        def replaced() -> bool:
            try:
                return self.role(name).pid != old
            except (LookupError, psutil.NoSuchProcess):
                return False

        self.wait_for(replaced, f"new process for {name}")

    def end(self) -> None:
        """Ends it, whatever state it is in; its children die with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class RunOnScreen(Run):
    """The same on a terminal of its own, where it draws its live view."""

    def __init__(self, cwd: Path, *words: str, columns: int = 80, rows: int = 24) -> None:
        self.view = OnPty([*TANDEM, *words], columns=columns, rows=rows, cwd=cwd)
        self.process = self.view.process
        self.tree = psutil.Process(self.process.pid)

    def said(self) -> str:
        """All bytes that went to the terminal."""
        return self.view.raw.decode("utf-8", "replace")

    def wait(self, deadline: float = DEADLINE) -> int:
        """Its exit code; the terminal's modes are as they were."""
        try:
            return self.view.wait(deadline)
        except subprocess.TimeoutExpired:
            self.fail(f"still running after {deadline:.0f} s")

    def end(self) -> None:
        """Ends it and its terminal."""
        self.view.end()


def step(folder: Path) -> int:
    """The latest step in the metrics."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return 0
    return max((int(n) for n in re.findall(r'"step": (\d+), "term"', text)), default=0)


def steps(folder: Path) -> list[int]:
    """Steps of all training records, as they stand in the file."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["step"] for record in records if "train/lr" in record]


def tandem(cwd: Path, *words: str) -> tuple[int, str, str]:
    """A short command: exit code, standard output, standard error."""
    done = subprocess.run(
        [*TANDEM, *words], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    return done.returncode, done.stdout, done.stderr


def gone(pids: list[int], seconds: float) -> bool:
    """Whether all have ended within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) and _runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(process: psutil.Process) -> set[str]:
    """Addresses that a process and its descendants listen on, from ``/proc/net/tcp``."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            connections = one.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def summary(folder: Path) -> dict[str, Any]:
    """``summary.json``."""
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def mode(path: Path) -> int:
    """Permission bits."""
    return os.stat(path).st_mode & 0o777
