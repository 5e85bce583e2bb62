"""Keeps the parts of a run alive: watches them, starts them again after a pause, drains and ends them.

A part that dies is started again after a pause that doubles from ``launch.backoff_seconds`` to
30 s. A part that dies ``launch.max_failures`` times without progress in between ends the run;
progress means that more steps are journalled than at the part's last death. Deaths while Redis is
away don't count. A start that fails, after the first one, is a death too.

The first SIGINT, SIGTERM or SIGHUP (or a terminal that has gone away) drains: the parts get
SIGTERM stage by stage, the learner first, so that it checkpoints while Redis still answers. The
second kills at once. A SIGHUP that is ignored, as under nohup, stays so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from ....common.disk import DiskFull, is_full, try_append
from ....common.errors import ConfigError, RunFailedError, TandemError
from ....common.memory import kills
from ....common.waiting import Wait
from ...wording import shown
from .disk_watch import DiskWatch
from .parts import (
    Interruption,
    Part,
    ProcessSpec,
    Stage,
    described,
    exit_of,
    last_lines,
    now,
    signal_name,
)

LONGEST_PAUSE = 30.0
"""Seconds between two attempts at most."""
STAGE_SECONDS = 2.0
"""What each stage of a drain has at least, Redis above all, whatever the earlier stages took."""
HOPELESS: Mapping[int, str] = {
    ConfigError.exit_code: "ended with a configuration or data error",
    RunFailedError.exit_code: "ended the run",
}
"""Exit codes after which starting again can't help."""


class PartFailed(TandemError):
    """A part of the run could not be kept alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One death that was followed by a new start."""

    process: str
    """Name of the process."""
    time: str
    """Local time, ISO 8601."""
    exit: int | str
    """Exit code, or the signal's name."""


