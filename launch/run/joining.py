"""A host that joins a run: a small supervisor that keeps processes of one role running there.

It needs the join file alone. Everything else (the config, whether the run goes on, where the learner's ranks meet)
comes through Redis, and nothing that it keeps is part of the run: its folder holds logs. ``docs/hosts.md`` says
which exit code means what.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import ConfigError, RunFailedError, StoreError, TandemError
from ...common.run_folder import JoinInfo, read_join
from ...common.sockets import address_towards, is_loopback, network_name
from ...common.waiting import Wait
from ...replay.hosts import (
    HEAD,
    Failure,
    Host,
    HostLink,
    Hosts,
    HostState,
    Meeting,
    new_member,
)
from ...replay.ledger import Ledger
from ..board.terminal import Terminal
from ..host.held_gpus import HeldGpus
from ..host.surroundings import check_torch
from ..plan.hardware import GpuName, machine
from ..wording import shown
from .processes import roles
from .processes.parts import Interruption, Part, ProcessSpec, Stage, last_lines
from .processes.supervision import Outcome, Supervisor
from .running import ASK_SECONDS, has_finished

if TYPE_CHECKING:
    from ...common.config import Config
    from ...replay.connection import Store

STAGES = {
    "rollout": Stage.ROLLOUT,
    "reward": Stage.REWARD,
    "learner": Stage.LEARNER,
    "environments": Stage.ENVIRONMENTS,
}
HEAD_SECONDS = 15.0
"""What a head has said longer ago doesn't tell what becomes of the run."""
FIRST_SECONDS = 30.0
"""How long Redis may take to answer at first, unless the command line says."""
FILL_SECONDS = 300.0
"""How long the head may take to put the run into Redis."""


class HeadUnreachable(TandemError):
    """The run's Redis can't be reached: whoever placed this job may place it again."""

    exit_code = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What the command line says."""

    file: Path
    """The join file."""
    role: str
    workers: int | None
    """Number of processes; None = as many as the host's GPUs serve, or one."""
    folder: Path | None
    """Where logs go; None = a new folder below ``hosts/`` in the working directory."""
    drain_seconds: float | None
    """None = ``launch.drain_seconds``."""
    name: str | None
    """The host's name for others; None = its own."""
    wait_seconds: float = FIRST_SECONDS
    """How long Redis may take to answer at first."""
    dry_run: bool = False
    """Only says what would be started; the run learns nothing of it."""

    def logs(self, member: str) -> Path:
        """The folder of the logs."""
        return (self.folder or Path("hosts") / member).expanduser().absolute()

    def drain(self, config: Config) -> float:
        """Seconds that the processes have after they are asked to end."""
        given = self.drain_seconds
        return config.launch.drain_seconds if given is None else given


class Attendance:
    """Follows the head's meetings; a learner host's :class:`~.processes.parts.OtherHosts`."""

    def __init__(self, link: HostLink) -> None:
        self.meeting: Meeting | None = None
        """The newest one that was followed."""
        self._link = link

    @property
    def place(self) -> int:
        """This host's place among the hosts of the meeting."""
        assert self.meeting is not None
        return self.meeting.hosts.index(self._link.member)

    def may_start(self) -> bool:
        """Whether the head has called this host to a meeting that it hasn't followed yet."""
        look = self._link.look
        found = look.meeting if look is not None else None
        if found is None or self._link.member not in found.hosts:
            return False
        if self.meeting is not None and found.attempt <= self.meeting.attempt:
            return False
        self.meeting = found
        self._link.say(attempt=found.attempt, failed=None)
        return True

    def interruption(self) -> Interruption | None:
        """Whether the head has ended the attempt, or has begun another one."""
        look = self._link.look
        found = look.meeting if look is not None else None
        assert self.meeting is not None
        if found is None or found.attempt < self.meeting.attempt:
            return None  # A look from before it was called.
        if found.attempt == self.meeting.attempt and self._link.member in found.hosts:
            return None
        return Interruption(why=f"attempt {self.meeting.attempt} is over", exit=None)

    def ended(self, spec: ProcessSpec, code: int) -> bool:
        """A rank here has ended: the head is told, and decides."""
        assert self.meeting is not None
        if code:
            failed = Failure(
                attempt=self.meeting.attempt,
                process=spec.name,
                exit=code,
                log=str(spec.log),
                lines=last_lines(spec.log),
            )
            self._link.say(failed=failed)
        return False


