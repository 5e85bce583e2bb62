"""Runs the ingest in a process of its own, so that the supervisor never loads a tokenizer library.

The supervisor holds an :class:`IngestProcess`; the other end is :func:`main`. They speak JSON
lines over the child's standard input and output::

    -> {"config": …, "folder": …, "tell_seconds": …}      <- {"prepared": {counts, sources, data_digest, problem_bytes,
                                                              other_digests, traces}}
    -> {"join": PATH}                  <- {"loaded": true}

or ``<- {"error": message, "exit_code": n}`` instead of an answer. Until the answer comes, ``<- {"doing":
text}`` reports progress every few seconds. What was read stays in the child in between. The child
ends when its standard input does, and hence with its supervisor.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...common import disk
from ...common.errors import DataError, TandemError
from ...common.plain import read_object
from ...common.run_folder import RunFolder, read_join

if TYPE_CHECKING:
    from ...common.config import Config


TELL_SECONDS = 15.0
"""Time between two progress messages while data are read."""
END_SECONDS = 10.0
"""How long the child may take to end once it has closed its output."""


class IngestFailed(TandemError):
    """The error that the ingest process reported."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A summary of what was read."""

    counts: dict[str, str]
    """One line for each source and held-out set."""
    sources: list[tuple[str, int, int]]
    """``(name, problems, weight)`` of each source."""
    data_digest: str
    """Digest of problems and traces."""
    problem_bytes: int
    """Bytes of the largest problem."""
    other_digests: dict[str, str]
    """Those of :class:`~tandem.launch.ingest.prepare.Prepared`."""
    traces: int
    """Number of accepted expert traces, without those of held-out pairs."""


class IngestProcess:
    """The supervisor's end of the ingest process."""

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._say = say
        # Its error output, should it crash; a file, since nobody reads a pipe in the meantime.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.launch.ingest.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # The supervisor handles Ctrl-C in the terminal.
            start_new_session=True,
        )
        self._first = {
            "config": config.model_dump(mode="json"),
            "folder": str(folder.path),
            "tell_seconds": TELL_SECONDS,
        }

    def prepare(self) -> Found:
        """Reads and checks everything; writes nothing.

        Raises:
            IngestFailed: what is wrong with the data, in one line.
        """
        prepared = self._ask(self._first)["prepared"]
        sources = [(str(n), int(s), int(w)) for n, s, w in prepared.pop("sources")]
        return Found(sources=sources, **prepared)

    def load(self, join_file: Path) -> None:
        """Puts what was prepared into Redis and creates the ledger."""
        self._ask({"join": str(join_file)})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # The child has ended, and may have said why.
        while line := self._child.stdout.readline():
            answer = read_object(line, "the answer of the ingest", DataError)
            if "doing" not in answer:
                break
            self._say(str(answer["doing"]))
        else:
            self._errors.seek(0)
            output = self._errors.read().decode(errors="replace").strip().splitlines()
            raise IngestFailed(
                f"the ingest ended unexpectedly (exit code {self._exit_code()}): "
                f"{output[-1] if output else 'it said nothing'}",
                1,
            )
        if "error" in answer:
            raise IngestFailed(str(answer["error"]), int(answer.get("exit_code", 1)))
        return answer

    def _exit_code(self) -> int:
        """Exit code of a child that says nothing any more; if it doesn't end, it is killed."""
        try:
            return self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()
        self._errors.close()


class _Doing:
    """Reports at intervals what is being done; in a thread, since one row may take long."""

    def __init__(self, say: Callable[[dict[str, Any]], None], every: float) -> None:
        self._say = say
        self._every = every
        self._since = time.monotonic()
        self._what = "loading"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="doing", daemon=True)
        self._thread.start()

    def now(self, what: str) -> None:
        """Notes what is being done."""
        self._what = what

    def end(self) -> None:
        """Stops reporting."""
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._over.wait(self._every):
            self._say({"doing": f"data: {self._what} ({time.monotonic() - self._since:.0f} s)"})


def main(questions: IO[str], answers: IO[str]) -> int:
    """The child's end: serves until its input ends."""
    # Only the tokenizers of transformers are needed; importing torch would take four of its five seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # All that is read stays, and Python's collector would go through it again and again: a tenth of the time.
    gc.disable()
    from ...common.config import Config
    from ...replay.connection import connect
    from ...replay.ledger import Ledger
    from ...replay.store import RunStore
    from .load import load
    from .prepare import prepare, trained_traces

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    first = json.loads(questions.readline())
    doing = _Doing(say, float(first["tell_seconds"]))
    try:
        config = Config.model_validate(first["config"])
        disk.set_patience(config.launch.full_disk_seconds)
        prepared = prepare(config, RunFolder(first["folder"]), doing.now)
        doing.end()
        say(
            {
                "prepared": {
                    "counts": {name: str(counts) for name, counts in prepared.counts.items()},
                    "sources": prepared.sources,
                    "data_digest": prepared.data_digest,
                    "problem_bytes": prepared.problem_bytes,
                    "other_digests": prepared.other_digests,
                    "traces": trained_traces(config, prepared),
                }
            }
        )
        line = questions.readline()
        if line:
            store = connect(read_join(Path(json.loads(line)["join"])), name="ingest")
            load(Ledger(store, "ingest"), RunStore(store), config, prepared)
            store.close()
            say({"loaded": True})
            questions.readline()
    except TandemError as error:
        doing.end()
        say({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    return 0


if __name__ == "__main__":
    # Whatever a library prints must not get between the answers.
    answers_, sys.stdout = sys.stdout, sys.stderr
    sys.exit(main(sys.stdin, answers_))
