"""One whole job: opens the folder, checks, ingests, starts all parts, and sees the run to its end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ...common import disk
from ...common.disk import DiskFull
from ...common.errors import ConfigError, DamagedError, DataError, StoreError, TandemError
from ...common.plain import read_object
from ...common.run_folder import JoinInfo, RunFolder, read_join, wall_seconds
from ..board.live import LiveLook
from ..board.progress import Progress
from ..board.snapshot import Known
from ..board.terminal import Terminal
from ..host import redis_server
from ..host.folder_lock import FolderLock
from ..host.preflight import check_addresses, check_disk, check_engine, check_model, check_trackers
from ..ingest.process import Found, IngestProcess
from ..plan.hardware import Machine, machine
from ..plan.placement import Placement, place
from ..plan.planning import problems_on_paper
from ..trackers.wandb_run import place_of, wandb_id_of
from ..wording import duration, shown, shown_tandem
from . import processes
from .disk_watch import DiskWatch
from .idle import ReportWatch
from .opening import Kind, Opening, free_name, open_folder
from .presets import Preset, load
from .processes import ProcessSpec
from .summary import Findings
from .supervision import Outcome, Part, Supervisor, last_lines

if TYPE_CHECKING:
    from ...common.config import Config
    from ...replay.connection import Store

REDIS_SECONDS = 120.0
"""For redis-server to load its append-only file and answer."""
ASK_SECONDS = 0.5
"""For Redis to answer the supervisor while the run goes on: it is the supervisor who brings a dead
Redis back, so it must not wait for one."""
ALIVE_SECONDS = 10.0
"""Between two signs of life of the supervisor in ``run.json``."""
LEARNER, ROLLOUT, REWARD, TRACKERS, REDIS = range(5)
"""Stages, in the order in which they are drained."""


def run_job(words: Sequence[str], *, fresh: bool, offline: bool, plain: bool = False) -> int:
    """Runs ``tandem start`` (or ``offline``) and returns the exit code.

    Args:
        words: Preset and settings.
        fresh: Move an old folder aside.
        offline: Train on stored traces.
        plain: Lines, even where a live view could be drawn.

    Raises:
        TandemError: what the user should read; the run's folder can be resumed.
    """
    from .presets import split

    disk.keep_streams()
    terminal = Terminal(plain=plain)
    name, overrides = split(words, "miniature-sft" if offline else "miniature")
    preset = load(name)
    opening = open_folder(preset, overrides, fresh=fresh)
    config = opening.config
    if offline and config.learner.source != "offline":
        raise ConfigError(
            f"preset {preset.name} trains on rollouts (learner.source=ledger): "
            f"`tandem start {name}` runs it, or set learner.source=offline"
        )
    if opening.kind is Kind.FINISHED:
        terminal.say(
            f"{shown(opening.folder.path)} is finished"
            f"{_results_of(opening.folder)}. Start over with --fresh (the folder is moved aside), "
            f"or go on with more steps: run.steps={(config.run.steps or 0) * 2 or '…'}"
        )
        return 0
    try:
        return Job(preset, opening, terminal, began=time.time()).run()
    except TandemError as error:
        terminal.note(f"tandem: {error}")
        raise


def _results_of(folder: RunFolder) -> str:
    try:
        summary = read_object(folder.summary.read_bytes(), str(folder.summary), DataError)
    except (OSError, DataError):
        return ""
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return f" ({summary.get('steps')} steps)"
    return f" ({summary.get('steps')} steps, accuracy {100 * before:.1f}% -> {100 * after:.1f}%)"


class Job:
    """One run on this host, from the checks to the summary."""

    def __init__(
        self, preset: Preset, opening: Opening, terminal: Terminal, *, began: float
    ) -> None:
        self._preset = preset
        self._opening = opening
        self._folder = opening.folder
        self._config: Config = opening.config
        self._terminal = terminal
        self._say = terminal.say
        self._began = began
        self._lock = FolderLock(self._folder)
        self._machine: Machine = machine()
        self._store: Store | None = None
        self._findings = Findings()
        self._reports: ReportWatch | None = None
        self._look: LiveLook | None = None
        self._ingest: IngestProcess | None = None
        self._record: dict[str, Any] = dict(opening.run)

    # --- the whole -----------------------------------------------------------------------

    def run(self) -> int:
        """Sees the run to its end."""
        resumed = self._opening.kind is Kind.RESUMED
        if resumed or self._opening.set_aside is not None:
            # Before seconds are spent on reading: is somebody else at it? ``--fresh`` must not
            # move a folder from under a run that goes on in it, nor may two move it at once.
            self._lock.take()
        try:
            return self._checked(resumed)
        finally:
            if self._ingest is not None:
                self._ingest.close()
            self._end_live()
            if self._reports is not None:
                self._reports.stop()
            if self._store is not None:
                self._store.close()
            self._lock.release()

    def _checked(self, resumed: bool) -> int:
        config = self._config
        placement = place(config, self._machine)
        check_trackers(config)
        check_engine(config, placement)
        check_addresses(config)
        model = check_model(config)
        for problem in problems_on_paper(config, self._machine, placement):
            self._say(f"on paper: {problem}")
        join, config = self._where_redis_is(config)
        self._config = config
        if not resumed:
            check_disk(config, self._folder.path, model)
        from ..ingest import prepare as ingest

        digest = ingest.inputs_digest(config, self._folder)
        ingested = self._record.get("ingest") or {}
        found: Found | None = None
        if ingested.get("inputs") != digest:
            self._ingest = IngestProcess(config, self._folder, self._say)
            found = self._ingest.prepare()
            if ingested and found.data_digest != ingested["data_digest"]:
                raise ConfigError(
                    f"the data sets have changed since {shown(self._folder.path)} was started: "
                    f"restore them, or start over with --fresh (the old folder is moved aside)"
                )
        # --- from here on things are written and started ---
        if not resumed:
            self._make_folder()
        else:
            for key, (old, new) in self._opening.changed.items():
                self._say(f"changed: {key}: {old!r} -> {new!r}")
        self._terminal.keep(self._folder.logs / "start.log")
        self._write_config(join)
        ingest.write_miniature(config, self._folder)
        verb = "resumes" if resumed else "starts"
        self._say(
            f"{self._preset.name} {verb} in {shown(self._folder.path)} on {self._machine}"
            f"{' (this preset is untested)' if self._preset.untested else ''}"
        )
        if found is not None:
            for name, counts in found.counts.items():
                self._say(f"data {name}: {counts}")
        with self._supervisor() as supervisor:
            self._watch = supervisor
            self._go_live()
            redis_part = self._start_redis(supervisor, join)
            if supervisor.stop_requested:
                supervisor.drain()
                return self._stopped(supervisor, Outcome.STOPPED)
            # Redis may die while problems are put into it, too.
            supervisor.watch_during(lambda: self._fill(join, found, digest))
            if self._look is not None and self._store is not None:
                self._look.ask(self._store)
            for part in self._parts(placement):
                supervisor.start(part)
            self._record["state"] = "running"
            self._write_record()
            try:
                outcome = supervisor.run()
            except DiskFull:
                self._record |= {"state": "stopped", "wall_seconds": self._wall()}
                self._write_record()
                raise
            except TandemError:
                self._record["state"] = "failed"
                self._write_record()
                raise
            if outcome is not Outcome.FINISHED:
                return self._stopped(supervisor, outcome)
            if redis_part is None:
                self._ask_last()
        self._end_live()
        return self._finished()

    def _make_folder(self) -> None:
        if self._opening.set_aside is not None:
            if not self._folder.read_run():
                raise self._begun_elsewhere()
            # Its lock is held: no run goes on in it, and nobody else moves it.
            aside = free_name(self._folder.path)
            os.rename(self._folder.path, aside)
            self._lock.release()
            self._say(f"{shown(self._folder.path)} is now {shown(aside)}")
        self._folder.make()
        self._lock.take()
        if self._folder.read_run():
            raise self._begun_elsewhere()

    def _begun_elsewhere(self) -> TandemError:
        return TandemError(
            f"{shown(self._folder.path)} was started by another process just now: look there "
            f"with `tandem status {shown(self._folder.path)}`"
        )

    def _where_redis_is(self, config: Config) -> tuple[JoinInfo, Config]:
        """How the run's Redis will be joined; an external one is checked here already."""
        kept = read_join(self._folder.join) if self._folder.join.exists() else None
        if self._opening.set_aside is not None:
            kept = None
        run_id = self._opening.run_id
        url = config.replay.redis_url
        before = self._record.get("folder")
        moved = before not in (None, os.path.realpath(self._folder.path))
        if url is not None:
            if moved:
                self._say(
                    f"note: this folder was {before}, and its ledger is in the Redis of "
                    f"replay.redis_url: if it is a copy, let only one of them go on"
                )
            join, without_password = redis_server.parse_url(url, run_id, kept)
            self._record["redis_version"] = redis_server.check_external(join)
            replay = config.replay.model_copy(update={"redis_url": without_password})
            return join, config.model_copy(update={"replay": replay})
        redis_server.find()
        bind = config.launch.bind
        # Where every address is bound, this host's own processes use loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
        if moved and kept is not None:
            # A copy and its original must not be taken for one another, whoever comes up first.
            self._say(
                f"note: this folder was {before}: Redis gets another password and port here, and "
                f"members on other hosts need a new file from `tandem join-file`"
            )
            kept = None
        port = redis_server.choose_port(bind, kept.port if kept else None)
        if kept is not None and kept.run_id == run_id:
            if port != kept.port:
                self._say(
                    f"note: port {kept.port} is taken, Redis listens on {port}: members on other "
                    f"hosts need a new file from `tandem join-file`"
                )
            return structs.replace(kept, host=host, port=port), config
        password = redis_server.new_password()
        return JoinInfo(run_id=run_id, host=host, port=port, password=password), config

    def _write_config(self, join: JoinInfo) -> None:
        from ...common.config import to_yaml

        self._folder.write_config(to_yaml(self._config))
        known = self._record if self._record.get("run_id") == self._opening.run_id else {}
        # Found before the record says that the run lies here.
        wandb_id = wandb_id_of({"run_id": self._opening.run_id, **known}, self._folder.path)
        self._folder.write_join(join)
        self._record |= {
            "run_id": self._opening.run_id,
            "wandb_id": wandb_id,
            "preset": self._preset.name,
            "preset_path": str(self._preset.path),
            "overrides": [_without_password(word) for word in self._opening.overrides],
            "port": join.port,
            "state": "starting",
            "wall_seconds": wall_seconds(self._record),
            "began": self._began,
            "alive": self._began,
        } | place_of(self._folder.path)
        self._record.setdefault("created", time.time())
        self._folder.write_run(self._record)

    # --- parts ---------------------------------------------------------------------------

    def _supervisor(self) -> Supervisor:
        launch = self._config.launch
        disk.set_patience(launch.full_disk_seconds)
        folder = self._folder.path
        self._disk = DiskWatch(folder, launch.full_disk_seconds, self._say, shown(folder))
        total = self._config.run.steps
        self._progress = Progress(
            self._folder.metrics,
            total=total,
            every=self._config.log.every,
            # The view shows the same figures, and better.
            say=lambda line: None if self._terminal.drawing else self._say(line),
            restarts=lambda: len(self._watch.restarts),
        )
        return Supervisor(
            max_failures=launch.max_failures,
            backoff_seconds=launch.backoff_seconds,
            drain_seconds=launch.drain_seconds,
            say=self._say,
            progress=self._steps,
            finished=self._has_finished,
            tick=self._tick,
            restarts_file=self._folder.logs / "restarts.jsonl",
            disk_watch=self._disk,
        )

    def _go_live(self) -> None:
        if not self._terminal.live:
            return
        self._look = LiveLook(
            Known(
                run=shown(self._folder.path),
                preset=self._preset.name,
                supervisor=os.getpid(),
                elapsed_seconds=float(self._record.get("wall_seconds") or 0.0),
                total_steps=self._config.run.steps,
                limit=self._config.replay.max_staleness,
            ),
            began=self._began,
            progress=self._progress,
            restarts=self._folder.logs / "restarts.jsonl",
            state=lambda: (
                "draining" if self._watch.stop_requested else str(self._record.get("state"))
            ),
        )
        self._terminal.go_live(self._look)

    def _end_live(self) -> None:
        self._terminal.end_live()
        if self._look is not None:
            self._look.stop()
            self._look = None

    def _steps(self) -> int:
        self._progress.update()
        return self._progress.step

    def _has_finished(self) -> bool | None:
        return has_finished(self._store) if self._store is not None else False

    def _tick(self) -> None:
        self._progress.update()
        if time.time() - self._record["alive"] >= ALIVE_SECONDS:
            self._note_alive()
        if self._terminal.gone:
            self._watch.request_stop("the terminal has gone away")
        stalled = time.monotonic() - self._progress.moved
        if stalled > self._config.launch.stall_seconds and not self._disk.full():
            self._progress.moved = time.monotonic()
            self._say(f"no step for {duration(stalled)}: {self._who_waits()}")

    def _who_waits(self) -> str:
        from ...replay.ledger import Ledger

        assert self._store is not None
        if self._config.learner.source == "offline":
            return f"look into {shown(self._folder.logs / 'learner-0.log')}"
        try:
            return Ledger(self._store, "supervisor").waiting_for(ASK_SECONDS)
        except TandemError as error:
            return str(error)

    def _start_redis(self, supervisor: Supervisor, join: JoinInfo) -> Part | None:
        if self._config.replay.redis_url is not None:
            redis_server.wait_ready(join, deadline=REDIS_SECONDS)
            return None
        program = redis_server.find()
        conf = redis_server.write_conf(
            self._folder, join, self._config.replay, self._config.launch.bind
        )
        log = self._folder.logs / "redis.log"
        part = Part(
            name="redis",
            stage=REDIS,
            specs=lambda: self._redis(str(program.path), str(conf)),
            on_start=lambda pids: self._lock.name_redis(pids[0]),
            before_end=self._ask_last,
        )
        supervisor.start(part)
        try:
            info = redis_server.wait_ready(
                join,
                deadline=REDIS_SECONDS,
                alive=lambda: part.alive() and not supervisor.stop_requested,
            )
        except StoreError as error:
            if supervisor.stop_requested:
                return part
            if redis_server.says_damaged(last_lines(log)):
                raise DamagedError(
                    f"redis-server can't read the ledger in {shown(self._folder.redis)}, it is "
                    f"damaged: restore it from a copy of the run's folder. "
                    f"{self._what_is_left()}. Its log is {shown(log)}"
                ) from None
            raise StoreError(
                f"{error}; the last lines of {shown(log)}:\n{last_lines(log)}"
            ) from None
        if Path(info.get("config_file") or conf) != conf:
            raise StoreError(
                f"port {join.port} was taken by another redis-server ({info['config_file']}) just "
                f"now: start again"
            )
        self._record["redis_version"] = info["redis_version"]
        return part

    def _redis(self, program: str, conf: str) -> list[ProcessSpec]:
        told = redis_server.mend(self._folder)
        if told:
            self._say(f"warning: {told}; what the ledger lacks is repaired from the journal")
        spec = processes.redis(self._folder, program, conf)
        return [replace(spec, pass_fds=(self._lock.fileno(),))]

    def _what_is_left(self) -> str:
        # DeepSpeed isn't loaded in every supervisor.
        from ...learner.resume.checkpoints import what_is_left

        return what_is_left(self._folder)

    def _fill(self, join: JoinInfo, found: Found | None, digest: str) -> None:
        from ...replay.connection import connect
        from ...replay.ledger import Ledger
        from ...replay.store import RunStore
        from ..ingest import prepare as ingest

        self._store = connect(join, name="supervisor")
        runs, ledger = RunStore(self._store), Ledger(self._store, "supervisor")
        before = self._record.get("ingest")
        if before:
            sources = [(str(n), int(s), int(w)) for n, s, w in before["sources"]]
            ingest.reload(ledger, runs, self._config, sources, before["data_digest"])
            before["inputs"] = digest
        else:
            assert found is not None
            assert self._ingest is not None
            self._ingest.load(self._folder.join)
            self._record["ingest"] = {
                "inputs": digest,
                "data_digest": found.data_digest,
                "sources": [list(source) for source in found.sources],
                "traces": found.traces,
            }
        if self._ingest is not None:
            self._ingest.close()
            self._ingest = None
        disk.persist(self._folder.run_json, lambda: self._folder.write_run(self._record))
        if runs.state() != "running":
            runs.set_state("running")
        self._reports = ReportWatch(runs)

    def _parts(self, placement: Placement) -> list[Part]:
        config, folder = self._config, self._folder
        parts = [
            Part(
                name="learner",
                stage=LEARNER,
                # A new port for every life: the old one may linger in a half-closed rendezvous.
                specs=lambda: processes.learner(
                    config, folder, placement, str(redis_server.choose_port("127.0.0.1", None))
                ),
                may_finish=True,
            )
        ]
        for stage, specs in (
            (ROLLOUT, processes.rollout(config, folder, placement)),
            (REWARD, processes.reward(config, folder)),
            (TRACKERS, processes.trackers(config, folder)),
        ):
            parts += [
                Part(
                    name=spec.name,
                    stage=stage,
                    specs=partial(list, [spec]),
                    dispensable=stage == TRACKERS,
                )
                for spec in specs
            ]
        return parts

    # --- the end -------------------------------------------------------------------------

    def _ask_last(self) -> None:
        """Reads from Redis what the summary tells, while it is still there."""

        from ...replay.ledger import Ledger
        from ...replay.store import RunStore

        if self._look is not None:
            self._look.stop()
        if self._store is None or self._findings.complete:
            return
        runs, found = RunStore(self._store), self._findings
        if self._reports is not None:
            found.idle = self._reports.stop()
        try:
            found.counts = Ledger(self._store, "supervisor").counts()
            found.evaluations = [structs.asdict(result) for result in runs.evaluations()]
            found.grader_restarts = runs.restarts()
            found.dead_letters = Ledger(self._store, "supervisor").dead_letters()
            found.complete = True
        except TandemError as error:
            self._say(f"the ledger's figures couldn't be read at the end: {error}")

    def _wall(self) -> float:
        """Seconds of this life and of the earlier ones."""
        return float(self._record.get("wall_seconds") or 0.0) + time.time() - self._began

    def _note_alive(self) -> None:
        """Were the supervisor killed, its time up to here would count."""
        self._record["alive"] = time.time()
        try:
            self._folder.write_run(self._record)
        except OSError as error:
            if not disk.is_full(error):
                raise

    def _write_record(self) -> None:
        """Writes ``run.json``; on a full disk it stays as it is, which is told."""
        self._record["alive"] = time.time()
        try:
            self._folder.write_run(self._record)
        except OSError as error:
            if not disk.is_full(error):
                raise
            self._disk.suspect(self._folder.run_json)
            self._say(
                f"{shown(self._folder.run_json)} can't be written, the disk is full: it doesn't "
                f"say that the run is {self._record['state']}"
            )

    def _stopped(self, supervisor: Supervisor, outcome: Outcome) -> int:
        self._record["wall_seconds"] = self._wall()
        self._record["state"] = "stopped"
        self._write_record()
        self._end_live()
        self._progress.update()
        how = "stopped" if outcome is Outcome.STOPPED else "ended at once"
        self._say(
            f"{how} at step {self._progress.step}; "
            f"`{self._again()}` goes on from the last checkpoint"
        )
        return 128 + int(supervisor.signal_seen or signal.SIGHUP)

    def _again(self) -> str:
        """The command that goes on, as a shell in the working directory takes it."""
        command = "offline" if self._config.learner.source == "offline" else "start"
        words = [shown_tandem(), command, self._preset_word()]
        if self._folder.path != Path(f"runs/{self._preset.name}").absolute():
            words.append(f"run.dir={shown(self._folder.path)}")
        return shlex.join(words)

    def _preset_word(self) -> str:
        from .presets import FOLDER

        own = self._preset.path.parent != FOLDER
        return shown(self._preset.path) if own else self._preset.name

    def _finished(self) -> int:
        from ..board.report import Drawing
        from . import summary

        self._progress.update()
        # The run's parts have ended: from here on nothing is kept from waiting for space.
        disk.await_room(self._folder.path)
        if self._config.learner.source == "offline":
            self._evaluate_offline()
        made = summary.make(
            folder=self._folder,
            config=self._config,
            record=self._record,
            findings=self._findings,
            wall_seconds=self._wall(),
            machine=self._machine,
        )
        disk.persist(self._folder.summary, lambda: summary.write(self._folder, made))
        self._record["wall_seconds"] = self._wall()
        self._record["state"] = "finished"
        disk.persist(self._folder.run_json, lambda: self._folder.write_run(self._record))
        problem = Drawing(self._folder).wait()
        for line in summary.table(made, self._folder):
            self._say(line)
        if problem:
            self._say(f"the report wasn't drawn: {problem}")
        self._say(f"next: {summary.next_command(self._config, self._preset.name, self._machine)}")
        return 0

    def _evaluate_offline(self) -> None:
        """Before and after, by ``tandem evaluate`` in processes of their own, side by side."""
        settings, sets = self._config.evaluate, self._config.data.evaluate
        if not sets:
            return
        name, last = sets[0].name, self._progress.step
        # A worker that evaluated during the run may have done these too.
        done = {one["step"] for one in self._findings.evaluations if one["set_name"] == name}
        wanted = []
        if settings.at_start and 0 not in done:
            wanted.append(("before", self._config.model.path, 0))
        if settings.at_end and last not in done:
            wanted.append(("after", str(self._folder.model), last))
        if not wanted:
            return
        self._say(f"evaluating on {name}")
        outputs = {}
        launch = self._config.launch
        with Supervisor(
            max_failures=1,
            backoff_seconds=launch.backoff_seconds,
            drain_seconds=5.0,
            say=self._say,
        ) as supervisor:
            for when, model, step in wanted:
                out = self._folder.logs / f"evaluate-{when}.json"
                out.unlink(missing_ok=True)
                outputs[when] = (out, step)
                spec = ProcessSpec(
                    name=f"evaluate-{when}",
                    arguments=(
                        *("evaluate", "--run", str(self._folder.path), "--model", model),
                        *("--set", name, "--out", str(out)),
                    ),
                    log=self._folder.logs / f"evaluate-{when}.log",
                    threads=self._config.rollout.threads,
                )
                supervisor.start(Part(name=spec.name, stage=ROLLOUT, specs=partial(list, [spec])))
            outcome = supervisor.run_until(lambda: all(out.exists() for out, _ in outputs.values()))
        if outcome is not Outcome.FINISHED:
            raise TandemError(
                f"stopped while evaluating; `tandem evaluate --run {shown(self._folder.path)}` "
                f"does it"
            )
        for out, step in outputs.values():
            result = read_object(out.read_bytes(), str(out), DataError)
            self._findings.evaluations.append(
                {**result, "step": step, "set_name": name, "member": "tandem evaluate"}
            )


def has_finished(store: Store) -> bool | None:
    """Whether the learner has ended the run; None while Redis is away."""
    from ...replay.store import RunStore

    try:
        return RunStore(store).state(ASK_SECONDS) == "finished"
    except StoreError:
        return None


def _without_password(word: str) -> str:
    """An override as it may be kept, however it names ``replay.redis_url``."""
    from ...common.config import parse_override

    key, value = parse_override(word)
    if key == "replay.redis_url" and isinstance(value, str):
        return f"{key}={redis_server.without_password(value)}"
    if key == "replay" and isinstance(value, dict) and isinstance(value.get("redis_url"), str):
        kept = value | {"redis_url": redis_server.without_password(value["redis_url"])}
        return f"{key}={json.dumps(kept)}"
    return word
