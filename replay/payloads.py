"""What a group's commit stores: its bytes under their digest, and the figures that the scripts need."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import xxhash
from msgspec import structs

from ..common import wire
from ..common.errors import DamagedError
from ..common.records import Group, Verdict
from .connection import Arg
from .ledger_records import RowEntry

CHUNK_BYTES = 16 << 20
"""Greatest number of payload bytes in one round trip."""
INLINE_BYTES = 32 << 10
"""Payloads up to this size are arguments of the script: a copy inside Redis costs less than a command
of their own. As an argument, one of 5 MB would block the server for 16 ms."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A graded group as it is committed."""

    data: bytes
    """The encoded group."""
    digest: str
    """xxh3-64 of ``data``, 16 hex digits."""
    figures: tuple[Arg, ...]
    """Its arguments of ``commit.lua``, but for the bytes."""
    name: str
    """Key of the bytes in Redis, without the run's prefix."""

    @classmethod
    def of(cls, group: Group, serial: int) -> Payload:
        """Encodes a group whose id has this serial.

        Raises:
            WireError: the group doesn't fit into a message.
        """
        data = wire.encode(group)
        digest = xxhash.xxh3_64_hexdigest(data)
        own_rows = [place for place, sample in enumerate(group.samples) if sample.has_verdict]
        rewards = [
            reward
            for place in own_rows
            if (reward := group.samples[place].reward) is not None and math.isfinite(reward)
        ]
        # Of a reward that is no number, no mean is known.
        known = bool(rewards) and len(rewards) == len(own_rows)
        oldest = group.oldest_step
        figures = (
            serial,
            group.attempt,
            digest,
            len(data),
            "" if oldest is None else oldest,
            len(group.samples),
            repr(float(min(rewards))) if rewards else "",
            repr(float(max(rewards))) if rewards else "",
            repr(float(sum(rewards))) if known else "",
            json.dumps(group.trace_ids),
            sum(sample.verdict is Verdict.CORRECT for sample in group.samples),
            json.dumps(own_rows),
        )
        name = payload_name(group.group_id, group.attempt, digest)
        return cls(data=data, digest=digest, figures=figures, name=name)

    @property
    def is_inline(self) -> bool:
        """Whether the bytes are an argument of the script."""
        return len(self.data) <= INLINE_BYTES

    @property
    def arguments(self) -> tuple[Arg, ...]:
        """All of its arguments of ``commit.lua``."""
        return (*self.figures, self.data if self.is_inline else b"")


def bare(group: Group) -> Group:
    """The group without content, hence without a verdict: the ledger rejects it."""
    nothing = np.zeros(0, np.int32)
    return structs.replace(
        group, samples=(), prompt_tokens=nothing, prompt_text="", gold="", extra={}
    )


def payload_name(group_id: str, attempt: int, digest: str) -> str:
    """Key of a committed attempt's bytes in Redis, without the run's prefix."""
    return f"payload:{group_id}:{attempt}:{digest}"


def group_of(entry: RowEntry, step: int, data: bytes | None) -> Group:
    """Decodes a group of row ``step``.

    Raises:
        DamagedError: the bytes are gone or aren't those that the row names.
    """
    if data is None:
        raise DamagedError(
            f"the samples of group {entry.group_id} (row {step}) are gone from Redis: resume from a "
            f"checkpoint at or past step {step}"
        )
    if xxhash.xxh3_64_hexdigest(data) != entry.digest:
        raise DamagedError(
            f"the samples of group {entry.group_id} (row {step}) are not the ones that the row was "
            f"made of, whose digest is {entry.digest}: restore redis/ from a copy of the run's folder"
        )
    return wire.decode(data, Group)


def chunks(items: Sequence[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Splits items into lists of at most ``most`` items and ``CHUNK_BYTES`` (or one item)."""
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
