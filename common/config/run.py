"""``run``: what the run is called, where its folder is and how long it goes on."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool

from ..import_path import is_import_path
from .section import Positive, Seconds, Section


def _listed(value: Any) -> Any:
    """A single path stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _callbacks(paths: tuple[str, ...]) -> tuple[str, ...]:
    for path in paths:
        if not is_import_path(path):
            raise ValueError(f"{path!r} isn't an import path: write package.module:function")
        if paths.count(path) > 1:
            raise ValueError(f"{path} is named twice")
    return paths


def _trained(steps: int) -> int:
    if steps < 1:
        raise ValueError(
            f"{steps} steps train nothing: set at least 1. `tandem evaluate` measures a model "
            f"without training it, and `tandem start --dry-run` looks at the settings alone"
        )
    return steps


class RunConfig(Section):
    """What the run is called, where its folder is and how long it goes on."""

    dir: Annotated[str, AfterValidator(os.path.expanduser)] | None = None
    """The run's folder; null = ``runs/<preset>``."""
    seed: int = 0
    """Seed of the order of problems, sampling noise and mixing."""
    steps: Annotated[int, AfterValidator(_trained)] | None = None
    """Number of ledger batches to train on. Set this or ``passes``."""
    passes: Positive | None = None
    """Number of passes over the data; the last step may then be short."""
    last_step: Positive | None = None
    """End the run after this step, with the schedule of all of them; null = the last one."""
    deterministic: StrictBool = False
    """Whether the same seed gives the same parameters bit for bit, whichever processes are killed on the
    way. It sets on-policy sampling, one group per engine batch and no group deadline. Holds for the
    torch engine on CPUs with the same number of threads and ranks; slower. One dependence on time is
    left: a text on which a grader hangs."""

    callbacks: Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_callbacks)] = ()
    """Functions of your own, by their import paths, that are called after each step and each evaluation, in a
    process of their own (``docs/hooks.md``)."""
    callback_seconds: Seconds = 60.0
    """Time for one call of a callback; then its process is killed, and a new one goes on."""
    callback_memory_mb: Annotated[int, Field(ge=256)] = 2048
    """Address space of the callbacks' process, MiB."""

    @property
    def end(self) -> int | None:
        """The step with which the run ends, if that is known from the settings."""
        known = [step for step in (self.steps, self.last_step) if step is not None]
        return min(known, default=None)
