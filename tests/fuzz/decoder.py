"""What a function under test is, and how its records are compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import msgspec
import numpy as np
from frames import Mutator
from msgspec import structs


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One function under test."""

    name: str
    """In the table."""
    corpus: Sequence[bytes]
    """Valid frames."""
    decode: Callable[[bytes], Any]
    """Reads one; raises the project's own errors alone."""
    mutate: Mutator
    """Makes invalid ones of valid ones."""
    check: Callable[[Any], str] = field(default=lambda record: "")
    """What is wrong with a record that came out; empty where nothing is."""
    imports: str = ""
    """A module that takes long to import, which no frame is to be blamed for."""


def same(one: Any, other: Any) -> bool:
    """Whether two records are equal; NaN equals NaN."""
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and same(structs.asdict(one), structs.asdict(other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind == "f"
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def packed(*messages: Any) -> list[bytes]:
    """Corpus of MessagePack."""
    return [msgpack.packb(message) for message in messages]


def text(*contents: Any) -> list[bytes]:
    """Corpus of JSON."""
    return [json.dumps(content).encode() for content in contents]


def round_trip(read: Callable[[bytes], Any]) -> Callable[[Any], str]:
    """A flat record must come out again of its own JSON."""

    def check(found: Any) -> str:
        again = read(json.dumps(structs.asdict(found)).encode())
        return "" if same(found, again) else "it isn't the same when it is written and read again"

    return check
