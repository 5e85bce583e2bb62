"""A run from Python: started as a child process, looked at, stopped, and read as Arrow tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from ...common.errors import DataError, DeadlineError, TandemError
from ...common.parts import read_parts
from ...common.run_folder import RunFolder, newest_stage, read_stages
from ..host.redis_server import PASSWORD_VARIABLE
from ..run.ending import LOOK_SECONDS, await_end, supervising_all, was_stopped
from ..run.opened.record import apart
from . import tables

if TYPE_CHECKING:
    import pyarrow as pa

    from ...common.config import Config

SAID = 4_000
"""Characters of the end of a run's output that an error shows."""
_asked: set[psutil.Process] = set()
"""The supervisors that this Python has asked to end; they compare by id and by when they began."""


def start(
    preset: str = "miniature",
    /,
    *,
    fresh: bool = False,
    offline: bool = False,
    wait_seconds: float | None = None,
    **overrides: Any,
) -> Run:
    """Starts a run, or resumes it, as ``tandem start`` does, and returns once its folder is there.

    The run is a process of its own in a session of its own: it goes on when the notebook is closed, and
    :func:`open_run` finds it again.

    Args:
        preset: a preset's name, or the path of a YAML file.
        fresh: begin anew, and move an existing folder of the same name aside.
        offline: train on stored traces, as ``tandem offline`` does.
        wait_seconds: how long the run may take to begin in its folder, seconds; then it is asked to end. None = as long as
            it takes to read the data, which may include grading them.
        overrides: settings, as ``run={"steps": 50}`` or ``**{"run.steps": 50}``. A setting whose value is a mapping,
            such as ``environments.use``, is replaced by the one that is given.

    Raises:
        TandemError: the run was refused; the message is the command's own.
        DeadlineError: it hadn't begun after ``wait_seconds``.
    """
    from ...common.config import valid_keys
    from ..run.opened.presets import load
    from ..run.several.placing import folder_of

    words = [f"{key}={_word(value)}" for key, value in _flat("", overrides, set(valid_keys()))]
    folder = RunFolder(folder_of(load(preset), words))
    called = time.time()
    # Without a name, so that nothing is left behind.
    output = tempfile.TemporaryFile()  # noqa: SIM115
    command = [sys.executable, "-P", "-m", "tandem.launch.cli", "offline" if offline else "start"]
    parted = [apart(word) for word in words]
    environment = dict(os.environ)
    for _, password in parted:
        if password is not None:
            environment[PASSWORD_VARIABLE] = password
    process = subprocess.Popen(
        [
            *command,
            preset,
            *(word for word, _ in parted),
            *(["--fresh"] if fresh else []),
            "--plain",
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    run = Run(folder.path, process=process, output=output)
    end = None if wait_seconds is None else time.monotonic() + wait_seconds
    try:
        while process.poll() is None and _began(folder) < called:
            if end is not None and time.monotonic() > end:
                raise DeadlineError(
                    f"{folder.path}: the run of {preset} hasn't begun after {wait_seconds:.0f} s "
                    f"(wait_seconds), and was asked to end; it said: {run.output[-SAID:].strip()}"
                )
            time.sleep(LOOK_SECONDS)
    except (DeadlineError, KeyboardInterrupt):
        # Whoever doesn't get the run can't stop it.
        if process.poll() is None:
            _ask_to_end(psutil.Process(process.pid))
        raise
    if process.poll():
        raise TandemError(run.output[-SAID:].strip().removeprefix("tandem: "))
    return run


def open_run(folder: str | Path) -> Run:
    """A run that is there, whether it goes on or has ended.

    Raises:
        DataError: it isn't a run's folder.
    """
    path = Path(folder).expanduser()
    if not RunFolder(newest_stage(path)).run_json.exists():
        raise DataError(f"{folder} isn't a run's folder (it has no run.json)")
    return Run(path)


class Run:
    """A run's folder, with its process if this Python has started it. Tables are read anew with each call."""

    def __init__(
        self,
        path: Path,
        *,
        process: subprocess.Popen[bytes] | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        self.path = path.absolute()
        """The run's folder."""
        self._process = process
        self._output = output

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def folder(self) -> RunFolder:
        """The paths in the folder; of a run in stages, those of the stage that was begun last."""
        return RunFolder(newest_stage(self.path))

    @property
    def output(self) -> str:
        """What the command has printed, if this Python has started it."""
        if self._output is None:
            return ""
        # By its place: the process writes at the offset that it shares with this file.
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    @property
    def config(self) -> Config:
        """All settings."""
        from ...common.config import build, read_yaml

        return build(read_yaml(self.folder.config), stored=True)

    @property
    def summary(self) -> dict[str, Any] | None:
        """``summary.json``; None unless the run, or each of its stages, has finished."""
        record = read_stages(self.path)
        names = record["stages"] if record is not None else [""]
        path = self.path / "summary.json"
        # A finished run that goes on with more steps still has the file of its earlier end.
        states = {RunFolder(self.path / name).read_run().get("state") for name in names}
        if states != {"finished"} or not path.exists():
            return None
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def status(self) -> dict[str, Any]:
        """The run's state, as ``tandem status --json`` prints it."""
        from ..board.inspection import inspect
        from ..board.look import ANSWER_SECONDS, look

        folder = self.folder
        snapshot = look(folder, folder.join)
        answers = snapshot.term is not None
        more = inspect(folder, folder.join, redis_answers=answers, deadline=ANSWER_SECONDS)
        return {**snapshot.to_json(), **more.to_json()}

    @property
    def is_running(self) -> bool:
        """Whether a process of this host runs it."""
        if self._process is not None and self._process.poll() is None:
            return True
        return supervising_all(self.path) is not None

    def wait(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Waits for its end, and returns the summary; None if it was stopped.

        Args:
            seconds: deadline; None = as long as the run takes.

        Raises:
            DeadlineError: it hasn't ended by then; it goes on.
            TandemError: it has failed; the message is the end of what the command printed, or names the log that has
                it if another Python started it.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while self.is_running:
            if end is not None and time.monotonic() > end:
                raise DeadlineError(f"{self.path}: the run goes on after {seconds:.0f} s")
            time.sleep(LOOK_SECONDS)
        code = 0 if self._process is None else self._process.returncode
        if code and not was_stopped(code):
            raise TandemError(self.output[-SAID:].strip() or f"{self.path}: the run has failed")
        # No stage begins after one that has failed.
        if self.folder.read_run().get("state") == "failed":
            raise TandemError(
                f"{self.folder.path}: the run has failed: {self.folder.logs / 'start.log'} says why"
            )
        return self.summary

    def stop(self, seconds: float = 120.0, *, now: bool = False) -> None:
        """Drains it and writes a checkpoint, as a first Ctrl-C does; the same ``start`` resumes it.

        Args:
            seconds: how long to wait for its end. Whoever calls it again in this Python goes on waiting.
            now: ends it at once without a checkpoint, as a second Ctrl-C does.

        Raises:
            DeadlineError: it hasn't ended after ``seconds``; it goes on draining.
        """
        process = supervising_all(self.path)
        if process is None and self._process is not None and self._process.poll() is None:
            process = psutil.Process(self._process.pid)
        if process is not None:
            _ask_to_end(process, now=now)
            await_end(self.folder, process, seconds)
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise DeadlineError(f"{self.path}: still draining after {seconds:.0f} s") from None

    def metrics(self) -> pa.Table:
        """A row for each step that was trained, and a column for each figure (docs/metrics.md)."""
        return tables.metrics(read_parts(self.folder.metrics))

    def evaluations(self) -> pa.Table:
        """A row for each evaluation: set, step, version, and its figures."""
        return tables.evaluations(read_parts(self.folder.metrics))

    def samples(self) -> pa.Table:
        """A row for each sample in ``samples.jsonl``: the first groups of each step (``log.samples_per_step``)."""
        return tables.samples(read_parts(self.folder.samples))

    def groups(self, steps: Collection[int] | None = None) -> pa.Table:
        """A row for each group that was trained on, with all its samples and tokens (docs/data.md, archives).

        Args:
            steps: these steps only, such as ``range(10, 20)``; None = all that are kept.

        Raises:
            DataError: the run keeps no groups, or none of these steps.
        """
        return tables.groups(self.folder, steps)


def _ask_to_end(process: psutil.Process, *, now: bool = False) -> None:
    """Sends a supervisor one signal for its whole life, and another one if it is to end at once."""
    with suppress(psutil.NoSuchProcess):
        if process not in _asked:
            process.terminate()
            _asked.add(process)
        if now:
            # Of another kind: two of one kind may arrive as one.
            process.send_signal(signal.SIGINT)


def _flat(prefix: str, tree: Mapping[str, Any], keys: Collection[str]) -> list[tuple[str, Any]]:
    """Settings of a nested mapping, by their whole names.

    Args:
        prefix: the names around it.
        tree: sections of settings. A value that is a mapping itself stays whole.
        keys: the names of all settings, of which a stage's name may stand in front.
    """
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        whole = name in keys or name.partition(".")[2] in keys
        if isinstance(value, Mapping) and not whole:
            found += _flat(f"{name}.", value, keys)
        else:
            found.append((name, value))
    return found


def _word(value: Any) -> str:
    """A value as the command line takes it: JSON, which is YAML as well where letters stand for themselves."""
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A mapping, a path or a scalar of numpy as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    item = getattr(value, "item", None)
    return item() if callable(item) else os.fspath(value)


def _began(folder: RunFolder) -> float:
    """When the last start of the newest run in it began, in seconds since the epoch; 0 if there is none yet."""
    try:
        return float(RunFolder(newest_stage(folder.path)).read_run().get("began") or 0)
    except DataError:  # The command refuses such a folder.
        return 0
