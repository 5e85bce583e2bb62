"""Accuracy before and after an offline run, by ``tandem evaluate`` in a process of its own, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ...common.errors import DataError, TandemError
from ...common.plain import read_object
from ...common.run_folder import RunFolder
from ..wording import shown
from .processes.parts import Part, ProcessSpec, Stage, seeing
from .processes.supervision import Outcome, Supervisor

if TYPE_CHECKING:
    from ...common.config import Config
    from ..plan.placement import Placement


def evaluate(
    config: Config,
    folder: RunFolder,
    placement: Placement,
    last_step: int,
    known: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Computes the results that the config asks for and that aren't known yet.

    What an earlier command has computed with these settings, before it was stopped, stays.

    Args:
        config: the run's config.
        folder: its folder.
        placement: where the learner was, whose GPUs are free now.
        last_step: the step of the run's final model.
        known: results of a worker that evaluated during the run.
        say: prints a line for the user.

    Raises:
        TandemError: somebody stopped it.
    """
    settings, sets = config.evaluate, config.data.evaluate
    if not sets:
        return []
    name = sets[0].name
    done = {one["step"] for one in known if one["set_name"] == name}
    wanted = []
    if settings.at_start and 0 not in done:
        wanted.append(("before", config.model.path, 0))
    if settings.at_end and last_step not in done:
        wanted.append(("after", str(folder.model), last_step))
    if not wanted:
        return []
    say(f"evaluating on {name}")
    results = []
    # One after the other: an engine takes the memory of its GPUs for itself.
    for when, model, step in wanted:
        out = folder.logs / f"evaluate-{when}-{_digest(config, step)}.json"
        if not out.exists():
            spec = ProcessSpec(
                name=f"evaluate-{when}",
                arguments=(
                    *("evaluate", "--run", str(folder.path), "--model", model),
                    *("--set", name, "--out", str(out)),
                ),
                log=folder.logs / f"evaluate-{when}.log",
                threads=config.rollout.threads,
                environment=environment(placement),
            )
            _run(config, folder, spec, out, say)
        results.append(
            {
                **read_object(out.read_bytes(), str(out), DataError, f"remove {out}"),
                "step": step,
                "set_name": name,
                "member": "tandem evaluate",
            }
        )
    return results


def _digest(config: Config, step: int) -> str:
    """Tells a result from those of other settings, and of other steps of the run."""
    sections = {"model", "data", "rollout", "evaluate", "reward", "environments"}
    told = config.model_dump_json(include=sections)
    return xxhash.xxh3_64_hexdigest(f"{step} {config.run.seed} {told}".encode())[:8]


def environment(placement: Placement) -> Mapping[str, str]:
    """Variables by which an evaluation sees the GPUs of the learner's ranks, and no other one."""
    gpus = [gpu for rank in placement.learner for gpu in rank]
    return seeing(gpus)


def _run(
    config: Config, folder: RunFolder, spec: ProcessSpec, out: Path, say: Callable[[str], None]
) -> None:
    with Supervisor(
        max_failures=1,
        backoff_seconds=config.launch.backoff_seconds,
        drain_seconds=5.0,
        say=say,
    ) as supervisor:
        supervisor.start(Part(name=spec.name, stage=Stage.ROLLOUT, specs=partial(list, [spec])))
        outcome = supervisor.run_until(out.exists)
    if outcome is not Outcome.FINISHED:
        raise TandemError(
            f"stopped while evaluating; `tandem evaluate --run {shown(folder.path)}` makes up for it"
        )
