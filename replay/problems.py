"""Problems as Redis holds them: one hash of all, and for each source the rows that its problems are from.

Keys, of a run:

======================  ======  =============================================================
``problems``            hash    problem id -> :class:`StoredProblem`
``problem_rows:<name>`` string  the rows of a source's problems, ascending, 4 bytes little-endian
                                each: problem i of the source is ``<name>/<row i>``
======================  ======  =============================================================

So one problem is looked up without reading the others' ids. Runs that were begun by an older version hold whole
:class:`~tandem.common.records.Problem` records instead, and a sorted set of ids, ``problem_ids:<name>``; both
are read too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ..common import wire
from ..common.errors import StoreError
from ..common.plain import Record, damaged
from ..common.records import Int32Array, Plain, Problem
from .connection import Command, Store
from .ledger_records import WAY_OUT

ROW = struct.Struct("<I")
LAST_ROW = 2**32 - 1
"""A row is kept in four bytes."""


class StoredProblem(Record, frozen=True, kw_only=True, eq=False, array_like=True):
    """A problem without its id, which it is stored under, and without names of fields; see
    :class:`~tandem.common.records.Problem`."""

    prompt_text: str
    prompt_tokens: Int32Array
    gold: str
    data_source: str
    ability: str
    trace_ids: tuple[str, ...]
    extra: Mapping[str, Plain]


def encode(problem: Problem) -> bytes:
    """A problem as it is stored under its id."""
    fields = structs.asdict(problem)
    del fields["problem_id"]
    return wire.encode(StoredProblem(**fields))


def decode(problem_id: str, data: bytes) -> Problem:
    """The problem that is stored under an id.

    Raises:
        WireError: the data are damaged, or aren't a problem.
        StoreError: an older version stored it, under another id.
    """
    if wire.is_of(data, Problem):
        problem = wire.decode(data, Problem)
        if problem.problem_id != problem_id:
            what = f"problem {problem_id!r} in Redis"
            raise damaged(what, f"is {problem.problem_id[:80]!r}", StoreError, WAY_OUT)
        return problem
    return Problem(problem_id=problem_id, **structs.asdict(wire.decode(data, StoredProblem)))


def split_id(problem_id: str) -> tuple[str, int]:
    """Source and row of an id.

    Raises:
        StoreError: it isn't of the form ``<source>/<row>``.
    """
    source, slash, row = problem_id.rpartition("/")
    if not (slash and row.isdecimal() and len(row) <= 10 and int(row) <= LAST_ROW):
        raise StoreError(
            f"problem id {problem_id!r} isn't of the form <source>/<row>, with a row below 2^32"
        )
    return source, int(row)


def put_rows(store: Store, rows: Mapping[str, Iterable[int]]) -> None:
    """Adds the rows of some sources to those that are stored; a repeat changes nothing."""
    for source, some in rows.items():
        key = store.key(f"problem_rows:{source}")
        stored = read_rows(store.call("get", key) or b"", source)
        merged = np.union1d(stored, np.fromiter(some, np.uint32))
        store.call("set", key, merged.astype("<u4").tobytes())


def read_rows(data: bytes, source: str) -> NDArray[np.uint32]:
    """The rows of a source.

    Raises:
        StoreError: they aren't whole numbers, ascending.
    """
    if len(data) % ROW.size == 0:
        rows = np.frombuffer(data, "<u4")
        if (rows[1:] > rows[:-1]).all():
            return rows
    raise damaged(
        f"the list of rows of source {source!r} in Redis", "isn't ascending", StoreError, WAY_OUT
    )


def read_id(data: bytes) -> str:
    """A problem's id, as a run of an older version holds it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise damaged("a problem's id in Redis", "isn't UTF-8", StoreError, WAY_OUT) from None


class ProblemIds:
    """Looks up ids of problems by their places in the ledger's sources."""

    def __init__(self, store: Store, sources: Sequence[tuple[str, int, int]]) -> None:
        self._store = store
        self._sources = sources
        self._kinds: dict[int, str] = {}

    def at(self, places: Sequence[tuple[int, int]]) -> list[str]:
        """Ids of problems, each given by its source and its place among the source's problems, as indices.

        It takes one round trip, none where each row of the source is a problem, and one more the first time.

        Raises:
            StoreError: the sources in Redis aren't those that the ledger was made for.
        """
        self._learn({source for source, _ in places} - self._kinds.keys())
        commands: list[Command] = []
        for source, index in places:
            name, kind = self._sources[source][0], self._kinds[source]
            if kind == "some rows":
                begin = index * ROW.size
                key = self._store.key(f"problem_rows:{name}")
                commands.append(("GETRANGE", key, begin, begin + ROW.size - 1))
            elif kind == "ids":
                commands.append(("ZRANGE", self._store.key(f"problem_ids:{name}"), index, index))
        answers = iter(self._store.answers(commands))
        ids = []
        for source, index in places:
            name, kind = self._sources[source][0], self._kinds[source]
            if kind == "every row":
                ids.append(f"{name}/{index}")
                continue
            found = next(answers)
            if kind == "ids" and len(found) == 1:
                ids.append(read_id(found[0]))
            elif kind == "some rows" and len(found) == ROW.size:
                ids.append(f"{name}/{ROW.unpack(found)[0]}")
            else:
                why = f"has no problem {index}"
                raise damaged(f"source {name!r} in Redis", why, StoreError, WAY_OUT)
        return ids

    def _learn(self, sources: Iterable[int]) -> None:
        """Finds out how some sources are stored, and whether all of their problems are there."""
        new = sorted(sources)
        commands: list[Command] = []
        for source in new:
            name = self._sources[source][0]
            rows = self._store.key(f"problem_rows:{name}")
            ids = self._store.key(f"problem_ids:{name}")
            commands += [("STRLEN", rows), ("GETRANGE", rows, -ROW.size, -1), ("ZCARD", ids)]
        answers = self._store.answers(commands)
        for place, source in enumerate(new):
            name, size, _ = self._sources[source]
            length, last, ids = answers[3 * place : 3 * place + 3]
            found = length // ROW.size if length else ids
            if found != size:
                raise StoreError(
                    f"source {name!r} has {found} problems in Redis, and the ledger was made "
                    f"for {size}: its ingest is unfinished or had other data"
                )
            if not length:
                self._kinds[source] = "ids"
            else:
                # Rows ascend, so none is left out if the last one has the highest place.
                whole = last == ROW.pack(size - 1)
                self._kinds[source] = "every row" if whole else "some rows"
