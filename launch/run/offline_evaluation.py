"""Accuracy before and after an offline run, by ``tandem evaluate`` in a process of its own, one after the other."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ...common.errors import DataError
from ...common.parts import PartedLines, read_parts
from ...common.plain import read_object
from ...common.run_folder import RunFolder
from .processes.parts import Part, ProcessSpec, Stage, seeing
from .processes.supervision import Outcome, Supervisor

if TYPE_CHECKING:
    from ...common.config import Config
    from ..plan.placement import Placement


class Stopped(Exception):
    """Somebody has stopped the evaluation.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def evaluate(
    config: Config,
    folder: RunFolder,
    placement: Placement,
    last_step: int,
    known: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Computes the results of every held-out set that the config asks for and that aren't known yet.

    What an earlier command has computed with these settings, before it was stopped, stays.

    Args:
        config: the run's config.
        folder: its folder.
        placement: where the learner was, whose GPUs are free now.
        last_step: the step of the run's final model.
        known: results of a worker that evaluated during the run.
        say: prints a line for the user.

    Raises:
        Stopped: somebody stopped it; the same run goes on with what is missing.
        TandemError: it failed.
    """
    settings, sets = config.evaluate, config.data.evaluate
    if not sets:
        return []
    models = []
    for when, model, step in (
        *([("before", config.model.path, 0)] if settings.at_start else []),
        *([("after", str(folder.model), last_step)] if settings.at_end else []),
    ):
        done = {one["set_name"] for one in known if one["step"] == step}
        models.append((when, model, step, [one.name for one in sets if one.name not in done]))
    if names := dict.fromkeys(name for *_, wanted in models for name in wanted):
        say(f"evaluating on {', '.join(names)}")
    results = []
    for when, model, step, wanted in models:
        # The first set's file has the name that it had when it was the only one that was evaluated.
        files = {name: "" if name == sets[0].name else f"-{name}" for name in wanted}
        outs = {
            name: folder.logs
            / f"evaluate-{when}{_in_a_name(own)}-{_digest(config, step, own)}.json"
            for name, own in files.items()
        }
        missing = {name: out for name, out in outs.items() if not out.exists()}
        if missing:
            words = ["evaluate", "--run", str(folder.path), "--model", model]
            for name, out in missing.items():
                words += ["--set", name, "--out", str(out)]
            spec = ProcessSpec(
                name=f"evaluate-{when}",
                arguments=tuple(words),
                log=folder.logs / f"evaluate-{when}.log",
                threads=config.rollout.threads,
                environment=environment(placement),
            )
            # One after the other: an engine takes the memory of its GPUs for itself.
            _run(config, spec, list(missing.values()), say)
        results += [
            {
                **read_object(out.read_bytes(), str(out), DataError, f"remove {out}"),
                "step": step,
                "set_name": name,
                "member": "tandem evaluate",
            }
            for name, out in outs.items()
        ]
    return results


def record(folder: RunFolder, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Appends results to the run's metrics, as the learner records those of a worker; returns the ids of new ones.

    Args:
        folder: the run's folder.
        results: of :func:`evaluate`.
    """
    from ...learner.loop.evaluations import record_of
    from ...replay.evaluating.evaluations import result_of

    before, term = set(), 0
    for row in read_parts(folder.metrics):
        before.add(row.get("eval/id"))
        term = max(term, row.get("term", 0))
    every = [
        result_of(
            found,
            id_=f"{found['set_name']}@{found['step']}",
            set_name=found["set_name"],
            step=found["step"],
            member=found["member"],
        )
        for found in results
    ]
    made = [one for one in every if one.id not in before]
    if not made:
        return []
    lines = PartedLines(folder.metrics)
    for one in made:
        lines.write({**record_of(one), "term": term, "time": time.time()})
    lines.close()
    return [one.id for one in made]


def _in_a_name(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_.+-]+", "-", text)[:40]


def _digest(config: Config, step: int, name: str) -> str:
    """Tells a result from those of other settings, steps of the run and sets.

    Args:
        config: the run's config.
        step: of the model.
        name: of the set; empty for the first one.
    """
    sections = {"model", "data", "rollout", "evaluate", "reward", "environments"}
    told = config.model_dump_json(include=sections)
    return xxhash.xxh3_64_hexdigest(f"{step} {config.run.seed} {told}{name}".encode())[:8]


def environment(placement: Placement) -> Mapping[str, str]:
    """Variables by which an evaluation sees the GPUs of the learner's ranks, and no other one."""
    gpus = [gpu for rank in placement.learner for gpu in rank]
    return seeing(gpus)


def _run(
    config: Config,
    spec: ProcessSpec,
    outs: Sequence[Path],
    say: Callable[[str], None],
) -> None:
    with Supervisor(
        max_failures=1,
        backoff_seconds=config.launch.backoff_seconds,
        drain_seconds=5.0,
        say=say,
    ) as supervisor:
        supervisor.start(Part(name=spec.name, stage=Stage.ROLLOUT, specs=partial(list, [spec])))
        outcome = supervisor.run_until(lambda: all(out.exists() for out in outs))
    if outcome is not Outcome.FINISHED:
        raise Stopped(supervisor.signal_seen or signal.SIGHUP)