def join(joining: Joining, terminal: Terminal) -> int:
    """Keeps the processes running until the run ends or somebody asks for the end; returns the exit code.

    A dry run asks the run's Redis for its config, prints the processes, and returns 0.

    Raises:
        ConfigError: the run, or this host, can't use them.
        HeadUnreachable: the run's Redis doesn't answer.
        RunFailedError: the run has failed.
        TandemError: they can't be kept alive.
    """
    info = read_join(joining.file)
    store, config = _contact(info, joining.wait_seconds, terminal.say)
    try:
        if config.launch.binds_all:
            raise ConfigError(
                f"the run binds launch.bind={config.launch.bind}, at which hosts that join find neither weights nor "
                f"reward pools: start it with launch.bind set to one private address of the head"
            )
        given, most = joining.drain_seconds, config.launch.drain_seconds
        if given is not None and given > most:
            terminal.say(
                f"warning: --drain {given:g} is over the run's launch.drain_seconds={most:g}, and a head that stops "
                f"waits no longer for other hosts, so {most:g} s it is: for more, start the run with "
                f"launch.drain_seconds={given:g}"
            )
            joining = replace(joining, drain_seconds=most)
        if joining.dry_run:
            print("\n".join(_dry_run(joining, info, config)))
            return 0
        return _joined(joining, terminal, info, store, config)
    finally:
        store.close()


def _contact(
    info: JoinInfo, wait_seconds: float, say: Callable[[str], None]
) -> tuple[Store, Config]:
    from ...common.config import read_config
    from ...replay.connection import connect
    from ...replay.store import RunStore

    try:
        store = connect(info, deadline=wait_seconds, name="host")
        wait = Wait("the head", "fill Redis", FILL_SECONDS)
        while not store.holds_run():
            if wait.expired(say):
                raise HeadUnreachable(f"{wait}: Redis at {store.address} doesn't hold the run yet")
            time.sleep(0.2)
        config = read_config(RunStore(store).config_yaml())
        _check_loopback(info, config, Hosts(store).live(HEAD_SECONDS))
        return store, config
    except StoreError as error:
        if "refused the password" in str(error):
            raise ConfigError(str(error)) from None
        raise HeadUnreachable(str(error)) from None


def _check_loopback(info: JoinInfo, config: Config, hosts: Sequence[Host]) -> None:
    """Refuses a run whose Redis other hosts reach, and nothing else of it.

    Where Redis has a loopback address, too, whoever reaches it is on the head or forwards ports.
    """
    bind, here = config.launch.bind, network_name()
    if not is_loopback(bind) or is_loopback(info.host) or not here:
        return
    for host in hosts:
        there = host.state.network
        # An entry that is old may be from before the head's last boot.
        if host.state.role == HEAD and host.age < HEAD_SECONDS and there not in ("", here):
            raise ConfigError(
                f"the run binds launch.bind={bind}, at which only its head, {host.state.host}, reaches weights and reward "
                f"pools: start it with launch.bind set to one private address of the head"
            )


def _dry_run(joining: Joining, info: JoinInfo, config: Config) -> list[str]:
    """What this host would start for the run, with each process's GPUs, threads and command."""
    from .dry_run import PARENT, PORT, command_line

    idle: list[str] = []
    gpus = gpus_of(config, joining.role, joining.workers, say=idle.append)
    member = new_member(joining.name)
    folder = joining.logs(member)
    if joining.role == "learner":
        # The head gives the hosts their places when all of them are there.
        where = ("--join", str(joining.file.absolute()), "--folder", str(folder))
        specs = roles.ranks_of(where, folder, config, gpus, host=1, address="ADDRESS", port=PORT)
    else:
        specs = [
            _spec(joining, config, folder, member, index, own) for index, own in enumerate(gpus)
        ]
    lines = [
        f"would join the run at {info.host}:{info.port}; nothing is started, and the run isn't told",
        "",
        f"this machine: {machine()}",
        *(f"warning: {line}" for line in idle),
        f"address: {address_towards(config.facing(info.host))}, from which the head can be reached",
        f"logs: {shown(folder)}",
        f"drain: at most {joining.drain(config):g} s after SIGTERM or Ctrl-C",
        "",
        "processes",
    ]
    for spec, own in zip(specs, gpus, strict=True):
        on = f"GPU{'s' * (len(own) > 1)} {', '.join(map(str, own))}" if own else "no GPU"
        lines.append(f"  {spec.name}  {on}, {spec.threads} thread{'s' * (spec.threads > 1)}")
        lines.append(f"    {command_line(spec)}")
    if joining.role == "learner":
        lines.append(
            f"  as the learner's second host, for instance; the head says which one it is, and ADDRESS and {PORT} "
            f"of rank 0, once every host is there"
        )
    lines.append(f"  {PARENT} is the pid of `tandem join`, with which a process ends")
    return lines