class Outcome(Enum):
    """How :meth:`Supervisor.run` ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    KILLED = "killed"


class Supervisor:
    """Runs parts until one of them has finished the run, or somebody wants it to stop."""

    def __init__(
        self,
        *,
        max_failures: int,
        backoff_seconds: float,
        drain_seconds: float,
        say: Callable[[str], None],
        progress: Callable[[], int] = lambda: 0,
        finished: Callable[[], bool | None] = lambda: True,
        redis_away: Callable[[], bool] = lambda: False,
        tick: Callable[[], None] = lambda: None,
        on_drain: Callable[[], None] = lambda: None,
        restarts_file: Path | None = None,
        disk_watch: DiskWatch | None = None,
        oom_kills: Callable[[], int] = kills,
    ) -> None:
        self._max_failures = max_failures
        self._backoff = backoff_seconds
        self._drain_seconds = drain_seconds
        self._say = say
        self._progress = progress
        self._finished = finished
        self._redis_away = redis_away
        self._tick = tick
        self._on_drain = on_drain
        self._restarts_file = restarts_file
        self._unwritten: list[str] = []
        self._disk = disk_watch
        self._kills = oom_kills
        self._killed = oom_kills()
        self._parts: list[Part] = []
        self._stops: list[str] = []
        self._old_handlers: dict[int, object] = {}
        self._wake_read = self._wake_write = -1
        self._old_wakeup = -1
        self.restarts: list[Restart] = []
        self.signal_seen: int | None = None

    # --- signals -------------------------------------------------------------------------

    def __enter__(self) -> Supervisor:
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # Under nohup the run outlives its terminal.
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        # A handler is needed for SIGCHLD to reach the wake-up pipe.
        self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.kill()
        finally:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_seen = self.signal_seen or number
        self._stops.append(signal.Signals(number).name)

    def request_stop(self, reason: str) -> None:
        """Drains as at the first signal, if nobody has asked for it yet."""
        if not self._stops:
            self._stops.append(reason)

    @property
    def stop_requested(self) -> bool:
        """Somebody wants the run to stop: check it between lengthy things."""
        return bool(self._stops)

    @property
    def kill_requested(self) -> bool:
        """A second signal wants the run to stop at once."""
        return len(self._stops) > 1

    def _wait(self, seconds: float) -> None:
        """Until a signal, a child's death, or the time is over."""
        ready, _, _ = select.select([self._wake_read], [], [], seconds)
        if ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)

    # --- starting and watching -----------------------------------------------------------

    def start(self, part: Part) -> None:
        """Starts a part and watches it from now on. Call it from the main thread.

        (The children's death signal is tied to the *thread* that started them.)
        """
        if part not in self._parts:
            self._parts.append(part)
        if part.awaits_fork() or (part.others is not None and not part.others.may_start()):
            part.due = time.monotonic()
            return
        try:
            part.start()
        except OSError as error:
            if self._disk is None or not is_full(error):
                raise
            # Not even its log can be made.
            self._disk.suspect(Path(str(error.filename)))
            part.reap(self._say)
            part.due = time.monotonic() + 1.0

    def run(self) -> Outcome:
        """Watches until the run has finished or is to stop; the parts have ended on return.

        Raises:
            PartFailed: a part died ``max_failures`` times without progress; names its log.
        """
        while True:
            self._wait(0.2)
            if self._stops:
                return self._stop()
            try:
                if any(self._look_after(part) for part in self._parts):
                    self.drain()
                    return Outcome.FINISHED
            except PartFailed:
                self.drain()
                raise
            self._write_restarts()
            self._require_space()
            self._tick()

    def watch_during(self, work: Callable[[], None]) -> bool:
        """Does something lengthy in a thread, and watches meanwhile; raises what it raised.

        Returns:
            False if the run is to stop; the work is then left behind.

        Raises:
            PartFailed: as :meth:`run`; the work is then left behind.
            DiskFull: as :meth:`run`.
        """
        thread, failed = _begun(work)
        while thread.is_alive():
            thread.join(0.05)
            if self._stops:
                return False
            for part in self._parts:
                self._look_after(part)
            self._require_space()
        if failed:
            raise failed[0]
        return True

    def unless_killed(self, work: Callable[[], None]) -> None:
        """Does something that may wait, in a thread, which a second signal leaves behind; raises what it raised."""
        if self.kill_requested:
            return
        thread, failed = _begun(work)
        while thread.is_alive() and not self.kill_requested:
            thread.join(0.05)
        if failed:
            raise failed[0]

    def _require_space(self) -> None:
        """Drains a run whose disk has been full for too long, and raises ``DiskFull``."""
        overdue = self._disk.overdue() if self._disk is not None else ""
        if overdue:
            self._say("draining, since there is no space")
            self.drain()
            raise DiskFull(overdue)

    def run_until(self, done: Callable[[], bool]) -> Outcome:
        """Like :meth:`run` for parts that end by themselves, until ``done`` says so."""
        while True:
            self._wait(0.2)
            if self._stops:
                return self._stop()
            if done():
                self.drain()
                return Outcome.FINISHED
            for part in self._parts:
                if not done():
                    self._look_after(part)

    def _look_after(self, part: Part) -> bool:
        """Restarts a dead part; True where its end is the end of the run.

        While nobody can tell whether the run has finished, what might have finished it is left as
        it is: it is asked again at the next look, when Redis has been brought back.
        """
        if part.due is not None:
            if time.monotonic() >= part.due and not self._disk_is_full():
                self._start_due(part)
            return False
        exits = [exit_of(process) for _, process in part.processes]
        if all(code is None for code in exits):
            if part.others is not None and (found := part.others.interruption()) is not None:
                self._interrupt(part, found)
            return False
        if part.dispensable and not self._disk_is_full():
            self._let_go(part, next(code for code in exits if code is not None))
            return False
        if all(code in (0, None) for code in exits):
            # Ranks end one after the other; the last decides.
            if any(code is None for code in exits):
                return False
            over = self._finished()
            if over is None:
                return False
            if over:
                # A worker may see the end of the run before the learner has left.
                part.reap(self._say)
                return part.may_finish
        ended = [
            (code, spec)
            for (spec, _), code in zip(part.processes, exits, strict=True)
            if code is not None
        ]
        # A rank that gives up takes the others along, which only lose their connection to it.
        died, spec = min(ended, key=lambda one: (one[0] not in HOPELESS, one[0] == 0))
        if part.may_finish:
            over = self._finished()
            if over is None:
                return False
            if over:
                self._say(f"{spec.name} {described(died)} after it had finished the run")
                return True
        part.reap(self._say)
        if part.others is not None and not part.others.ended(spec, died):
            part.due = time.monotonic()
            return False
        self._count(part, spec, died)
        return False

    def _start_due(self, part: Part) -> None:
        """Starts a part whose pause is over; if it can't be started, that counts as a death."""
        why = self._start_or_why(part)
        if not why:
            return
        if part.others is not None and not part.others.ended(part.specs()[0], 1):
            part.due = time.monotonic() + self._pause(part)
            self._say(why)
        elif not self._dies(part):
            pause = self._pause(part)
            part.due = time.monotonic() + pause
            self._say(f"{why}; trying again in {pause:.1f} s")
        elif part.dispensable:
            part.due = None
            self._say(f"warning: {why}; the run goes on without it")
        else:
            raise PartFailed(f"{why}, after {part.deaths} failures without a step in between")

    def _start_or_why(self, part: Part) -> str:
        """Starts a part again, or returns why it can't be started: no process, no port."""
        try:
            self.start(part)
        except (OSError, ConfigError) as error:
            part.reap(self._say)
            return f"{part.name} can't be started: {error}"
        return ""

    def _interrupt(self, part: Part, found: Interruption) -> None:
        """Ends a part whose other processes, on other hosts, have ended or are about to."""
        if found.gently:
            self._say(f"{found.why}; {part.name} checkpoints and is started again")
            part.terminate()
            return
        spec = part.processes[0][0]
        part.reap(self._say)
        if found.exit is None:
            part.due = time.monotonic()
            if found.why:
                self._say(found.why)
            return
        self._count(part, spec, found.exit, found.why)

    def _let_go(self, part: Part, died: int) -> None:
        spec = part.processes[0][0]
        part.deaths += 1
        if part.comes_back and died not in HOPELESS and part.deaths < self._max_failures:
            part.reap(self._say)
            self._start_again(part, spec, died, self._how(died))
            return
        last = last_lines(spec.log, 1).strip().removeprefix("| ")
        self._say(f"warning: {spec.name} {described(died)}, the run goes on without it: {last}")
        part.reap(self._say)

    def _disk_is_full(self) -> bool:
        return self._disk is not None and self._disk.full()

    def _count(self, part: Part, spec: ProcessSpec, died: int, why: str = "") -> None:
        """Counts a death, of this process or (``why``) of one on another host."""
        if not why and died not in HOPELESS and self._died_of_a_full_disk(spec, died):
            # The disk's doing, not the part's. It is started again as soon as there is space.
            part.due = time.monotonic()
            self._note(spec, died)
            self._say(f"{spec.name} {described(died)}; it is started again once there is space")
            return
        how = self._how(died) if not why else described(died)
        redis = part.stage == Stage.REDIS
        if not why and died not in HOPELESS and not redis and self._redis_away():
            # The outage's doing: whoever waits for Redis ends after a while, as often as it takes.
            self._start_again(part, spec, died, f"{how} while Redis is away")
            return
        if self._dies(part) or died in HOPELESS:
            verdict = HOPELESS.get(
                died,
                f"died {part.deaths} times without a step in between; at last it {how}",
            )
            if why:
                raise PartFailed(f"{part.name} {verdict}: {why}")
            raise PartFailed(
                f"{spec.name} {verdict}; the last lines of {shown(spec.log)}:\n{last_lines(spec.log)}"
            )
        self._start_again(part, spec, died, how, why)

    def _dies(self, part: Part) -> bool:
        """Counts a death; returns whether there were too many without progress."""
        progress = self._progress()
        if progress > part.progress_at_death:
            part.deaths = 0
        part.deaths += 1
        part.progress_at_death = max(progress, part.progress_at_death)
        return part.deaths >= self._max_failures

    def _pause(self, part: Part) -> float:
        """Seconds until the next start."""
        return min(LONGEST_PAUSE, self._backoff * 2 ** max(0, part.deaths - 1))

    def _how(self, died: int) -> str:
        """How a process has ended; a kill may have been the kernel's, who needed memory."""
        text = described(died)
        if died != -signal.SIGKILL:
            return text
        before, self._killed = self._killed, self._kills()
        if self._killed > before:
            text += (
                ", and the kernel has killed a process for want of memory since the last such death: it was "
                "probably this one (docs/memory.md says what frees memory)"
            )
        return text

    def _start_again(
        self, part: Part, spec: ProcessSpec, died: int, how: str, why: str = ""
    ) -> None:
        pause = self._pause(part)
        part.due = time.monotonic() + pause
        self._note(spec, died)
        whose = f"{why}; starting {part.name}" if why else f"{spec.name} {how}; starting it"
        self._say(f"{whose} again in {pause:.1f} s")

    def _died_of_a_full_disk(self, spec: ProcessSpec, died: int) -> bool:
        if self._disk is None:
            return False
        if died == DiskFull.exit_code:
            self._disk.suspect(spec.log)
        return self._disk.full()

    def _note(self, spec: ProcessSpec, died: int) -> None:
        restart = Restart(process=spec.name, time=now(), exit=signal_name(died))
        self.restarts.append(restart)
        entry = {"process": restart.process, "time": restart.time, "exit": restart.exit}
        self._unwritten.append(json.dumps(entry) + "\n")
        self._write_restarts()

    def _write_restarts(self) -> None:
        """Writes what is to be written of restarts; what finds no space is kept for later."""
        if self._restarts_file is None or not self._unwritten:
            return
        try:
            with open(self._restarts_file, "ab", buffering=0) as file:
                while self._unwritten:
                    try_append(file, self._unwritten[0].encode())
                    del self._unwritten[0]
        except OSError as error:
            if not is_full(error):
                raise
            if self._disk is not None:
                self._disk.suspect(self._restarts_file)

    # --- ending --------------------------------------------------------------------------

    def _stop(self) -> Outcome:
        # A signal that the user sent is answered; a terminal that is gone can't read it.
        self._say(f"{self._stops[0]}: draining and checkpointing (once more: stop at once)")
        return Outcome.STOPPED if self.drain() else Outcome.KILLED

    def drain(self) -> bool:
        """SIGTERM stage by stage, waiting for each; False where something had to be killed.

        All stages together have ``drain_seconds``, of which each later stage keeps a share.
        """
        end = time.monotonic() + self._drain_seconds
        self._on_drain()
        clean = True
        for part in self._parts:
            # Others write to it while they drain.
            self._revive(part)
        stages = sorted({part.stage for part in self._parts})
        for later, stage in zip(reversed(range(len(stages))), stages, strict=True):
            seconds = max(end - STAGE_SECONDS * later - time.monotonic(), STAGE_SECONDS)
            parts = [part for part in self._parts if part.stage == stage]
            clean &= self._drain_stage(parts, seconds)
            if len(self._stops) > 1:
                self.kill()
                return False
        self._write_restarts()
        return clean

    def _drain_stage(self, parts: Sequence[Part], seconds: float) -> bool:
        """SIGTERM to these parts, then SIGKILL; False where one had to be killed."""
        for part in parts:
            if part.before_end is not None and self._revive(part):
                part.before_end()
            part.terminate()
        wait = Wait("", "end", seconds)
        while len(self._stops) <= 1:
            wait.who = ", ".join(part.name for part in parts if part.alive())
            if not wait.who or wait.expired(self._say):
                break
            self._revive_later(parts[0].stage)
            self._wait(0.1)
        late = [spec.name for part in parts for spec in part.running()]
        if len(self._stops) <= 1:
            for name in late:
                self._say(f"{name} didn't end in time and is killed")
        for part in parts:
            if part.dispensable:
                self._tell_failed(part)
            part.reap(self._say)
        return not late

    def _tell_failed(self, part: Part) -> None:
        """Tells of processes that have failed when they were asked to end, such as a tracker that couldn't send all."""
        for spec, process in part.processes:
            code = exit_of(process)
            if code is not None and code > 0:
                last = last_lines(spec.log, 1).strip().removeprefix("| ")
                self._say(f"warning: {spec.name} {described(code)}: {last}")

    def _revive_later(self, stage: int) -> None:
        """Starts parts with last words again that have died before their turn to end.

        A scheduler tells every process of a job at once to end, and Redis does so at once: the learner, which is
        asked to end before it, could then make no last checkpoint.
        """
        for part in self._parts:
            if part.stage > stage and part.before_end is not None and not part.alive():
                self._revive(part)
                part.deaths += 1

    def _revive(self, part: Part) -> bool:
        """Starts a part with last words again if it is dead; whether it is alive now."""
        hopeless = part.deaths >= self._max_failures
        if part.before_end is not None and not part.alive() and not hopeless:
            part.reap(self._say)
            if why := self._start_or_why(part):
                self._say(why)
        part.due = None
        return part.alive()

    def kill(self) -> None:
        """Kills everything at once."""
        for part in sorted(self._parts, key=lambda part: part.stage):
            part.due = None
            part.reap(self._say)


def _begun(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Begins work in a thread; also a list that will hold what it raises."""
    failed: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            failed.append(error)

    thread = threading.Thread(target=do, name="watched", daemon=True)
    thread.start()
    return thread, failed
