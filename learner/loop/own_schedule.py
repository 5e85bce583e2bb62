"""A user's own learning-rate schedule: its factors for all steps, computed before the run begins.

The function is called in a process of its own, which ends when the table is made. So a mistake in it is reported
before anything is trained, and no process of the run imports its module. The same process computes the
table before the start, when the number of steps is known from the settings, and for the learner.
"""

from __future__ import annotations

import json
import logging
import numbers
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError, DataError
from ...common.import_path import load

log = logging.getLogger("tandem.learner")

KEY = "learner.optimizer.schedule"
SECONDS = 60
"""Time to import the function's module and to compute the table; then the kernel ends the process."""


def check(path: str, key: str = KEY) -> None:
    """Imports the function in a process of its own, and calls nothing.

    Raises:
        ConfigError: there is no such function, or its module can't be imported.
    """
    _ask(path, 1, 0, key)


def factors(path: str, first: int, total: int, key: str = KEY) -> list[float]:
    """The factors of ``lr`` for the steps from ``first`` to ``total``.

    Args:
        path: import path of ``function(step, total_steps)``, both whole numbers, steps from 1.
        first: the first step after the warm-up.
        total: number of steps of the run.
        key: the setting that names the function, for errors.

    Raises:
        ConfigError: the function can't be imported, raised, took too long, or returned something other
            than a finite number from 0 on, or two numbers for one step. The message names the step.
    """
    found = _ask(path, first, total, key)
    if len(found) != max(0, total - first + 1):
        raise ConfigError(f"{key}={path}: its process has computed {len(found)} factors")
    return found


def kept(file: Path, path: str, first: int, made: Sequence[float], key: str = KEY) -> None:
    """Keeps the table in the run's folder, or compares it with the one that is kept.

    Args:
        file: ``schedule.json`` or ``critic-schedule.json``.
        path: import path of the function.
        first: the step of the first factor.
        made: the factors.
        key: the setting that names the function, for messages.

    Raises:
        ConfigError: the same function gave other factors for as many steps when the run began.
        DataError: the file can't be read.
    """
    from ...common import disk
    from ...common.plain import read_object
    from ...common.run_folder import write_atomic

    table = {
        "schedule": path,
        "first_step": first,
        "last_step": first + len(made) - 1,
        "factors": list(made),
    }
    if file.exists():
        way_out = "remove it, and it is written again"
        before = read_object(file.read_bytes(), str(file), DataError, way_out)
        if before == table:
            return
        old = before.get("factors")
        same = all(before.get(name) == table[name] for name in table if name != "factors")
        if same and isinstance(old, list):
            pairs = enumerate(zip(old, made, strict=False), first)
            step, (was, now) = next((s, pair) for s, pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"{key}={path} is {now!r} at step {step} and was {was!r} when the run began ({file}): "
                f"put the function back as it was, or give the new one another name"
            )
    disk.persist(file, lambda: write_atomic(file, json.dumps(table) + "\n"))
    if made:
        middle = len(made) // 2
        log.info(
            f"{key}={path}: factor {made[0]:.6g} at step {first}, {made[middle]:.6g} at step "
            f"{first + middle}, {made[-1]:.6g} at step {table['last_step']}; all are in {file}"
        )


def _ask(path: str, first: int, total: int, key: str) -> list[float]:
    """Calls the function in a process of its own; see :func:`main` for its answer."""
    secret = "TANDEM_REDIS_PASSWORD"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, path, str(first), str(total), key],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS + 10,
            env={name: value for name, value in os.environ.items() if name != secret},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(_too_long(f"{key}={path}")) from None
    if done.returncode == -signal.SIGALRM:
        raise ConfigError(_too_long(f"{key}={path}"))
    try:
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise ConfigError(str(answer["error"]))
        return [float(factor) for factor in answer["factors"]]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{key}={path}: the process that computes its factors ended with exit code "
            f"{done.returncode} and without an answer; does its module end the interpreter?"
        ) from None


def _too_long(named: str) -> str:
    return (
        f"{named}: its module wasn't imported and its factors computed in {SECONDS} s: the function "
        f"should do no more than compute a number"
    )


# --- in the process of its own ----------------------------------------------------------------------


def table(named: str, function: Callable[[int, int], Any], first: int, total: int) -> list[float]:
    """Calls the function for every step, and once more in the opposite order.

    Args:
        named: the setting and the function's path, for errors.
        function: the function.
        first: the first step.
        total: the last step.

    Raises:
        ConfigError: as :func:`factors`.
    """
    made = [_factor(named, function, step, total) for step in range(first, total + 1)]
    for step in range(total, first - 1, -1):
        again, before = _factor(named, function, step, total), made[step - first]
        if again != before:
            raise ConfigError(
                f"{named} returned {before!r} and then {again!r} at step {step} of {total}: a "
                f"resumed run needs the same rates, so it must depend on its arguments alone"
            )
    return made


def _factor(named: str, function: Callable[[int, int], Any], step: int, total: int) -> float:
    at = f"{named}, at step {step} of {total},"
    try:
        value = function(step, total)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{at} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        ) from None
    wanted = "it should return the factor of learner.optimizer.lr, a finite number from 0 on"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ConfigError(f"{at} returned {value!r:.80}: {wanted}")
    factor = float(value)
    if not 0 <= factor < float("inf"):
        raise ConfigError(f"{at} returned {factor!r}: {wanted}")
    return factor


def main(arguments: Sequence[str]) -> int:
    """Prints ``{"factors": […]}`` or ``{"error": …}``, for the path, the first and last step, and the setting."""
    path, first, total, key = arguments[0], int(arguments[1]), int(arguments[2]), arguments[3]
    signal.alarm(SECONDS)
    # What the user's module prints isn't the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        function = load(path, key=key)
        if not callable(function):
            raise ConfigError(f"{key}={path} isn't a function: {function!r:.200}")
        answer: dict[str, Any] = {"factors": table(f"{key}={path}", function, first, total)}
    except ConfigError as error:
        answer = {"error": str(error)}
    json.dump(answer, answers)
    answers.flush()
    # Threads that the module has started don't delay the end.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
