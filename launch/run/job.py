"""One whole job: opens the folder, checks, ingests, runs all parts, and sums up at the end."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common import disk
from ...common.errors import ConfigError, DataError, TandemError
from ...common.plain import read_object
from ...common.run_folder import RunFolder
from ..board.terminal import Terminal
from ..host.folder_lock import FolderLock
from ..host.held_gpus import HeldGpus
from ..host.preflight import check_disk, check_host
from ..ingest.process import Found, IngestProcess
from ..plan.hardware import Machine, machine
from ..plan.placement import bound_for_one_host, gpus_left_idle, place, trackers_of
from ..plan.planning import problems_on_paper
from ..trackers.wandb_run import kept_here
from ..wording import shown, shown_folder, shown_tandem
from . import offline_evaluation, summary
from .opened.opening import Kind, Opening, make_folder
from .opened.presets import Preset
from .opened.record import RunRecord
from .processes import redis_part, roles
from .processes.parts import Part, Stage
from .processes.supervision import Outcome

# What needs the client of Redis is imported where it is used, so that the other processes begin without waiting for it.
if TYPE_CHECKING:
    from ...common.config import Config
    from ...replay.connection import Store
    from .running import Running


EARLY = (Stage.LEARNER, Stage.ROLLOUT, Stage.REWARD)
"""Parts whose processes load their libraries while the data are read."""


def run_job(
    preset: Preset, opening: Opening, terminal: Terminal, *, again: str | None = None
) -> int:
    """Runs what was opened to its end and returns the exit code.

    Args:
        preset: the run's preset.
        opening: the run's folder and config.
        terminal: where it is shown.
        again: the command that goes on if the run is stopped; given for a run that is one of several.

    Raises:
        TandemError: the message is for the user; the run's folder can be resumed.
    """
    if opening.kind is Kind.FINISHED:
        stopped = opening.run.get("stopped")
        without = ", or without the callback that stopped it: run.callbacks=[]"
        terminal.say(
            f"{shown(opening.folder.path)} is finished"
            f"{_results_of(opening.folder)}. Start over with --fresh (the folder is moved aside), "
            f"or go on with more steps: run.steps={(opening.config.run.steps or 0) * 2 or '…'}"
            f"{without if stopped else ''}"
        )
        return 0
    try:
        return Job(preset, opening, terminal, began=time.time(), again=again).run()
    except TandemError as error:
        terminal.note(f"tandem: {error}")
        raise


def _results_of(folder: RunFolder) -> str:
    try:
        results = read_object(folder.summary.read_bytes(), str(folder.summary), DataError)
    except (OSError, DataError):
        return ""
    before, after = results.get("accuracy_before"), results.get("accuracy_after")
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return f" ({results.get('steps')} steps)"
    return f" ({results.get('steps')} steps, accuracy {100 * before:.1f}% -> {100 * after:.1f}%)"


class Job:
    """One run on this host, from the checks to the summary."""

    def __init__(
        self,
        preset: Preset,
        opening: Opening,
        terminal: Terminal,
        *,
        began: float,
        again: str | None = None,
    ) -> None:
        self._command = again
        self._preset = preset
        self._opening = opening
        self._folder = opening.folder
        self._config: Config = opening.config
        self._terminal = terminal
        self._say = terminal.say
        self._lock = FolderLock(self._folder)
        self._machine: Machine = machine()
        self._held = HeldGpus()
        self._record = RunRecord(opening, began)
        self._ingest: IngestProcess | None = None
        self._parts: list[Part] = []
        self._digest = ""

    def run(self) -> int:
        """Runs the job to its end and returns the exit code."""
        if self._opening.kind is Kind.RESUMED or self._opening.set_aside is not None:
            # Taken before any time is spent on reading: ``--fresh`` must not move the folder of a run that
            # is going on, nor may two processes move it at once.
            self._lock.take()
        try:
            return self._checked()
        finally:
            self._end_ingest()
            for part in self._parts:
                part.end_early()
            self._held.release()
            self._lock.release()

    def _checked(self) -> int:
        config = self._config
        resumed = self._opening.kind is Kind.RESUMED
        if self._opening.kept:
            self._say(
                f"note: preset {self._preset.name} has other settings than when this run began; the run keeps its own "
                f"{', '.join(self._opening.kept)}"
            )
        placement, model = check_host(config, self._machine, anew=not resumed)
        # With launch.share_gpu workers that are added may share GPUs with ranks, and not with engines.
        ranks = () if config.launch.share_gpu else placement.learner
        placed = {gpu for seen in (*ranks, *placement.rollout) for gpu in seen}
        wanted = [gpu for gpu in self._machine.gpus if gpu.told in placed]
        free = self._held.take(wanted)
        if others := [str(gpu.told) for gpu in wanted if gpu not in free]:
            self._say(
                f"warning: other processes of Tandem hold GPU{'s' * (len(others) > 1)} {', '.join(others)} of this host, "
                f"which the run shares with them: name free ones in CUDA_VISIBLE_DEVICES, or end those processes"
            )
        if idle := gpus_left_idle(config, self._machine):
            self._say(f"warning: {idle}")
        if alone := bound_for_one_host(config):
            self._say(f"note: {alone}")
        for problem in problems_on_paper(config, self._machine, placement):
            self._say(f"on paper: {problem}")
        join, config = redis_part.where(self._opening, self._record, self._say)
        self._config = config
        if not resumed:
            check_disk(config, self._folder.path, model)
        convener = None
        if config.learner.hosts > 1 and config.launch.learner == "here":
            from .processes.meeting import Convener

            convener = Convener(config, roles.meeting_address(config), self._say)
        self._parts = roles.parts(config, self._folder, placement, convener)
        told = config.model_dump_json()
        forked = roles.forked_by_learner(config, self._parts)
        for part in self._parts:
            # Ranks that other hosts have a part in are begun together with those.
            if part.stage in EARLY and part.others is None and part not in forked:
                part.begin_early(told, forked if part.stage == Stage.LEARNER else ())
        self._record.reached("checked")
        found = self._read_data()
        self._record.reached("data_read")
        # --- from here on files are written and processes started ---
        if not resumed:
            make_folder(self._opening, self._lock, self._say)
        else:
            for key, (old, new) in self._opening.changed.items():
                self._say(f"changed: {key}: {old!r} -> {new!r}")
        self._terminal.keep(self._folder.logs / "start.log")
        from ...common.config import to_yaml
        from ..ingest.prepare import write_miniature

        if not config.run.callbacks:
            # Those that are named later are called from then on, and not for what comes before.
            self._folder.called.unlink(missing_ok=True)
        self._folder.write_config(to_yaml(config))
        self._folder.write_join(join)
        for module in self._record.begin(self._preset, self._opening, join.port):
            self._say(f"note: the code of {module} has changed since this run was last started")
        if config.run.callbacks:
            from ..callbacks.host import switched_off

            for line in switched_off(config, self._folder):
                self._say(line)
        write_miniature(config, self._folder)
        verb = "resumes" if resumed else "starts"
        self._say(
            f"{self._preset.name} {verb} in {shown(self._folder.path)} on {self._machine}"
            f"{' (this preset is untested)' if self._preset.untested else ''}"
        )
        if found is not None:
            for name, counts in found.counts.items():
                self._say(f"data {name}: {counts}")
        from .running import Running

        running = Running(config, self._folder, self._preset.name, self._record, self._terminal)
        try:
            outcome = running.run(
                join, self._lock, lambda store: self._fill(store, found), self._parts, convener
            )
            if outcome is not Outcome.FINISHED:
                running.write_stopped()
        finally:
            running.end()
        kept = kept_here(self._folder.path, self._record.began)
        if kept and config.log.wandb == "online":
            log = shown(self._folder.logs / "wandb.log")
            self._say(f"W&B was offline ({log} says why): `{kept}` uploads what it has kept")
        if outcome is not Outcome.FINISHED:
            return self._stopped(running, outcome)
        return self._finished(running)

    # --- data ----------------------------------------------------------------------------

    def _read_data(self) -> Found | None:
        """Reads and checks the data in a process of its own; None if Redis holds them already."""
        from ..ingest.prepare import inputs_digest

        self._digest = inputs_digest(self._config, self._folder)
        before = self._record.get("ingest") or {}
        if before.get("inputs") == self._digest:
            return None
        self._ingest = IngestProcess(self._config, self._folder, self._say)
        found = self._ingest.prepare()
        if before:
            self._refuse_changed(before, found)
        return found

    def _refuse_changed(self, before: Mapping[str, Any], found: Found) -> None:
        """Refuses data other than those that the run began with; runs of older versions know only those of training."""
        known = {"data.train": before["data_digest"], **before.get("other_digests", {})}
        now = {"data.train": found.data_digest, **found.other_digests}
        changed = [name for name, digest in now.items() if known.get(name, digest) != digest]
        if changed:
            raise ConfigError(
                f"the data sets have changed since {shown(self._folder.path)} was started ({', '.join(changed)}): "
                f"restore them, or start over with --fresh (the old folder is moved aside)"
            )

    def _fill(self, store: Store, found: Found | None) -> None:
        from ...replay.callback_requests import CallbackRequests
        from ...replay.ledger import Ledger
        from ...replay.store import RunStore
        from ..ingest.load import reload

        before = self._record.get("ingest")
        if before:
            sources = [(str(n), int(s), int(w)) for n, s, w in before["sources"]]
            ledger, runs = Ledger(store, "supervisor"), RunStore(store)
            known = {**before, "inputs": self._digest}
            if found is not None:
                known["other_digests"] = found.other_digests
                known["problem_bytes"] = found.problem_bytes
            largest = int(known.get("problem_bytes", 0))
            reload(ledger, runs, self._config, sources, before["data_digest"], largest)
        else:
            assert found is not None
            assert self._ingest is not None
            self._ingest.load(self._folder.join)
            known = {
                "inputs": self._digest,
                "data_digest": found.data_digest,
                "problem_bytes": found.problem_bytes,
                "other_digests": found.other_digests,
                "sources": [list(source) for source in found.sources],
                "traces": found.traces,
            }
        self._end_ingest()
        requests = CallbackRequests(store)
        if self._record.get("was_finished") or not self._config.run.callbacks:
            # A callback may have ended it, and now it is to go on.
            requests.clear()
        else:
            requests.keep_stops_of(self._config.run.callbacks)
        disk.persist(
            self._folder.run_json,
            lambda: self._record.write(ingest=known, stopped=None, was_finished=False),
        )

    def _end_ingest(self) -> None:
        if self._ingest is not None:
            self._ingest.close()
            self._ingest = None

    # --- the end -------------------------------------------------------------------------

    def _stopped(self, running: Running, outcome: Outcome) -> int:
        how = "stopped" if outcome is Outcome.STOPPED else "ended at once"
        self._say(
            f"{how} at step {running.step()}; `{self._again()}` goes on from the last checkpoint"
        )
        return 128 + int(running.signal_seen or signal.SIGHUP)

    def _again(self) -> str:
        """The command that continues the run, as a shell in the working directory takes it."""
        if self._command is not None:
            return self._command
        command = "offline" if self._config.learner.source == "offline" else "start"
        return command_again(self._preset, command, self._folder.path)

    def _finished(self, running: Running) -> int:
        from ..board.report import Drawing

        last_step, findings = running.step(), running.findings
        # The run's parts have ended, so waiting for space delays nothing else.
        disk.await_room(self._folder.path)
        if self._config.learner.source == "offline":
            try:
                found = offline_evaluation.evaluate(
                    self._config,
                    self._folder,
                    place(self._config, self._machine),
                    last_step,
                    findings.evaluations,
                    self._say,
                )
            except offline_evaluation.Stopped as stopped:
                running.write_stopped()
                self._say(f"stopped while evaluating; `{self._again()}` goes on with that")
                return 128 + stopped.number
            findings.evaluations += found
            recorded = offline_evaluation.record(self._folder, found)
            for name in trackers_of(self._config) if recorded else ():
                # The processes that follow the metrics have ended with the run's others.
                self._say(
                    f"`{shown_tandem()} track {shlex.quote(shown(self._folder.path))} --to {name}` sends {', '.join(recorded)}"
                )
        made = summary.make(
            folder=self._folder,
            config=self._config,
            record=self._record.content(),
            findings=findings,
            wall_seconds=self._record.all_seconds(),
            machine=self._machine,
        )
        disk.persist(self._folder.summary, lambda: summary.write(self._folder, made))
        seconds = self._record.all_seconds()
        disk.persist(
            self._folder.run_json,
            lambda: self._record.write(
                state="finished", wall_seconds=seconds, stopped=findings.stopped
            ),
        )
        drawing = Drawing(self._folder)
        problem = drawing.wait()
        for line in summary.table(made, self._folder):
            self._say(line)
        if problem:
            self._say(f"the report wasn't drawn: {problem}")
        if self._command is None:
            following = summary.next_command(self._config, self._preset.name, self._machine)
            self._say(f"next: {following}")
        # The run is over all the same, but no stage after it begins.
        return 128 + signal.SIGINT if drawing.interrupted else 0


def command_again(preset: Preset, command: str, folder: Path) -> str:
    """The command that goes on with a preset in a folder, as a shell in the working directory takes it."""
    words = [shown_tandem(), command, preset.name if preset.is_shipped else shown(preset.path)]
    if folder != Path(f"runs/{preset.name}").absolute():
        words.append(shown_folder(folder))
    return shlex.join(words)
