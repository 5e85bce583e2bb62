"""The learner's own record on disk of what it took and what it applied.

Each step has one row. Records ``applied`` above the step of a later ``resumed`` belong to a line
of history that was given up; the step then has such a record again. A step that is ``quarantined``
stays so, and isn't recorded again. The form of the files is described in :mod:`.journal_file`. In
memory, a step takes 19 bytes: its place on disk, its row's digest and its outcome.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ...common import disk
from ...common.errors import DamagedError, FencedError, StoreError
from ...common.parts import part_of, whole_end
from ...common.plain import damaged
from ...common.run_folder import sync_folder
from ...common.waiting import Wait
from .journal_file import (
    WAY_OUT,
    Chain,
    Line,
    Segment,
    chain_of,
    digest_at,
    digest_of,
    encoded,
    lines,
    records,
    row_at,
)

log = logging.getLogger("tandem.learner")
DISK_SECONDS = 300.0
"""How long the disk may take for a record; a network file system may hang for minutes and recover."""
_OUTCOMES = ("", "applied", "quarantined", "")
"""By their codes; the last one: applied on a line of history that was given up."""
_APPLIED = 1
_GIVEN_UP = bytes([0, 3, *range(2, 256)])
"""Outcomes after a resume below them: quarantined stays, since the same samples would fail again."""
UntilOnDisk = Callable[[], None]
"""Returns once a record is on disk."""


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a journal that count, in order; see :mod:`.journal_file`.

    Args:
        path: ``journal.jsonl``, the first of its files.

    Raises:
        DamagedError: a record isn't as it was written.
    """
    yield from records(chain_of(path))


def trained(path: Path) -> dict[int, tuple[int, int] | None]:
    """Samples and tokens of each step whose update is in the weights, according to a journal.

    None for a step that was applied by a version of Tandem that didn't record them.

    Raises:
        DamagedError: as :func:`read`.
    """
    counts: dict[int, tuple[int, int] | None] = {}
    quarantined = set()
    for record in records(chain_of(path), rows=False):
        step = record["step"]
        if record["kind"] == "resumed":
            # What a checkpoint includes was applied, whatever became of the line that said so.
            steps = (at for at in range(1, step + 1) if at not in quarantined)
            counts = {at: counts.get(at) for at in steps}
        elif record["kind"] == "quarantined":
            quarantined.add(step)
        else:
            known = "samples" in record and "tokens" in record
            counts[step] = (record["samples"], record["tokens"]) if known else None
    return counts


