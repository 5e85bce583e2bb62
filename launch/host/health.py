"""Whether this host's part of a run is well: the questions that a scheduler's probes ask.

========== =============================================================== ===================================
probe      is answered yes when                                            what a scheduler does at no
========== =============================================================== ===================================
startup    the role's processes here are members of the run                waits, and at last starts it again
readiness  they were heard of just now, and can serve                      counts it as not ready
liveness   they were heard of in the last minutes, or nobody can tell      starts it again
========== =============================================================== ===================================

That Redis is away makes a host not ready, and no other host's liveness fails for it: a fleet that starts again
whenever its head is moved would lose what it is sampling. The head is asked for its supervisor's own signs of life.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...common.disk import free_bytes
from ...common.errors import StoreError, TandemError
from ...common.run_folder import JoinInfo, RunFolder

if TYPE_CHECKING:
    from ...replay.connection import Store
    from ...replay.members import Member

Probe = Literal["startup", "readiness", "liveness"]
ANSWER_SECONDS = 5.0
"""How long Redis may take to answer."""
FRESH_SECONDS = 15.0
"""A member that was heard of within this time is ready."""
SILENT_SECONDS = 180.0
"""A member that wasn't heard of for so long is taken for hung; heartbeats come every few seconds."""
SUPERVISOR_SECONDS = 120.0
"""The same of a supervisor, which writes a sign of life every ten seconds."""
LEAST_FREE = 1 << 20
"""With less room than this a supervisor can't write its signs of life, and is waiting for space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer to a probe."""

    ok: bool
    why: str
    """One line for a person."""


def health(
    probe: Probe, role: str, join: JoinInfo | None, folder: RunFolder | None, host: str = ""
) -> Health:
    """Answers one probe.

    Args:
        probe: which question.
        role: ``head``, ``rollout``, ``reward``, ``learner`` or ``environments``.
        join: how to reach the run; None if it can't be read yet.
        folder: the run's, which the head has.
        host: name under which this host's processes are members; empty = its own.
    """
    if role == "head" and folder is not None and probe == "liveness":
        return _supervisor(folder)
    if join is None:
        return Health(ok=probe == "liveness", why="the run has no join file yet")
    from ...replay.connection import connect

    try:
        store = connect(join, deadline=ANSWER_SECONDS, name="health")
    except StoreError as error:
        return Health(ok=probe == "liveness", why=str(error))
    try:
        return _head(probe, store) if role == "head" else _role(probe, role, store, host)
    except TandemError as error:
        return Health(ok=probe == "liveness", why=str(error))
    finally:
        store.close()


def _supervisor(folder: RunFolder) -> Health:
    record = folder.read_run()
    alive = record.get("alive")
    if record.get("state") == "finished":
        return Health(ok=True, why="the run has finished")
    if not isinstance(alive, int | float):
        return Health(ok=True, why="no supervisor has started the run yet")
    age = time.time() - alive
    if age <= SUPERVISOR_SECONDS:
        return Health(ok=True, why=f"the supervisor lived {max(0.0, age):.0f} s ago")
    if free_bytes(folder.path) < LEAST_FREE:
        return Health(ok=True, why="the disk is full, which the supervisor waits for")
    return Health(ok=False, why=f"the supervisor has shown no sign of life for {age:.0f} s")


def _head(probe: Probe, store: Store) -> Health:
    from ...replay.members import Members
    from ...replay.store import RunStore

    state = RunStore(store).state(ANSWER_SECONDS)
    if probe == "startup" or state == "finished":
        return Health(ok=True, why=f"Redis answers, and the run is {state}")
    within = FRESH_SECONDS if probe == "readiness" else SILENT_SECONDS
    learners = Members(store).live("learner", within)
    if not learners:
        return Health(ok=False, why=f"no learner was heard of for {within:.0f} s")
    return Health(ok=True, why=f"the run is {state}, and {learners[0].member} is there")


def _role(probe: Probe, role: str, store: Store, host: str) -> Health:
    from ...replay.members import Members
    from ...replay.store import RunStore

    if RunStore(store).state(ANSWER_SECONDS) == "finished":
        return Health(ok=True, why="the run has finished")
    name = host or socket.gethostname()
    within = FRESH_SECONDS if probe == "readiness" else SILENT_SECONDS
    found = [m for m in Members(store).live(role, within) if m.info.get("host") == name]
    if not found:
        return Health(ok=False, why=f"no {role} process of {name} was heard of for {within:.0f} s")
    if probe == "readiness" and role == "rollout" and not any(map(_serves, found)):
        return Health(ok=False, why=f"{found[0].member} has no weights to sample with yet")
    return Health(ok=True, why=f"{', '.join(m.member for m in found)}: heard of")


def _serves(worker: Member) -> bool:
    return bool(worker.info.get("version"))
