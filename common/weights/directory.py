"""Where the learner's weight service is to be found: through the members registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ..errors import WeightsError
from ..plain import Record, read_record

ROLE = "learner"
"""The role under which the service stands in the registry."""


class RegisteredMember(Protocol):
    """What is read of a registry entry."""

    @property
    def member(self) -> str:
        """Member id."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """What it told of itself."""
        ...


class Registry(Protocol):
    """What is needed of :mod:`tandem.replay.members`."""

    def register(self, role: str, member: str, info: Mapping[str, Any]) -> object:
        """Enters a member."""
        ...

    def beat(self, member: str, updates: Mapping[str, Any] | None = None) -> object:
        """Keeps it alive."""
        ...

    def leave(self, member: str) -> object:
        """Takes it out."""
        ...

    def live(self, role: str) -> Sequence[RegisteredMember]:
        """Members heard of lately."""
        ...


class LearnerAddress(Record, frozen=True, kw_only=True):
    """A learner's weight service."""

    member: str
    """Member id of the learner."""
    term: int
    """Its term."""
    endpoint: str
    """ZeroMQ endpoint of its ROUTER."""
    public_key: str
    """CURVE key of the ROUTER; empty where it has none."""

    def info(self) -> dict[str, Any]:
        """As it stands in the registry."""
        return {
            "endpoint": self.endpoint,
            "public_key": self.public_key,
            "term": self.term,
        }


_TOLD = ("term", "endpoint", "public_key")


def newest_learner(members: Iterable[RegisteredMember]) -> LearnerAddress | None:
    """The service of the newest term; None where no learner announces one.

    A killed learner stands in the registry until its heartbeat is overdue, so for a while
    there may be two: the term decides.

    Raises:
        WeightsError: no entry is of that form, but one that should be; it hides no other.
    """
    found, wrong = [], None
    for m in members:
        if not m.info.get("endpoint") or m.info.get("term") is None:
            continue
        try:
            found.append(
                read_record(
                    LearnerAddress,
                    {"member": m.member} | {name: m.info.get(name) for name in _TOLD},
                    f"the address of {m.member} in the registry",
                    WeightsError,
                    "its next heartbeat replaces it",
                )
            )
        except WeightsError as error:
            wrong = error
    if wrong is not None and not found:
        raise wrong
    return max(found, key=lambda address: address.term, default=None)