class History:
    """The content of a journal's files on the current line of history, when the object was made.

    Args:
        path: ``journal.jsonl``, the first of its files; it may be missing.

    Raises:
        DamagedError: a record isn't as it was written, or doesn't follow from those before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chain: Chain = chain_of(path)
        self.newest_term = 0
        """The newest term among the records that count."""
        self.last_term = self.chain.last_term
        """The greatest term that has written here."""
        self.applied_step = 0
        """The last step whose update is in the weights, on the current line of history."""
        self._files = array("H")
        self._starts = array("Q")
        self._digests = array("Q")
        self._outcomes = bytearray()
        self._last = (0, 0)
        self.overtaken = 0
        """Number of records in an older version's file that a learner wrote after a newer one's."""
        for line in lines(self.chain):
            if line.term < self.newest_term:
                self.overtaken += 1
                continue
            self._check(line)
            self._note(line)

    @property
    def last_step(self) -> int:
        """The last step that has a row; 0 if there is none."""
        return len(self._starts)

    def row_of(self, step: int) -> dict[str, Any]:
        """A step's row, read from disk.

        Raises:
            KeyError: it has none.
            DamagedError: it isn't as it was written.
        """
        if not 0 < step <= self.last_step:
            raise KeyError(step)
        return row_at(self.chain, self._files[step - 1], self._starts[step - 1])

    def digest(self, step: int) -> str:
        """The digest of a step's row, hexadecimal."""
        return f"{self._digests[step - 1]:016x}"

    def outcome(self, step: int) -> str:
        """``applied`` or ``quarantined``; empty if a step has neither."""
        return _OUTCOMES[self._outcomes[step - 1]] if 0 < step <= self.last_step else ""

    def outcomes(self) -> dict[int, str]:
        """The outcome of every step that has one."""
        named = enumerate(map(_OUTCOMES.__getitem__, self._outcomes), 1)
        return {step: outcome for step, outcome in named if outcome}

    def was_applied(self, step: int) -> bool:
        """Whether the step's update was ever in the weights, be it on a line that was given up."""
        return 0 < step <= self.last_step and self._outcomes[step - 1] in (1, 3)

    def check(self, step: int, row: Mapping[str, Any]) -> None:
        """Compares a step's row with the one in the journal.

        Raises:
            DamagedError: they differ.
        """
        if 0 < step <= self.last_step and self.digest(step) != digest_of(row):
            raise DamagedError(
                f"step {step} has another row in {self.path} than in Redis: one of them is damaged, "
                f"or they are of different runs; don't mix folders and servers"
            )

    def _check(self, line: Line) -> None:
        kind, step = line.kind, line.step
        why = ""
        if kind == "row" and step != self.last_step + 1:
            why = f"has row {step} after row {self.last_step}"
        elif kind == "row" and step > 1 and not self._outcomes[-1]:
            # A learner goes on to the next step only once this one has ended, if not on this line of history.
            why = f"has row {step}, and not what became of step {step - 1}: a line is missing"
        elif kind == "resumed":
            if step > self.last_step:
                why = f"is resumed from step {step} and has {self.last_step} rows"
        elif kind != "row" and step > self.last_step:
            why = f"has step {step} {kind} and no row of it"
        elif kind != "row" and self.digest(step) != line.digest:
            why = f"has step {step} {kind} with the digest of another row"
        if why:
            raise damaged(str(self.chain.segments[line.file].path), why, DamagedError, WAY_OUT)

    def _note(self, line: Line) -> None:
        step = line.step
        self.newest_term = line.term
        self.last_term = max(self.last_term, line.term)
        # A file begins with a record, so this is a record of the newest file, if that has any.
        self._last = (line.start, line.end)
        if line.kind == "row":
            self._files.append(line.file)
            self._starts.append(line.start)
            self._digests.append(int(line.digest, 16))
            self._outcomes.append(0)
        elif line.kind == "resumed":
            self._outcomes[step:] = self._outcomes[step:].translate(_GIVEN_UP)
            # The steps below may be quarantined ones.
            self.applied_step = self._outcomes.rfind(_APPLIED, 0, step) + 1
        else:
            self._outcomes[step - 1] = _OUTCOMES.index(line.kind)
            if line.kind == "applied":
                self.applied_step = step


