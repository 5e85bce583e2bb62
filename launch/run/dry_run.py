"""``tandem start --dry-run``: the plan of a run, and what this machine lacks for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import TandemError
from ...common.run_folder import RunFolder
from ..host import redis_server
from ..host.requirements import disk_wanted, examine, missing
from ..plan import planning, text
from ..plan.hardware import machine
from ..plan.node import node
from ..plan.placement import Placement, bound_for_one_host, gpus_left_idle, gpus_needed, workers_of
from ..plan.planning import Plan, Planned
from ..wording import human, shown
from .opened.opening import Opening, free_name, open_preset, open_run
from .opened.presets import Preset
from .processes import roles as started
from .processes.parts import ProcessSpec, command_of
from .several.placing import begun_with, folder_of, of_plan

if TYPE_CHECKING:
    from ...common.config import Config

PORT = "PORT"
"""Placeholder for a port that is chosen when a process starts."""
CHECKPOINTS = {
    "auto": "all ranks write into the run's folder if every host sees it, else rank 0 gathers them",
    "shared": "all ranks write into the run's folder, which every host must see under this path",
    "gathered": "rank 0 gathers what ranks on other hosts hold, over the network",
}
"""Who writes checkpoints where the learner is on several hosts, by ``learner.checkpoints``."""
PARENT = "$$"
"""Placeholder for the pid whose end ends a process; in a shell it expands to the shell's own."""


def dry_run(words: Sequence[str], *, fresh: bool, offline: bool) -> int:
    """Prints every process with its GPUs, command and memory; starts and writes nothing.

    The exit code is 0 even if this machine couldn't run the preset: the plan says why.

    Raises:
        ConfigError: no machine could run these settings.
        DataError: the run's folder belongs to another run or is damaged.
    """
    preset, overrides = open_preset(words, offline=offline)
    earlier: list[Path] = []
    known, aside = begun_with(preset, overrides), None
    if known is not None and fresh:
        # The folder of all stages is moved, and not that of each.
        known, aside = None, free_name(RunFolder(folder_of(preset, overrides)).path)
    for label, run, own in of_plan(preset, [*(known or []), *overrides]):
        if label:
            print(f"# stage {label}")
        opening = open_run(run, own, fresh=fresh, offline=offline and not label)
        if aside is not None and opening.set_aside is not None:
            opening = replace(opening, set_aside=aside / label)
        _print(run, opening, earlier)
        earlier.append(opening.folder.path)
    return 0


def _print(preset: Preset, opening: Opening, earlier: Sequence[Path]) -> None:
    config = opening.config
    here = machine()
    lacking = missing(examine(config, here, opening.folder.path, earlier=earlier))
    paper = node(here, needed=gpus_needed(config))
    placement = planning.on_paper(config, here, paper)
    plan = planning.make(preset.name, config, paper, placement)
    lines = [f"plan of {plan.name}; nothing is started or written", ""]
    lines.append(f"this machine: {here}")
    if lacking:
        lines.append("it couldn't run this preset:")
        lines += [f"  - {finding.line()}" for finding in lacking]
    else:
        lines.append("it could run this preset")
    if idle := gpus_left_idle(config, here):
        lines.append(f"warning: {idle}")
    if alone := bound_for_one_host(config):
        lines.append(f"note: {alone}")
    if plan.problems:
        lines += ["on paper", *(f"  - {one}" for one in plan.problems)]
    lines += ["", *_places(plan, opening, disk_wanted(config))]
    lines += ["", *processes(plan, opening.folder, placement)]
    print("\n".join(lines))


def specs(config: Config, folder: RunFolder, placement: Placement) -> list[ProcessSpec]:
    """How the job would start each process, in the plan's order."""
    redis = []
    if config.replay.redis_url is None:
        redis = [started.redis(folder, _redis_program(), str(folder.redis / "redis.conf"))]
    return [
        *redis,
        *started.learner(config, folder, placement, PORT),
        *started.rollout(config, folder, placement),
        *started.environments(config, folder),
        *started.reward(config, folder),
        *started.trackers(config, folder),
        *started.callbacks(config, folder),
    ]


def _redis_program() -> str:
    try:
        return str(redis_server.find().path)
    except TandemError:
        return "redis-server"


def command_line(spec: ProcessSpec) -> str:
    """A command line, with the variables that are added to its environment."""
    particular = {"OMP_NUM_THREADS": str(spec.threads), **spec.environment}
    before = [f"{key}={shlex.quote(value)}" for key, value in particular.items()]
    words = command_of(spec, PARENT)
    return " ".join([*before, *(w if w == PARENT else shlex.quote(w) for w in words)])


