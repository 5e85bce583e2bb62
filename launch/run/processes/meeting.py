"""The head's part in a learner on several hosts: it waits for the others, calls them together, and hears of their ranks.

The head alone starts attempts. Each has a number and a record in Redis (:class:`~....replay.hosts.Meeting`), which
the supervisors of the other hosts follow (:mod:`..joining`). If one rank ends, or a host is lost or leaves, the
attempt is over for all, and the next one begins once enough hosts are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from ....common.errors import StoreError
from ....common.waiting import Wait
from ....replay.hosts import EVERY_SECONDS, Failure, Host, HostLink, Look, Meeting
from ...host.redis_server import choose_port
from .parts import Interruption, ProcessSpec, described
from .supervision import HOPELESS, PartFailed

if TYPE_CHECKING:
    from ....common.config import Config

ASK_SECONDS = 0.5
"""How long Redis may take for the record of a meeting; the supervisor is the one that restarts it."""
PRESENT_SECONDS = 5 * EVERY_SECONDS
"""A host that was heard of within this time is called to a meeting."""


class HostsMissing(PartFailed):
    """Hosts that the learner needs didn't come; the run can be resumed."""

    exit_code = 75


class Convener:
    """Calls the learner's hosts to its attempts; the head's :class:`~.parts.OtherHosts`.

    Args:
        config: the run's config.
        address: where rank 0 listens on this host.
        say: tells the user.
    """

    def __init__(self, config: Config, address: str, say: Callable[[str], None]) -> None:
        self.meeting: Meeting | None = None
        """The newest attempt of this start."""
        self._config = config
        self._address = address
        self._say = say
        self._link: HostLink | None = None
        self._wait: Wait | None = None
        self._called = self._ended = 0.0
        self._asked = False
        self._heard = True

    def begin(self, link: HostLink) -> None:
        """Redis answers: hosts can be heard from now on."""
        self._link = link

    def may_start(self) -> bool:
        """Calls the hosts together as soon as enough of them are there.

        Raises:
            HostsMissing: they didn't come within ``launch.hosts_seconds``.
            PartFailed: a rank of another host has ended for a reason that starting again can't mend.
        """
        look = self._fresh()
        # A host may have something to say about how the last attempt ended.
        if look is None or look.moment < self._ended + EVERY_SECONDS / 2:
            return False
        self._hear(look)
        wanted = self._config.learner.hosts - 1
        present = self._present(look)
        if len(present) < wanted:
            self._await(look, present, wanted - len(present))
            return False
        assert self._link is not None
        former = look.meeting.attempt if look.meeting is not None else 0
        meeting = Meeting(
            attempt=1 + max(former, self.meeting.attempt if self.meeting else 0),
            address=self._address,
            port=choose_port(self._address, None, self._config.launch.port_range),
            hosts=[self._link.member, *(host.member for host in present[:wanted])],
            ranks=self._config.learner.ranks,
        )
        if not self._call(meeting):
            return False
        if self._wait is not None:
            names = ", ".join(host.state.host for host in present[:wanted])
            self._say(f"the learner's hosts are there: {names}")
        self.meeting, self._wait, self._asked, self._heard = meeting, None, False, False
        self._called = time.monotonic()
        return True

    def interruption(self) -> Interruption | None:
        """A rank on another host has ended, or the host is lost, has left or is about to."""
        look, link = self._fresh(), self._link
        if look is None or link is None or self.meeting is None or look.moment < self._called:
            return None
        for member in self.meeting.hosts[1:]:
            host = look.host(member)
            failed = self._failure(host)
            if host is None:
                found = Interruption(why=f"host {member} has left", exit=None)
            elif failed is not None:
                found = Interruption(why=_told(failed, host), exit=failed.exit)
            elif link.is_lost(host, self._config.launch.lost_seconds):
                found = Interruption(why=f"host {host} is lost", exit=None)
            elif host.state.leaving and not self._asked:
                # Rank 0 checkpoints with all ranks, and then all end.
                self._asked = True
                return Interruption(why=f"host {host.state.host} leaves", exit=None, gently=True)
            else:
                continue
            self._over()
            self._heard = True
            return found
        return None

    def ended(self, spec: ProcessSpec, code: int) -> bool:
        """A rank here has ended, so that those on other hosts must end too."""
        self._over()
        # It was asked to, since a host leaves; what that host does meanwhile is no fault of the run's.
        return not self._asked

    def _fresh(self) -> Look | None:
        """The newest look, unless Redis is away."""
        if self._link is None or self._link.silence > PRESENT_SECONDS:
            return None
        return self._link.look

    def _present(self, look: Look) -> list[Host]:
        """The learner's hosts that are there, those of the last meeting first and in their places."""
        # A host that went down with the last attempt hasn't been heard of since its end.
        since = look.moment - self._ended
        within = min(PRESENT_SECONDS, self._config.launch.lost_seconds, since)
        found = {
            host.member: host
            for host in self._suitable(look)
            if host.age < within and not host.state.leaving
        }
        before = look.meeting.hosts if look.meeting is not None else []
        before = [*(self.meeting.hosts if self.meeting is not None else []), *before]
        order = dict.fromkeys([member for member in before if member in found] + sorted(found))
        return [found[member] for member in order]

    def _suitable(self, look: Look) -> list[Host]:
        """Hosts that bring as many ranks as each of the learner's hosts has."""
        wanted = self._config.ranks_per_host
        return [
            host
            for host in look.hosts
            if host.state.role == "learner" and host.state.processes == wanted
        ]

    def _await(self, look: Look, present: list[Host], lacking: int) -> None:
        here = {host.member for host in present}
        gone = [host for host in self._suitable(look) if host.member not in here]
        names = [f"host {host}" for host in sorted(gone, key=lambda h: h.age)[:lacking]]
        if lacking > len(names):
            more = lacking - len(names)
            names.append(f"{more} more host{'s' * (more > 1)}")
        patience = self._config.launch.hosts_seconds
        if self._wait is None:
            self._wait = Wait("", "come to the learner's meeting", patience)
            self._say(
                f"the learner waits for {', '.join(names)}: there, `tandem join FILE --role learner` with the "
                f"file that `tandem join-file` writes"
            )
        self._wait.who = ", ".join(names)
        if self._wait.expired(self._say):
            raise HostsMissing(
                f"{self._wait} (launch.hosts_seconds): start the run again once the hosts are there, or with "
                f"fewer (learner.hosts)"
            )

    def _hear(self, look: Look) -> None:
        """What other hosts say about an attempt that a rank here has ended, which may not have been the first."""
        if self._heard or not self._ended:
            return
        self._heard = True
        for host in look.hosts:
            failed = self._failure(host)
            if failed is None:
                continue
            if failed.exit in HOPELESS:
                raise PartFailed(f"the learner {HOPELESS[failed.exit]}: {_told(failed, host)}")
            last = (failed.lines.splitlines() or [""])[-1].strip().removeprefix("| ")
            self._say(f"{failed.process} on {host.state.host} {described(failed.exit)}: {last}")

    def _failure(self, host: Host | None) -> Failure | None:
        failed = host.state.failed if host is not None else None
        if failed is None or self.meeting is None or failed.attempt != self.meeting.attempt:
            return None
        return failed

    def _over(self) -> None:
        """Says that the attempt is over; a host that doesn't hear it notices at the next one."""
        self._ended = time.monotonic()
        if self.meeting is not None:
            self._call(structs.replace(self.meeting, hosts=[]))

    def _call(self, meeting: Meeting) -> bool:
        assert self._link is not None
        try:
            self._link.hosts.call(meeting, ASK_SECONDS)
        except StoreError:
            return False
        return True


def _told(failed: Failure, host: Host) -> str:
    """A death on another host, with the end of its log."""
    return (
        f"{failed.process} on {host.state.host} {described(failed.exit)}; the last lines of its "
        f"{failed.log}:\n{failed.lines}\n"
    )