def _joined(
    joining: Joining, terminal: Terminal, info: JoinInfo, store: Store, config: Config
) -> int:
    held = HeldGpus()
    gpus = gpus_of(
        config,
        joining.role,
        joining.workers,
        held=held,
        say=lambda line: terminal.say(f"warning: {line}"),
    )
    if any(gpus):
        check_torch()
    member = new_member(joining.name)
    folder = joining.logs(member)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    terminal.keep(folder / "join.log")
    state = HostState(
        host=joining.name or socket.gethostname(),
        address=address_towards(config.facing(info.host)),
        pid=os.getpid(),
        role=joining.role,
        processes=len(gpus),
    )
    link = HostLink(store, member, state)
    ledger = Ledger(store, member)
    say = terminal.say
    supervisor = Supervisor(
        max_failures=config.launch.max_failures,
        backoff_seconds=config.launch.backoff_seconds,
        drain_seconds=joining.drain(config),
        say=say,
        progress=lambda: _progress(ledger),
        finished=lambda: has_finished(store),
        redis_away=lambda: has_finished(store) is None,
        tick=lambda: _watch(link, supervisor, info, config),
        on_drain=lambda: link.say(leaving=True),
        restarts_file=folder / "restarts.jsonl",
    )
    say(
        f"joins {info.host}:{info.port} as {member} with {len(gpus)} {joining.role} "
        f"process{'es' * (len(gpus) > 1)}; logs are in {shown(folder)}"
    )
    orderly = False
    try:
        with supervisor:
            link.start()
            for part in parts(joining, config, folder, member, gpus, link):
                supervisor.start(part)
            outcome = supervisor.run()
        orderly = True
    finally:
        # An entry that stays tells of a host that was lost, and whose failure that was.
        link.stop(leave=orderly)
        held.release()
    return _code(outcome, supervisor, link, store, say)


def _watch(link: HostLink, supervisor: Supervisor, info: JoinInfo, config: Config) -> None:
    """What is looked at five times a second, without asking anybody."""
    patience = config.launch.hosts_seconds
    if link.silence > patience:
        raise HeadUnreachable(
            f"the run's Redis hasn't answered for {link.silence:.0f} s (launch.hosts_seconds={patience:g}): the "
            f"processes here are ended, and what they had begun is done again"
        )
    look = link.look
    if look is None:
        return
    _check_loopback(info, config, look.hosts)  # The head may have come later than this host.
    if look.run_state == "failed":
        supervisor.request_stop("the run has failed")
    elif look.run_state == "finished":
        supervisor.request_stop("the run is finished")
    elif _head_leaves(look.head):
        supervisor.request_stop("the head stops the run")


def _head_leaves(head: Host | None) -> bool:
    """Whether the head stops the run: of a head that has said so long ago another start is under way."""
    return head is not None and head.state.leaving and head.age < HEAD_SECONDS


def _progress(ledger: Ledger) -> int:
    try:
        return int(
            ledger.store.call("hget", ledger.store.key("meta"), "journalled", deadline=ASK_SECONDS)
            or 0
        )
    except (StoreError, ValueError):
        return 0


def _code(
    outcome: Outcome,
    supervisor: Supervisor,
    link: HostLink,
    store: Store,
    say: Callable[[str], None],
) -> int:
    state = link.look.run_state if link.look is not None else "running"
    if state == "failed":
        raise RunFailedError("the run has failed: its own log on the head says why")
    if outcome is Outcome.FINISHED or state == "finished" or has_finished(store):
        say("the run has ended")
        return 0
    if outcome is Outcome.KILLED and supervisor.kill_requested:
        return 128 + int(supervisor.signal_seen or signal.SIGTERM)
    if supervisor.signal_seen == signal.SIGINT:
        say("drained; the run goes on without this host")
        return 0
    say(
        "drained before the end of the run: exit code 75 asks the scheduler to place this job again"
    )
    return 75


