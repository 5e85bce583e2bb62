"""Accuracy before and after an offline run, by ``tandem evaluate`` in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...common.errors import DataError, TandemError
from ...common.plain import read_object
from ...common.run_folder import RunFolder
from ..wording import shown
from .processes.parts import Part, ProcessSpec, Stage
from .processes.supervision import Outcome, Supervisor

if TYPE_CHECKING:
    from ...common.config import Config


def evaluate(
    config: Config,
    folder: RunFolder,
    last_step: int,
    known: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Computes the results that the config asks for and that aren't known yet.

    Args:
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
    outputs = {folder.logs / f"evaluate-{when}.json": step for when, _, step in wanted}
    with Supervisor(
        max_failures=1,
        backoff_seconds=config.launch.backoff_seconds,
        drain_seconds=5.0,
        say=say,
    ) as supervisor:
        for (when, model, _), out in zip(wanted, outputs, strict=True):
            out.unlink(missing_ok=True)
            spec = ProcessSpec(
                name=f"evaluate-{when}",
                arguments=(
                    *("evaluate", "--run", str(folder.path), "--model", model),
                    *("--set", name, "--out", str(out)),
                ),
                log=folder.logs / f"evaluate-{when}.log",
                threads=config.rollout.threads,
            )
            supervisor.start(Part(name=spec.name, stage=Stage.ROLLOUT, specs=partial(list, [spec])))
        outcome = supervisor.run_until(lambda: all(out.exists() for out in outputs))
    if outcome is not Outcome.FINISHED:
        raise TandemError(
            f"stopped while evaluating; `tandem evaluate --run {shown(folder.path)}` makes up for it"
        )
    return [
        {
            **read_object(out.read_bytes(), str(out), DataError),
            "step": step,
            "set_name": name,
            "member": "tandem evaluate",
        }
        for out, step in outputs.items()
    ]
