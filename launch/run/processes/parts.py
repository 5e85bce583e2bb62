"""A part of a run: the processes that live and die together, how they start and how they end.

A part is redis-server, a reward pool, a rollout worker, or all ranks of the learner. Each process has
a session of its own, so that Ctrl-C in the terminal reaches only the supervisor, and its output is
appended to ``logs/<name>.log``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Protocol

from ...plan.hardware import GpuName
from .forked import Forked, Forks

REAP_SECONDS = 10.0
"""A killed process that is still there after this long is left behind, and the user is told."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
SPINS = "20000"
"""How often a thread of GNU's OpenMP looks for work before it sleeps, where nobody else needs its core: some 50 µs."""

PLACED = "TANDEM_PLACED"
"""Set for a process whose supervisor has chosen its GPUs, and holds them."""
PLACING_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""Variables by which torchrun and Slurm tell a process its place."""

Process = subprocess.Popen[bytes] | Forked
"""A process that was spawned, or one that another process of the run has forked."""


class Stage(IntEnum):
    """Parts are drained in this order: the learner checkpoints while Redis still answers."""

    LEARNER = 0
    ROLLOUT = 1
    ENVIRONMENTS = 2
    REWARD = 3
    TRACKERS = 4
    REDIS = 5


def seeing(gpus: Sequence[GpuName]) -> dict[str, str]:
    """Variables by which a process sees these GPUs and no other one."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start one process."""

    name: str
    """Also names its log, and the member in the registry."""
    arguments: tuple[str, ...]
    """Arguments of :mod:`tandem.launch.lifeline`: a tandem sub-command, or ``exec`` and a program."""
    log: Path
    """The file to which its output is appended."""
    threads: int = 1
    """CPU threads of numerical libraries."""
    alone: bool = False
    """Whether nobody else needs its cores while it computes, so that its threads may spin before they sleep."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the supervisor's own environment."""
    pass_fds: tuple[int, ...] = ()
    """File descriptors that it inherits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """Why a part has to end although its processes run: of what other hosts have told."""

    why: str
    """A sentence's beginning, such as ``learner-1 on nodeb ended with exit code 1``; empty: nothing to tell."""
    exit: int | None
    """The exit code for which it counts as a death of the part; None = it doesn't count."""
    gently: bool = False
    """Whether the processes are asked to end, and not killed."""


class OtherHosts(Protocol):
    """What a part asks whose processes live and die with those on other hosts. No call may wait."""

    def may_start(self) -> bool:
        """Whether it may start now; called before every start, until it may."""

    def interruption(self) -> Interruption | None:
        """Why it has to end now; called at every look while its processes run."""

    def ended(self, spec: ProcessSpec, code: int) -> bool:
        """One of its processes has ended by itself; returns whether this counts as a death here."""


@dataclass(slots=True, kw_only=True)
class Part:
    """Processes that live and die together."""

    name: str
    """``learner``, ``rollout-0``, ``reward-0`` or ``redis``."""
    stage: int
    """Parts are drained in the order of their stages."""
    specs: Callable[[], Sequence[ProcessSpec]]
    """Called at every start, because a learner takes a new port each time."""
    on_start: Callable[[list[int]], None] | None = None
    """Called with the process ids after every start."""
    before_end: Callable[[], None] | None = None
    """Called once before the part is asked to end, for a last exchange with it. If the part is dead
    at that moment, it is started once more for this, unless it can't be kept alive."""
    may_finish: bool = False
    """Whether its exit with code 0 can mean that the run has finished."""
    dispensable: bool = False
    """Whether the run goes on without it when it dies: the user is told once, and it isn't restarted."""
    comes_back: bool = False
    """Whether a dispensable part is restarted all the same, ``launch.max_failures`` times at most."""
    others: OtherHosts | None = None
    """The hosts on which other processes live and die with these; None = there are none."""
    processes: list[tuple[ProcessSpec, Process]] = field(default_factory=list)
    """Processes that are running or not yet reaped."""
    deaths: int = 0
    """Deaths since progress was last seen."""
    progress_at_death: int = -1
    """Steps journalled when it last died."""
    due: float | None = None
    """Monotonic time of its next start; None while it runs."""
    early: dict[str, Process] = field(default_factory=dict)
    """Processes that were begun before the run was there, by name; see :meth:`begin_early`."""

    def begin_early(self, config: str, forking: Sequence[Part] = ()) -> None:
        """Begins the processes of its first start: until then they load their libraries, which takes seconds.

        Args:
            config: the run's config as JSON. It says which libraries those are.
            forking: parts whose processes this part's only process is to fork; see :mod:`.forked`.
        """
        forks = _forks(forking) if forking else None
        if forks is None:
            for part in forking:
                part.begin_early(config)
        told, descriptors = forks.for_child() if forks is not None else (None, ())
        try:
            for spec in self.specs():
                process = _popen(spec, "early", stdin=subprocess.PIPE, descriptors=descriptors)
                self.early[spec.name] = process
                _tell(process, json.dumps({"config": config, "forks": told}))
        finally:
            if forks is not None:
                forks.given()

    def awaits_fork(self) -> bool:
        """Whether one of its processes is still to be forked by another part's. Forgets those that won't be; doesn't wait."""
        for name, process in list(self.early.items()):
            if isinstance(process, Forked):
                there = process.is_there()
                if there is None:
                    return True
                if not there:
                    del self.early[name]
                    process.let_go()
        return False

    def end_early(self) -> None:
        """Ends those that were begun early and never started."""
        for process in self.early.values():
            if isinstance(process, Forked) and not process.is_there():
                process.let_go()
                continue
            process.send_signal(signal.SIGKILL)
            process.wait(REAP_SECONDS)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self.early.clear()

    def start(self) -> None:
        """Starts its processes; raises ``OSError`` if one can't be started."""
        self.due = None
        for spec in self.specs():
            self.processes.append((spec, _spawn(spec, self.early.get(spec.name))))
            # Only now: without space for its log it waits for the next attempt.
            self.early.pop(spec.name, None)
        if self.on_start is not None:
            self.on_start([process.pid for _, process in self.processes])

    def alive(self) -> bool:
        """Whether any of its processes is running."""
        return any(exit_of(process) is None for _, process in self.processes)

    def running(self) -> list[ProcessSpec]:
        """Returns the processes that are running."""
        return [spec for spec, process in self.processes if exit_of(process) is None]

    def terminate(self) -> None:
        """Sends SIGTERM to its processes but not to their children, which they end themselves."""
        for _, process in self.processes:
            if exit_of(process) is None:
                process.send_signal(signal.SIGTERM)

    def reap(self, say: Callable[[str], None]) -> None:
        """Kills what is left of its process groups, and waits for its processes."""
        for _, process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for spec, process in self.processes:
            try:
                process.wait(REAP_SECONDS)
            except subprocess.TimeoutExpired:
                # It is inside a kernel call that doesn't return: a dead disk, a wedged GPU.
                say(
                    f"{spec.name} (pid {process.pid}) was killed but is still there after "
                    f"{REAP_SECONDS:.0f} s: look at its disk and its GPU (dmesg)"
                )
        self.processes = []


