"""The registry of live processes: which there are, when they were last heard of, how to reach them."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.errors import StoreError
from ..common.plain import Record, read_record
from ..common.weights.protocol import Membership
from .answers import text
from .connection import Store
from .ledger_records import WAY_OUT
from .store import RunStore

log = logging.getLogger("tandem.replay")

TELL_SECONDS = 60.0
"""Least time between two log lines about one damaged entry, which every look meets again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the run."""

    member: str
    """``<role>-<index>``, or ``<role>-<host>-<pid>`` if it was started by hand."""
    role: str
    """learner, rollout or reward."""
    info: Mapping[str, Any]
    """What it reports about itself: endpoint, public key, pid, version, …"""
    age: float
    """Seconds since its last heartbeat, by Redis ``TIME``."""


class _Entry(Record, frozen=True, kw_only=True):
    role: str
    info: dict[str, Any]


def read_member(name: bytes, raw: bytes, age_ms: int) -> Member:
    """Reads one entry of the registry.

    Raises:
        StoreError: it isn't a valid entry.
    """
    what = f"the entry of {name[:80]!r} in the registry"
    entry = read_record(_Entry, raw, what, StoreError, WAY_OUT)
    return Member(member=text(name, what), role=entry.role, info=entry.info, age=age_ms / 1000)


class Members:
    """Heartbeats in Redis. Each member is written by its own process only."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._own: dict[str, tuple[str, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._told: dict[bytes, float] = {}

    def register(self, role: str, member: str, info: Mapping[str, Any]) -> None:
        """Enters a process, replacing an earlier start of the same member."""
        with self._lock:
            self._own[member] = (role, dict(info))
        self._beat(member)

    def beat(self, member: str, updates: Mapping[str, Any] | None = None) -> None:
        """Reports that the member lives, with the changes in its info."""
        with self._lock:
            if member not in self._own:
                raise ValueError(f"{member} has not registered in this process")
            if updates:
                self._own[member][1].update(updates)
        self._beat(member)

    def leave(self, member: str, *, deadline: float | None = None) -> None:
        with self._lock:
            self._own.pop(member, None)
        limits = {} if deadline is None else {"deadline": deadline}
        self.store.script("leave", member, **limits)

    def live(self, role: str | None = None, within: float = 10.0) -> list[Member]:
        """Members (of a role) that were heard of within the last ``within`` seconds, sorted by member id."""
        raw = self.store.script("live", int(within * 1000))
        members = []
        for name, content, age_ms in zip(raw[::3], raw[1::3], raw[2::3], strict=True):
            try:
                entry = read_member(name, content, int(age_ms))
            except StoreError as error:
                # Its next heartbeat replaces it; the other members are still listed.
                self._tell(name, error)
                continue
            if role is None or entry.role == role:
                members.append(entry)
        return sorted(members, key=lambda m: m.member)

    def _tell(self, name: bytes, error: StoreError) -> None:
        now = time.monotonic()
        if now - self._told.get(name, -math.inf) >= TELL_SECONDS:
            self._told[name] = now
            log.warning(str(error))

    def _beat(self, member: str) -> None:
        with self._lock:
            if member not in self._own:
                return
            role, info = self._own[member]
            text = json.dumps({"role": role, "info": info})
        self.store.script("beat", member, text)


def membership(store: Store, member: str) -> Membership:
    """What a process of the run needs in order to send or receive weights."""
    return Membership(
        run_id=store.run_id,
        member=member,
        registry=Members(store),
        client=RunStore(store).curve_client(),
    )