def gpus_of(
    config: Config,
    role: str,
    workers: int | None,
    *,
    held: HeldGpus | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[tuple[GpuName, ...]]:
    """The GPUs of each process that is to run here, one entry a process.

    Args:
        config: the run's.
        role: what the processes do.
        workers: how many there are to be; None = as many as the free GPUs serve, or one.
        held: holds the GPUs from now on; None = they are only looked at.
        say: is told if GPUs are left idle.

    Raises:
        ConfigError: the number of processes isn't one that the run can use, or the GPUs don't suffice.
    """
    if role == "learner":
        each, needed = 1, config.ranks_per_host
        if config.learner.hosts == 1:
            raise ConfigError(
                "the run has its learner on the head alone (learner.hosts=1): start it with "
                "learner.hosts=2 or more, and learner.ranks a multiple of that"
            )
        if config.launch.learner == "outside":
            raise ConfigError(
                "the run's ranks are started from outside (launch.learner=outside): by `tandem learner`"
            )
        if workers not in (None, needed):
            raise ConfigError(
                f"--workers {workers}: each of learner.hosts={config.learner.hosts} has {needed} of "
                f"learner.ranks={config.learner.ranks}; leave it out"
            )
        workers = needed
    else:
        each = config.rollout.gpus_per_worker if role == "rollout" else 0
    if role == "environments" and not config.environments.is_on:
        raise ConfigError("the run plays nothing in environments: environments.use is empty")
    if config.learner.source == "offline" and role in ("rollout", "reward"):
        raise ConfigError(
            f"the run trains on what is stored (learner.source=offline) and needs no {role}"
        )
    if config.launch.gpus == "none" or not each:
        return [()] * (workers or 1)
    return free_gpus(config, role, workers, each, held=held, say=say)


def free_gpus(
    config: Config,
    role: str,
    workers: int | None,
    each: int,
    *,
    held: HeldGpus | None,
    say: Callable[[str], None],
) -> list[tuple[GpuName, ...]]:
    """So many GPUs for each process, of those that no other process holds; see :func:`gpus_of`."""
    there = machine().gpus
    holding = HeldGpus() if held is None else held
    # With launch.share_gpu a GPU is held by an engine, and a rank of the learner may be beside it.
    shares = config.launch.share_gpu and role == "learner"
    free = there if shares else holding.take(there, workers and workers * each)
    wanted = workers or max(1, len(free) // each)
    suffices = len(free) >= wanted * each
    holding.release(keep=wanted * each if held is not None and suffices else 0)
    if suffices:
        have = [gpu.told for gpu in free]
        return [tuple(have[i * each : (i + 1) * each]) for i in range(wanted)]
    others = len(there) - len(free)
    lacking = (
        f"{wanted} {role} process{'es' * (wanted > 1)} need{'s' * (wanted == 1)} {wanted * each} "
        f"GPU{'s' * (wanted * each > 1)}, and this host has {len(there) or 'none'}"
        f"{f', of which {others} are held by other processes of Tandem' * (others > 0)}"
    )
    way_out = "lower --workers" if wanted > 1 else "run it where there are as many"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        way_out += f", or have CUDA_VISIBLE_DEVICES={mask} name more of them"
    if config.launch.gpus == "required":
        raise ConfigError(f"{lacking} (launch.gpus=required): {way_out}")
    if there:
        say(
            f"{lacking}, so {'they run' if wanted > 1 else 'it runs'} on CPUs (launch.gpus=auto): {way_out}"
        )
    return [()] * wanted


def parts(
    joining: Joining,
    config: Config,
    folder: Path,
    member: str,
    gpus: Sequence[tuple[GpuName, ...]],
    link: HostLink,
) -> list[Part]:
    """The parts that are kept running here: all ranks of the learner as one, any other process by itself."""
    where = ("--join", str(joining.file.absolute()))
    role, stage = joining.role, STAGES[joining.role]
    if role == "learner":
        attendance = Attendance(link)

        def ranks() -> list[ProcessSpec]:
            meeting = attendance.meeting
            assert meeting is not None
            return roles.ranks_of(
                (*where, "--folder", str(folder)),
                folder,
                config,
                gpus,
                host=attendance.place,
                address=meeting.address,
                port=str(meeting.port),
            )

        return [Part(name="learner", stage=stage, specs=ranks, may_finish=True, others=attendance)]
    return [
        Part(
            name=spec.name,
            stage=stage,
            specs=partial(list, [spec]),
            # A process that leaves after the end of the run shows that the run has ended.
            may_finish=True,
        )
        for index, own in enumerate(gpus)
        for spec in [_spec(joining, config, folder, member, index, own)]
    ]


def _spec(
    joining: Joining,
    config: Config,
    folder: Path,
    member: str,
    index: int,
    gpus: tuple[GpuName, ...],
) -> ProcessSpec:
    """The process with this index, of any role but the learner's."""
    role = joining.role
    threads = config.rollout.threads if role == "rollout" else 1
    where = ("--join", str(joining.file.absolute()))
    given = joining.drain_seconds
    drain = () if given is None else ("--drain", f"{given:g}")
    return roles.of_role(
        where, folder, role, f"{role}-{member}-{index}", drain, threads=threads, gpus=gpus
    )
