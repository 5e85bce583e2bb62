"""What a run's callbacks ask of its learner, in Redis.

One process writes requests (the one that calls the callbacks) and one reads them (the learner, between steps).
Each request has a number that only grows, so writing it twice changes nothing, and a learner that was
started again knows by the number which ones its predecessor served.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import structs

from ..common.errors import StoreError
from ..common.plain import Count, Record, read_record
from .connection import DEADLINE, Store

WAY_OUT = "start the run again without callbacks (run.callbacks=[])"


class Stop(Record, frozen=True, kw_only=True):
    """A request to end the run."""

    callback: str
    """Import path of the callback."""
    reason: str
    """Why, in the callback's words."""
    step: Count
    """The step that it was called for; the run ends some steps later."""


class Requested(Record, frozen=True, kw_only=True):
    """All requests of a run; of each kind the newest one counts, of stops the first."""

    stop: Stop | None = None
    """The request to end the run. It stays until the run has ended, whoever is restarted."""
    checkpoint: Count = 0
    """Number of the newest request for a checkpoint."""
    evaluate: Count = 0
    """Number of the newest request for an evaluation."""
    values: dict[str, tuple[Count, float]] = msgspec.field(default_factory=dict)
    """Logged values by name: number of the request, and the value."""

    @property
    def newest(self) -> int:
        """The greatest number that was given."""
        numbers = [number for number, _ in self.values.values()]
        return max([self.checkpoint, self.evaluate, *numbers])


class CallbackRequests:
    """The requests of a run's callbacks. Every method may be repeated safely."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, requested: Requested, deadline: float = DEADLINE) -> None:
        """Replaces all requests."""
        self._set("callback_requests", structs.asdict(requested), deadline)

    def read(self) -> Requested:
        """All requests.

        Raises:
            StoreError: what is in Redis isn't what :meth:`put` writes.
        """
        raw = self._store.call("get", self._store.key("callback_requests"))
        return read_requested(raw) if raw else Requested()

    def put_served(self, number: int) -> None:
        """Records that the learner has served requests up to this number."""
        self._store.put("callback_served", str(number))

    def served(self) -> int:
        """Number of the last request that the learner has served."""
        raw = self._store.call("get", self._store.key("callback_served"))
        return int(raw) if raw and raw.isdigit() and len(raw) < 16 else 0

    def put_stopped(self, stop: Stop) -> None:
        """Records that the learner ends the run because of this request."""
        self._set("callback_stopped", structs.asdict(stop), DEADLINE)

    def stopped(self) -> Stop | None:
        """The request because of which the run has ended; None if it has ended otherwise."""
        raw = self._store.call("get", self._store.key("callback_stopped"))
        return read_stop(raw) if raw else None

    def keep_stops_of(self, callbacks: Collection[str]) -> None:
        """Forgets a request to end the run if it is of a callback that the run no longer has."""
        requested, stopped = self.read(), self.stopped()
        if requested.stop is not None and requested.stop.callback not in callbacks:
            self.put(structs.replace(requested, stop=None))
        if stopped is not None and stopped.callback not in callbacks:
            self._store.call("delete", self._store.key("callback_stopped"))

    def clear(self) -> None:
        """Forgets all requests, before a run that had ended goes on."""
        names = ("callback_requests", "callback_served", "callback_stopped")
        self._store.call("delete", *map(self._store.key, names))

    def _set(self, name: str, content: Any, deadline: float) -> None:
        if isinstance(content.get("stop"), Stop):
            content = {**content, "stop": structs.asdict(content["stop"])}
        self._store.put(name, json.dumps(content), deadline=deadline)


def read_requested(raw: bytes) -> Requested:
    """Reads all requests; raises ``StoreError`` if they aren't."""
    return read_record(Requested, raw, "the callbacks' requests in Redis", StoreError, WAY_OUT)


def read_stop(raw: bytes) -> Stop:
    """Reads a request to end the run; raises ``StoreError`` if it isn't one."""
    return read_record(Stop, raw, "the callback's stop in Redis", StoreError, WAY_OUT)
