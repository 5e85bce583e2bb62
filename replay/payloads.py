"""What a group's commit stores: its bytes under their digest, and the few figures that the scripts need."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from ..common import wire
from ..common.errors import DamagedError
from ..common.records import Group, Verdict
from .connection import Arg
from .ledger_records import RowEntry

CHUNK_BYTES = 16 << 20
"""Most payload bytes of one round trip."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A graded group as it is committed."""

    data: bytes
    """The group on the wire."""
    digest: str
    """Of these bytes, 16 hex digits."""
    arguments: tuple[Arg, ...]
    """Of ``commit.lua``."""
    name: str
    """Under which Redis keeps the bytes, without the run's prefix."""

    @classmethod
    def of(cls, group: Group, serial: int) -> Payload:
        """Encodes a group, whose id has this serial."""
        data = wire.encode(group)
        digest = xxhash.xxh3_64_hexdigest(data)
        own_rows = [place for place, sample in enumerate(group.samples) if sample.has_verdict]
        rewards = [
            reward
            for place in own_rows
            if (reward := group.samples[place].reward) is not None and math.isfinite(reward)
        ]
        oldest = group.oldest_step
        arguments = (
            serial,
            group.attempt,
            group.group_id,
            digest,
            len(data),
            "" if oldest is None else oldest,
            len(group.samples),
            len(own_rows),
            repr(float(min(rewards))) if rewards else "",
            repr(float(max(rewards))) if rewards else "",
            json.dumps(list(group.trace_ids)),
            sum(sample.verdict is Verdict.CORRECT for sample in group.samples),
            json.dumps(own_rows),
        )
        name = payload_name(group.group_id, group.attempt, digest)
        return cls(data=data, digest=digest, arguments=arguments, name=name)


def payload_name(group_id: str, attempt: int, digest: str) -> str:
    """Where the bytes of a committed attempt are kept, without the run's prefix."""
    return f"payload:{group_id}:{attempt}:{digest}"


def group_of(entry: RowEntry, step: int, data: bytes | None) -> Group:
    """The group that row ``step`` names, from its bytes.

    Raises:
        DamagedError: they are gone or aren't the ones that the row names.
    """
    if data is None:
        raise DamagedError(
            f"the samples of group {entry.group_id} (row {step}) are gone from Redis: resume from a "
            f"checkpoint at or past step {step}"
        )
    if xxhash.xxh3_64_hexdigest(data) != entry.digest:
        raise DamagedError(
            f"the samples of group {entry.group_id} (row {step}) are not the ones that the row was "
            f"made of, their digest isn't {entry.digest}: restore redis/ from a copy of the run's "
            f"folder"
        )
    return wire.decode(data, Group)


def chunks(items: Sequence[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Splits items into runs of at most ``most`` and at most ``CHUNK_BYTES`` (or one item)."""
    found: list[list[T]] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if not found or len(found[-1]) >= most or total + size > CHUNK_BYTES:
            found.append([])
            total = 0
        found[-1].append(item)
        total += size
    return found