def processes(plan: Plan, folder: RunFolder, placement: Placement) -> list[str]:
    """Every process with its GPUs, memory and command."""
    lines = ["processes"]
    if plan.device == "cuda":
        lines[0] += f" (memory on paper, for GPUs like {plan.node.kind}, "
        lines[0] += f"{plan.node.memory / (1 << 30):.3g} GB)"
    for planned, spec in zip(plan.processes, specs(plan.config, folder, placement), strict=True):
        about = ", ".join(_about(plan, planned, spec.threads))
        lines.append(f"  {planned.name:<11} {about}")
        lines.append(f"    {command_line(spec)}")
    lines += _elsewhere(plan.config)
    lines.append(
        f"  {PORT} is chosen at every start; {PARENT} is the supervisor's pid, with which a "
        f"process ends"
    )
    return lines


def _elsewhere(config: Config) -> Iterable[str]:
    """The processes that other hosts must bring."""
    each = config.ranks_per_host
    for host in range(1, config.learner.hosts):
        first, last = host * each, (host + 1) * each - 1
        named = f"learner-{first}" if first == last else f"learner-{first} to learner-{last}"
        yield f"  {named:<11} on host {host + 1} of the learner: the run waits for it"
        yield "    tandem join FILE --role learner"
    if not workers_of(config) and config.learner.source == "ledger":
        yield "  rollout workers on other hosts: there are none here, and without one no step is trained"
        yield "    tandem join FILE --role rollout"


def _about(plan: Plan, planned: Planned, threads: int) -> Iterable[str]:
    yield from _what(plan.config, planned)
    if planned.gpus:
        yield f"GPU{'s' * (len(planned.gpus) > 1)} {', '.join(map(str, planned.gpus))}"
    else:
        yield "no GPU"
    yield f"{threads} thread{'s' * (threads > 1)}"
    holding = planned.holding
    if holding is None:
        yield "memory not known"
    elif holding.device == "cuda":
        each = " each" if len(planned.gpus) > 1 else ""
        yield f"{human(holding.total)} on the GPU{each}, {human(holding.host)} of main memory"
    else:
        yield f"{human(holding.total)} of main memory"


def _what(config: Config, planned: Planned) -> Iterable[str]:
    """The engine of a rollout worker, the ZeRO stage of a learner's rank."""
    if planned.engine is not None:
        name = {"torch": "the torch engine", "vllm": "vLLM"}.get(planned.engine, planned.engine)
        yield f"{name} in {config.engine_dtype}"
    if planned.zero_stage is not None:
        stage = config.learner.zero_stage
        same = planned.zero_stage == stage
        why = "" if same else f" (zero_stage={stage} divides nothing on one float32 rank)"
        yield f"ZeRO-{planned.zero_stage} in {config.model.dtype}{why}"


def _places(plan: Plan, opening: Opening, disk: int) -> list[str]:
    """Where files, sockets and weights go."""
    config, folder = plan.config, opening.folder
    kind = {"new": "new", "resumed": "is resumed", "finished": "is finished: nothing would run"}
    state = kind[opening.kind.value]
    if opening.set_aside is not None:
        state = f"new; the old one would become {shown(opening.set_aside)}"
    url = config.replay.redis_url
    bind = config.launch.bind
    rows = [
        ("run folder", f"{shown(folder.path)} ({state})"),
        ("logs", f"{shown(folder.logs)}/<process>.log"),
        ("Redis", _redis(plan, url)),
        ("ZeroMQ", f"{bind}, ports are chosen at the start and announced in Redis"),
        ("weights", f"{text.transport(plan)}, bound to {config.weights_interface}"),
        ("ranks", f"meet at {started.meeting_address(config)}:{PORT}"),
        ("checkpoints", CHECKPOINTS[config.learner.checkpoints]),
        ("model", text.model(plan)),
        ("disk", f"up to {human(disk)} in the run's folder"),
    ]
    if config.learner.hosts == 1:
        rows.pop(6)
    if config.learner.ranks == 1:
        rows.pop(5)
    return ["where things go", *_table(rows)]


def _redis(plan: Plan, url: str | None) -> str:

    if url is not None:
        return f"{redis_server.without_password(url)} (yours; not asked now)"
    limit = human(plan.config.replay.maxmemory_mb << 20)
    return f"{plan.config.launch.bind}:{PORT}, its own, at most {limit}, kept in the run's folder"


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows]
