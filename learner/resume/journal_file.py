"""The journal's form on disk: its lines, its segments, and which of them count.

One JSON object a line, fsynced, with a digest of the line at its end (``sum``). Kinds::

    {"kind": "row", "term", "step", "digest", "time", "row", "sum"}       before the optimizer step
    {"kind": "applied", "term", "step", "digest", "samples", "tokens", …} after it
    {"kind": "quarantined", "term", "step", "digest", "reason", …}        instead of it
    {"kind": "resumed", "term", "step", "after", …}       history goes on from this checkpoint

Each term writes a file of its own, so that two learners never write to the same one: the first term
``journal.jsonl``, term 2 ``journal-0002.jsonl``. A later file begins with a ``resumed`` whose ``after``
names the last record that it builds on: the file, its bytes up to the end of that record, and the
record's digest. What an older term writes after it (a learner that was stopped and continues) isn't part
of the run's history::

    journal.jsonl        row 1, applied 1, row 2 | applied 2          (written after term 3 had begun)
    journal-0002.jsonl   resumed 0 …                                  (nobody builds on it)
    journal-0003.jsonl   resumed 1 after (journal.jsonl, 812 bytes), row 3, …

A file without a complete first line has not begun and counts for nothing. Older versions of Tandem
wrote all terms into ``journal.jsonl``, without ``sum`` and ``after``; there, a record of an older term
after one of a newer term is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ...common.errors import DamagedError
from ...common.parts import number_of, parts
from ...common.plain import damaged, read_object

WAY_OUT = (
    "the journal is the record of what was trained, so it is never guessed at; restore it from a "
    "copy of the run's folder"
)
KINDS = ("row", "applied", "quarantined", "resumed")
_FIELDS = {
    *("kind", "term", "step", "time", "digest"),
    *("row", "samples", "tokens", "reason", "after", "sum"),
}
_HEAD = re.compile(
    rb'\{"kind":"(row|applied|quarantined)","term":(\d{1,18}),"step":(\d{1,18}),'
    rb'"digest":"([0-9a-f]{16})",'
)
_SUM = re.compile(rb',"sum":"([0-9a-f]{16})"\}\Z')
_SUM_BYTES = len(b',"sum":"0123456789abcdef"}')


class Line(NamedTuple):
    """One record, with its row left unparsed."""

    file: int
    """Index of its segment in :attr:`Chain.segments`."""
    start: int
    """Offset of the line's beginning in that file, in bytes."""
    end: int
    """Offset after its end."""
    kind: str
    """One of :data:`KINDS`."""
    term: int
    """The term of the learner that wrote it."""
    step: int
    """The step, n."""
    digest: str
    """The digest of the step's row; empty if ``kind`` is ``resumed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The part of one file that counts."""

    path: Path
    end: int | None
    """Number of its bytes that count; None for all whole lines, in the newest file."""
    digest: str = ""
    """The digest of the last record that counts; empty if nothing was said about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The segments of the run's history, oldest first."""

    segments: tuple[Segment, ...]
    """Segments, each of which builds on the one before."""
    ignored: tuple[str, ...]
    """What isn't part of it, one sentence each."""
    last_term: int
    """The greatest term in any file's name, including ignored files."""