class Journal(History):
    """Appends to the journal of a run, in the background if that is asked for.

    Nothing is written, and no file is made, before the first record: :meth:`resumed` if there is
    a journal already, else the first step's row.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for reason in self.chain.ignored:
            log.warning(f"journal: {reason}")
        if self.overtaken:
            log.warning(
                f"journal: {path.name} has {self.overtaken} record(s) of a learner that was "
                f"overtaken: they don't count"
            )
        if self.chain.segments:
            newest = self.chain.segments[-1].path
            if whole_end(newest) < os.path.getsize(newest):
                log.warning(f"journal: the last line of {newest.name} has no end and is left out")
        self._file: IO[bytes] | None = None
        self._term = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def row(self, term: int, step: int, row: dict[str, Any]) -> UntilOnDisk:
        """Writes a step's row unless the journal has it; the callable waits until it is on disk.

        Raises:
            StoreError: there is another row for that step, or it isn't the next one.
        """
        if 0 < step <= self.last_step:
            self.check(step, row)
            return lambda: None
        if step != self.last_step + 1:
            raise StoreError(f"step {step} can't follow step {self.last_step} in {self.path}")
        return self._append("row", term, step, digest_of(row), row=row)

    def applied(self, term: int, step: int, counts: Mapping[str, int] | None = None) -> UntilOnDisk:
        """The step's update is in the weights; ``counts``: what was trained on, by name."""
        return self._append("applied", term, step, self.digest(step), **(counts or {}))

    def quarantined(self, term: int, step: int, reason: str) -> UntilOnDisk:
        """The step used its number and changed nothing."""
        return self._append("quarantined", term, step, self.digest(step), reason=reason)

    def resumed(self, term: int, step: int) -> None:
        """Records that history continues from the checkpoint of ``step``.

        A term's first such record begins a new file, which builds on what was there when this
        journal was opened.

        Raises:
            FencedError: the term already has a file, from another learner.
            DamagedError: the checkpoint is of a later step than the last one that has a row.
        """
        if step > self.last_step:
            raise DamagedError(
                f"the checkpoint is of step {step}, and {self.path} ends at step "
                f"{self.last_step}; {WAY_OUT}"
            )
        if self._file is not None:
            self._append("resumed", term, step, "")()
        elif self.chain.segments:
            after = self._end_of_base()
            self._begin(term, part_of(self.path, term))
            self._append("resumed", term, step, "", after=after)()

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()

    def _end_of_base(self) -> dict[str, Any]:
        """The state of the file that the term's file will build on, when it was read."""
        *before, newest = self.chain.segments
        start, end = self._last
        with open(newest.path, "rb") as file:
            # Its learner may have been killed before all of it was on disk.
            os.fsync(file.fileno())
        digest = digest_at(newest.path, start, end) if end else ""
        base = Segment(path=newest.path, end=end, digest=digest)
        self.chain = replace(self.chain, segments=(*before, base))
        return {"file": newest.path.name, "bytes": end, "digest": digest}

    def _begin(self, term: int, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        try:
            self._file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
        except FileExistsError:
            raise FencedError(
                f"{path} already exists: another learner of term {term} made it"
            ) from None
        sync_folder(path.parent)
        self._term = term
        segments = (*self.chain.segments, Segment(path=path, end=None))
        self.chain = replace(self.chain, segments=segments)
        self._last = (0, 0)

    def _append(self, kind: str, term: int, step: int, digest: str, **more: Any) -> UntilOnDisk:
        if self._file is None:
            if self.chain.segments:
                raise StoreError(f"{self.path} has records: say first where term {term} goes on")
            self._begin(term, self.path)
        if term != self._term:
            raise StoreError(f"{self.chain.segments[-1].path} is of term {self._term}, not {term}")
        head = {"kind": kind, "term": term, "step": step}
        if digest:
            head["digest"] = digest
        text = encoded({**head, "time": time.time(), **more})
        start = self._last[1]
        file = len(self.chain.segments) - 1
        self._note(Line(file, start, start + len(text), kind, term, step, digest))
        written = self._writer.submit(self._write, text)
        return lambda: self._wait(written)

    def _wait(self, written: Future[None]) -> None:
        """Waits until a record is on disk.

        Raises:
            StoreError: the disk doesn't answer.
            DiskFull: it had no space for too long.
        """
        wait = Wait("the disk", f"take a record of {self.path}", DISK_SECONDS)
        while not futures.wait([written], timeout=wait.pause).done:
            if disk.free_bytes(self.path.parent) < disk.ROOM:
                wait.restart()  # the writer says itself how long it waits for space
            elif wait.expired(log.warning):
                raise StoreError(
                    f"{wait}: look whether its file system is there and has room; the run goes on "
                    f"from the journal when it is started again"
                )
        written.result()

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        disk.append(self._file, line, self.chain.segments[-1].path, sync=True)