def command_of(spec: ProcessSpec, parent: str, *kind: str) -> list[str]:
    """The command line of a process; it ends when process ``parent`` does."""
    # -P: a file of the user's working directory must not shadow a library's module.
    return [sys.executable, "-P", "-m", "tandem.launch.lifeline", parent, *kind, *spec.arguments]


def environment_of(spec: ProcessSpec) -> dict[str, str]:
    """The variables that are added to the environment of a process."""
    threads = dict.fromkeys(THREAD_VARIABLES, str(spec.threads))
    more = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", PLACED: "1"}
    if spec.threads > 1:
        # By default OpenMP's threads spin while they have no work, on cores that other processes of the run need.
        if spec.alone and "OMP_WAIT_POLICY" not in os.environ:
            # With so short a spin an update on two cores takes a fifth less than if they slept at once. Beside a busy
            # worker it would take a sixth of the worker's time.
            more["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPINS)
        more["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    return {**threads, **more, **spec.environment}


def _forks(parts: Sequence[Part]) -> Forks | None:
    """Has the processes of parts forked by the one that is begun next; None where the system can't do that."""
    specs = {spec.name: (part, spec) for part in parts for spec in part.specs()}
    here = str(os.getpid())
    try:
        forks = Forks({name: command_of(spec, here, "early") for name, (_, spec) in specs.items()})
    except OSError:
        return None
    for name, process in forks.processes.items():
        specs[name][0].early[name] = process
    return forks


def _spawn(spec: ProcessSpec, early: Process | None = None) -> Process:
    """Starts a process, or lets one go on that was begun early."""
    with open(spec.log, "ab", buffering=0) as log:
        with contextlib.suppress(OSError):  # On a full disk this line is left out.
            log.write(f"=== {now()} {spec.name}\n".encode())
        if early is not None:
            # Its port may be another one by now.
            _tell(early, json.dumps({"words": spec.arguments, "log": str(spec.log)}))
            assert early.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                early.stdin.close()
            return early
        return _popen(spec, stdin=subprocess.DEVNULL, output=log)


def _tell(process: Process, line: str) -> None:
    """Writes a line to a process; one that has died is seen as any other that dies."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def _popen(
    spec: ProcessSpec,
    *kind: str,
    stdin: int,
    output: IO[bytes] | int = subprocess.DEVNULL,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    environment = {
        key: value
        for key, value in os.environ.items()
        # Roles read the password from the join file; they need not inherit it. A rank is placed by its supervisor,
        # whatever a scheduler says of the supervisor itself.
        if key != "TANDEM_REDIS_PASSWORD" and key not in PLACING_VARIABLES
    }
    environment.update(environment_of(spec))
    return subprocess.Popen(
        command_of(spec, str(os.getpid()), *kind),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
        pass_fds=(*spec.pass_fds, *descriptors),
    )


def exit_of(process: Process) -> int | None:
    """Exit code (negative: signal) of a process that has ended, without reaping it.

    While the process is a zombie, the id of its process group can't be reused, so that
    :meth:`Part.reap` can still end what it left behind.
    """
    if process.returncode is not None:
        return process.returncode
    try:
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if status is None:
        return None
    killed = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return -status.si_status if killed else status.si_status


def signal_name(code: int) -> int | str:
    """An exit code as it is recorded: signals by name."""
    return signal.Signals(-code).name if code < 0 else code


def described(code: int) -> str:
    """How a process ended, as a predicate for a sentence."""
    return f"was killed by {signal_name(code)}" if code < 0 else f"ended with exit code {code}"


def last_lines(path: Path, count: int = 12) -> str:
    """The last lines of a log, indented."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"  ({error.strerror})"
    return "\n".join(f"  | {line}" for line in lines[-count:])


def now() -> str:
    """Local time with its offset, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
