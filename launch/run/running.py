"""A run while its processes run: supervises them, reports progress, and queries Redis before the end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from ...common import disk
from ...common.disk import DiskFull
from ...common.errors import StoreError, TandemError
from ...common.run_folder import JoinInfo, RunFolder
from ...common.waiting import Wait
from ...replay.hosts import EVERY_SECONDS, HEAD, HostLink, HostState, new_member
from ..board.live import LiveLook
from ..board.progress import Progress
from ..board.snapshot import Known
from ..board.terminal import Terminal
from ..wording import duration, shown
from .processes import redis_part
from .processes.disk_watch import DiskWatch
from .processes.idle import ReportWatch
from .processes.meeting import Convener
from .processes.parts import Part
from .processes.supervision import Outcome, Supervisor
from .summary import Findings

if TYPE_CHECKING:
    from ...common.config import Config
    from ...replay.connection import Store
    from ..host.folder_lock import FolderLock
    from .opened.record import RunRecord

ALARM_SECONDS = 300.0
"""Between two lines about one alarm that goes on."""
ASK_SECONDS = 0.5
"""How long Redis may take to answer the supervisor during the run. The supervisor is the one that
restarts a dead Redis, so it must not wait for it."""


class Running:
    """The processes of one run, from redis-server's start to the last one's end."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        preset: str,
        record: RunRecord,
        terminal: Terminal,
    ) -> None:
        self.findings = Findings()
        """Figures from Redis for the summary."""
        self._config = config
        self._folder = folder
        self._record = record
        self._terminal = terminal
        self._say = terminal.say
        self._store: Store | None = None
        self._reports: ReportWatch | None = None
        self._alarmed: dict[str, float] = {}
        self._unread = ""
        launch = config.launch
        disk.set_patience(launch.full_disk_seconds)
        self._disk = DiskWatch(folder.path, launch.full_disk_seconds, self._say, shown(folder.path))
        restarts = folder.logs / "restarts.jsonl"
        self._supervisor = Supervisor(
            max_failures=launch.max_failures,
            backoff_seconds=launch.backoff_seconds,
            drain_seconds=launch.drain_seconds,
            say=self._say,
            progress=self.step,
            finished=self._has_finished,
            redis_away=self._redis_away,
            tick=self._tick,
            on_drain=self._tell_hosts,
            restarts_file=restarts,
            disk_watch=self._disk,
        )
        self._link: HostLink | None = None
        self._leave: Wait | None = None
        held_out = tuple(one.name for one in config.data.evaluate)
        self._progress = Progress(
            folder.metrics,
            total=config.run.end,
            every=config.log.every,
            # The live view shows the same figures.
            say=lambda line: None if terminal.drawing else self._say(line),
            restarts=lambda: len(self._supervisor.restarts),
            held_out=held_out,
        )
        self._look = LiveLook(
            Known(
                run=shown(folder.path),
                preset=preset,
                supervisor=os.getpid(),
                elapsed_seconds=record.earlier_seconds,
                total_steps=config.run.end,
                held_out=held_out,
                limit=config.replay.max_staleness,
            ),
            began=record.began,
            progress=self._progress,
            restarts=restarts,
            state=lambda: (
                "draining" if self._supervisor.stop_requested else str(record.get("state"))
            ),
        )

    @property
    def signal_seen(self) -> int | None:
        return self._supervisor.signal_seen

    def step(self) -> int:
        """The latest step in the metrics; the last one that was read while they can't be."""
        try:
            self._progress.update()
        except OSError as error:
            # Without them the run goes on: its learner alone has to write them.
            if str(error) != self._unread:
                self._unread = str(error)
                self._say(f"warning: the run's progress isn't followed: {error}")
        return self._progress.step

    def run(
        self,
        join: JoinInfo,
        lock: FolderLock,
        fill: Callable[[Store], None],
        parts: Sequence[Part],
        convener: Convener | None = None,
    ) -> Outcome:
        """Starts Redis, fills it, starts the parts and supervises them to their end.

        Args:
            lock: the folder's lock, which redis-server inherits.
            fill: puts problems and traces into Redis.
            parts: all parts except Redis.
            convener: calls the learner's other hosts together, if it has any.

        Raises:
            TandemError: the run can't go on; it can be resumed.
        """
        with self._supervisor:
            try:
                return self._run(join, lock, fill, parts, convener)
            except DiskFull:
                self._write_state("stopped")
                raise
            except TandemError:
                self._write_state("failed")
                raise

    def _run(
        self,
        join: JoinInfo,
        lock: FolderLock,
        fill: Callable[[Store], None],
        parts: Sequence[Part],
        convener: Convener | None,
    ) -> Outcome:
        supervisor = self._supervisor
        self._terminal.go_live(self._look)
        server = redis_part.part(
            self._config, self._folder, join, lock, before_end=self._ask_last, say=self._say
        )
        version = redis_part.await_ready(server, supervisor, self._folder, join)
        if version is None or supervisor.stop_requested:
            supervisor.drain()
            return Outcome.STOPPED
        self._record.note(redis_version=version)
        self._record.reached("redis_ready")
        # Redis may also die while problems are put into it.
        if not supervisor.watch_during(lambda: self._fill(join, fill)):
            supervisor.drain()
            return Outcome.STOPPED
        self._link = self._join_hosts(len(parts))
        if convener is not None:
            convener.begin(self._link)
        if self._terminal.live and self._store is not None:
            self._look.ask(self._store)
        self._record.reached("redis_filled")
        for part in parts:
            supervisor.start(part)
        self._record.reached("processes_started")
        self._write_state("running")
        outcome = supervisor.run()
        if outcome is Outcome.FINISHED and server is None:
            self._ask_last()
        return outcome

    def end(self) -> None:
        """Ends the view and everything that still queries Redis; may be called twice."""
        self._terminal.end_live()
        self._look.stop()
        if self._reports is not None:
            self._reports.stop()
        if self._link is not None:
            # A second signal has ended Redis too.
            self._link.stop(leave=not self._supervisor.kill_requested)
        if self._store is not None:
            self._store.close()

    def write_stopped(self) -> None:
        """Records that the run is stopped, and for how long it was up."""
        self._write_state("stopped")

    def _fill(self, join: JoinInfo, fill: Callable[[Store], None]) -> None:
        from ...replay.connection import connect
        from ...replay.store import RunStore

        self._store = connect(join, name="supervisor")
        fill(self._store)
        runs = RunStore(self._store)
        if runs.state() != "running":
            runs.set_state("running")
        self._reports = ReportWatch(runs)

    def _join_hosts(self, count: int) -> HostLink:
        """Enters this host among those of the run, as its head."""
        from ...common.sockets import network_name

        assert self._store is not None
        state = HostState(
            host=socket.gethostname(),
            address=self._config.launch.bind,
            pid=os.getpid(),
            role=HEAD,
            processes=count,
            network=network_name(),
        )
        link = HostLink(self._store, new_member(), state)
        link.hosts.forget_heads()
        link.start()
        return link

    def _tell_hosts(self) -> None:
        if self._link is not None:
            self._link.say(leaving=True)
            self._leave = Wait("", "leave", self._config.launch.drain_seconds)

    def _await_hosts(self) -> None:
        """Lets the other hosts hear how the run ends, and drain, while Redis still answers."""
        link, wait = self._link, self._leave
        if link is None or wait is None:
            return
        while (
            not self._supervisor.kill_requested and link.silence < ASK_SECONDS + 2 * EVERY_SECONDS
        ):
            look = link.look
            others = [
                host
                for host in (look.hosts if look is not None else ())
                if host.member != link.member and host.age < 10 * EVERY_SECONDS
            ]
            wait.who = ", ".join(f"host {host}" for host in others)
            if not others or wait.expired(self._say):
                return
            time.sleep(0.1)

    def _has_finished(self) -> bool | None:
        return has_finished(self._store) if self._store is not None else False

    def _redis_away(self) -> bool:
        """Whether Redis is away, and not yet for so long that nobody waits for it any more."""
        if self._link is None or self._link.silence > self._config.launch.hosts_seconds:
            return False
        return self._has_finished() is None

    def _tick(self) -> None:
        self.step()
        self._record.note_alive()
        if self._terminal.gone:
            self._supervisor.request_stop("the terminal has gone away")
        self._tell_alarms()
        stalled = time.monotonic() - self._progress.moved
        if stalled > self._config.launch.stall_seconds and not self._disk.full():
            self._progress.moved = time.monotonic()
            self._say(f"no step for {duration(stalled)}: {self._who_waits()}")

    def _tell_alarms(self) -> None:
        if self._reports is None or self._terminal.drawing:  # the live view shows them
            return
        now = time.monotonic()
        for member, alarm in self._reports.alarms.items():
            if now - self._alarmed.get(member, -ALARM_SECONDS) >= ALARM_SECONDS:
                self._alarmed[member] = now
                self._say(f"alarm: {member}: {alarm}")

    def _who_waits(self) -> str:
        from ...replay.ledger import Ledger

        assert self._store is not None
        if self._config.learner.source == "offline":
            return f"look into {shown(self._folder.logs / 'learner-0.log')}"
        try:
            return Ledger(self._store, "supervisor").waiting_for(ASK_SECONDS)
        except TandemError as error:
            return str(error)

    def _ask_last(self) -> None:
        """The last exchange with Redis while it is still up; a second signal ends it."""
        self._look.stop()
        self._await_hosts()
        self._supervisor.unless_killed(self._read_findings)

    def _read_findings(self) -> None:
        """Reads the summary's figures, and takes leave as a host."""
        from ...replay.callback_requests import CallbackRequests
        from ...replay.ledger import Ledger
        from ...replay.store import RunStore

        if self._link is not None:
            self._link.stop(leave=True)
        if self._store is None or self.findings.complete:
            return
        runs, ledger = RunStore(self._store), Ledger(self._store, "supervisor")
        findings = self.findings
        if self._reports is not None:
            findings.idle = self._reports.stop()
        try:
            findings.counts = ledger.counts()
            findings.evaluations = [structs.asdict(result) for result in runs.evaluations()]
            findings.grader_restarts = runs.restarts()
            findings.dead_letters = ledger.dead_letters()
            stopped = CallbackRequests(self._store).stopped()
            findings.stopped = structs.asdict(stopped) if stopped is not None else None
            findings.complete = True
        except TandemError as error:
            self._say(f"the ledger's figures couldn't be read at the end: {error}")

    def _write_state(self, state: str) -> None:
        """Writes ``run.json``; on a full disk the file stays as it is, and a line says so."""
        changes: dict[str, object] = {"state": state}
        if state == "stopped":
            changes["wall_seconds"] = self._record.all_seconds()
        if not self._record.try_write(**changes):
            self._disk.suspect(self._folder.run_json)
            self._say(
                f"{shown(self._folder.run_json)} can't be written because the disk is full: it "
                f"doesn't say that the run is {state}"
            )


def has_finished(store: Store) -> bool | None:
    """Whether the learner has ended the run; None while Redis is away."""
    from ...replay.store import RunStore

    try:
        return RunStore(store).state(ASK_SECONDS) == "finished"
    except StoreError:
        return None
