"""Calls of an objective, which end the run where one of the user's own has a bug.

Another start of the learner would come back to the same step and end there again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...common.errors import RunFailedError, TandemError
from ...common.memory import is_out_of_memory
from ..rows.rows import Rows
from .base import REGISTRY, Objective, Sums


def loss_of(objective: Objective, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
    """See :meth:`Objective.loss`; a sum of the user's own may also be a number.

    Raises:
        RunFailedError: an objective of the user's own raises an exception, or what it returns isn't a loss with a
            gradient, or has a sum that isn't one number.
    """
    if objective.settings.name in REGISTRY:
        return objective.loss(rows, scalars)
    step = int(scalars["step"])
    with _ending_the_run(objective, step):
        returned: Any = objective.loss(rows, scalars)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _failure(objective, step, f"it returned {_shown(returned)}, not a loss and its sums")
    loss, sums = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _failure(objective, step, f"its loss is {_shown(loss)}, not a tensor of one number")
    if not loss.requires_grad:
        raise _failure(
            objective,
            step,
            "its loss has no gradient: it must come from rows.logprobs or rows.entropy, without detach() and item()",
        )
    if not isinstance(sums, Mapping):
        raise _failure(objective, step, f"its sums are {_shown(sums)}, not a dict of numbers")
    numbers: Sums = {}
    for name, value in sums.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise _failure(objective, step, f"its sum {name!r} can't be called so: give it a name")
        if isinstance(value, int | float):
            numbers[name] = loss.new_tensor(value, dtype=torch.float64)
        elif isinstance(value, Tensor) and value.numel() == 1:
            numbers[name] = value.detach().reshape(())
        else:
            what = f"its sum {name!r} is {_shown(value)}, not one number"
            raise _failure(objective, step, what)
    return loss.reshape(()), numbers


def statistics_of(objective: Objective, rows: Rows, step: int) -> dict[str, float]:
    """See :meth:`Objective.statistics`.

    Raises:
        RunFailedError: those of an objective of the user's own can't be computed, or aren't numbers.
    """
    if objective.settings.name in REGISTRY:
        return {name: float(value) for name, value in objective.statistics(rows).items()}
    with _ending_the_run(objective, step):
        return {name: float(value) for name, value in objective.statistics(rows).items()}


@contextmanager
def _ending_the_run(objective: Objective, step: int) -> Iterator[None]:
    try:
        yield
    except (TandemError, torch.AcceleratorError):
        # They say themselves whether another start can help; what a device has can be mended by one.
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = f"{type(error).__name__}: {error}{_place(objective, error)}"
        raise _failure(objective, step, what) from error


def _failure(objective: Objective, step: int, what: str) -> RunFailedError:
    return RunFailedError(
        f"learner.objective.name={objective.settings.name} failed at step {step}: {what}. Mend it and start the run "
        f"again, which goes on at this step"
    )


def _place(objective: Objective, error: BaseException) -> str:
    """The last line of the user's package that led to an error; empty if none did."""
    package = re.split("[.:]", objective.settings.name)[0]
    place, step = "", error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            place = f" ({frame.f_code.co_filename}, line {step.tb_lineno})"
        step = step.tb_next
    return place


def _shown(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    )