def digest_of(row: Mapping[str, Any]) -> str:
    """xxh3-64 of a row's canonical JSON, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(json.dumps(row, sort_keys=True, separators=(",", ":")).encode())


def encoded(record: Mapping[str, Any]) -> bytes:
    """A record as a line, with its digest and its end."""
    text = json.dumps(record, separators=(",", ":")).encode()[:-1]
    return text + b',"sum":"%s"}\n' % xxhash.xxh3_64_hexdigest(text).encode()


def digest_at(path: Path, start: int, end: int) -> str:
    """The digest of the line between two offsets, as ``after`` names it."""
    with open(path, "rb") as file:
        file.seek(start)
        return xxhash.xxh3_64_hexdigest(file.read(end - start - 1))


def chain_of(path: Path) -> Chain:
    """Determines which segments count.

    Args:
        path: ``journal.jsonl``; it may be missing.

    Raises:
        DamagedError: a segment's first line is damaged, or doesn't name an older file.
    """
    files = {number_of(path, one): one for one in parts(path)}
    segments: list[Segment] = []
    ignored = []
    end: int | None = None
    digest = ""
    wanted = ""  # Name of the file that the segment before, which is a later one, builds on.
    for number, one in sorted(files.items(), reverse=True):
        if wanted and one.name != wanted:
            ignored += _overtaken(one, 0)
            continue
        after = _first(one) if number > 1 else {}
        if after is None:
            ignored.append(f"{one.name} has no whole line: its learner ended before it began")
            continue
        if end is not None:
            ignored += _overtaken(one, end)
        segments.append(Segment(path=one, end=end, digest=digest))
        if number == 1:
            wanted = ""
            break
        wanted, end, digest = after["file"], after["bytes"], after["digest"]
        base = [n for n, p in files.items() if p.name == wanted]
        if not base or base[0] >= number:
            why = f"builds on {wanted[:60]!r}, and that is " + ("no older" if base else "missing")
            raise damaged(str(one), why, DamagedError, WAY_OUT)
    return Chain(
        segments=tuple(reversed(segments)), ignored=tuple(ignored), last_term=max(files, default=0)
    )


def _first(path: Path) -> dict[str, Any] | None:
    """``after`` of a segment's first record; None if it has no whole line."""
    with open(path, "rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return None
    record = parse(line[:-1], f"line 1 of {path}")
    if record["kind"] != "resumed" or "after" not in record:
        raise damaged(f"line 1 of {path}", "doesn't say what it builds on", DamagedError, WAY_OUT)
    after: dict[str, Any] = record["after"]
    return after


def _overtaken(path: Path, end: int) -> list[str]:
    with open(path, "rb") as file:
        file.seek(end)
        lines = sum(1 for line in file if line.endswith(b"\n"))
    if not lines:
        return []
    return [f"{path.name} has {lines} line(s) of a learner that was overtaken: they don't count"]


def lines(chain: Chain) -> Iterator[Line]:
    """Every record that counts, in order; a last line without its end is left out.

    Raises:
        DamagedError: a line isn't as it was written.
    """
    for file, segment in enumerate(chain.segments):
        for number, start, text in _texts(segment):
            head, end = _HEAD.match(text), _SUM.search(text)
            if head is not None and end is not None and _sum(text) == end[1]:
                kind, digest = head[1].decode(), head[4].decode()
                term, step = int(head[2]), int(head[3])
            else:
                record = parse(text, f"line {number} of {segment.path}", whole=file > 0)
                kind, term, step = record["kind"], record["term"], record["step"]
                digest = record.get("digest", "")
            yield Line(file, start, start + len(text) + 1, kind, term, step, digest)


def records(chain: Chain, *, rows: bool = True) -> Iterator[dict[str, Any]]:
    """The records of :func:`lines` as plain data, with or without the steps' rows."""
    newest = 0
    for file, segment in enumerate(chain.segments):
        for number, _, text in _texts(segment):
            if not rows and text.startswith(b'{"kind":"row"'):
                continue
            record = parse(text, f"line {number} of {segment.path}", whole=file > 0)
            newest = max(newest, record["term"])
            if record["term"] == newest:
                yield record


def row_at(chain: Chain, file: int, start: int) -> dict[str, Any]:
    """The row of a record at an offset from :func:`lines`."""
    path = chain.segments[file].path
    with open(path, "rb") as opened:
        opened.seek(start)
        text = opened.readline().rstrip(b"\n")
    row: dict[str, Any] = parse(text, f"byte {start:,} of {path}", whole=file > 0)["row"]
    return row


def _texts(segment: Segment) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and text of each whole line that counts."""
    start = 0
    text = b""
    with open(segment.path, "rb") as file:
        for number, line in enumerate(file, 1):
            if start == segment.end or not line.endswith(b"\n"):
                break
            text = line[:-1]
            yield number, start, text
            start += len(line)
    if segment.end is not None and (
        start != segment.end
        or (segment.end > 0 and xxhash.xxh3_64_hexdigest(text) != segment.digest)
    ):
        why = f"doesn't have the record at byte {segment.end:,} that the next term builds on"
        raise damaged(str(segment.path), why, DamagedError, WAY_OUT)


def parse(text: bytes, what: str, *, whole: bool = False) -> dict[str, Any]:
    """Reads a record and checks that its ``sum`` and row are as they were written.

    Args:
        text: the line without its end.
        what: names the line in the error.
        whole: require a ``sum``; records without one may be from an older version of Tandem.

    Raises:
        DamagedError: it isn't a record.
    """
    record = read_object(text, what, DamagedError, WAY_OUT)
    why = _misfit(record, text, whole)
    if why:
        raise damaged(what, why, DamagedError, WAY_OUT)
    return record


def _sum(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text[:-_SUM_BYTES]).encode()


def _misfit(record: Mapping[str, Any], text: bytes, whole: bool) -> str:
    """Why it isn't a record of a journal; empty if it is."""
    unknown = record.keys() - _FIELDS
    if unknown:
        return f"has the field {min(unknown)[:40]!r}"
    if whole or "sum" in record:
        end = _SUM.search(text)
        if end is None or _sum(text) != end[1]:
            return "isn't the one of its digest"
    kind = record.get("kind")
    if kind not in KINDS:
        return f"has the kind {str(kind)[:40]!r}"
    for name, least in (("term", 0), ("step", 0 if kind == "resumed" else 1)):
        value = record.get(name)
        if type(value) is not int or value < least:
            return f"has {name}={str(value)[:40]!r}"
    if kind == "resumed":
        return _misfit_after(record["after"]) if "after" in record else ""
    for name in ("samples", "tokens"):
        if name in record and (type(record[name]) is not int or record[name] < 0):
            return f"has {name}={str(record[name])[:40]!r}"
    if not isinstance(record.get("digest"), str):
        return "has no digest"
    if kind == "row":
        row = record.get("row")
        if not isinstance(row, dict) or _digest_or_none(row) != record["digest"]:
            return "has a row that isn't the one of its digest"
        if row.get("step") != record["step"]:
            return f"has the row of another step than {record['step']}"
    return ""


def _misfit_after(after: Any) -> str:
    fits = (
        isinstance(after, dict)
        and isinstance(after.get("file"), str)
        and type(after.get("bytes")) is int
        and after["bytes"] >= 0
        and isinstance(after.get("digest"), str)
    )
    return "" if fits else f"builds on {str(after)[:60]}"


def _digest_or_none(row: Mapping[str, Any]) -> str | None:
    try:
        return digest_of(row)
    except RecursionError:
        return None
