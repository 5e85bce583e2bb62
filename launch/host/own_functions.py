"""Imports the user's own objective or reward functions before a run starts, in a process of its own.

So a path that leads nowhere is refused while nothing has been made, and no process of the run's supervision
imports a module of the user's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from ...common.errors import ConfigError
from ...reward.graders.zygote_link import KEPT_ENVIRONMENT

SECONDS = 120
"""Time to import the modules, of which an objective's imports torch; then the kernel ends the process."""

Kind = Literal["objective", "rewards"]
Asked = tuple[str, tuple[str, ...]]
"""A reward function's form, text or conversation, and the arguments that it must be given."""
KEYS: dict[Kind, str] = {"objective": "learner.objective.name", "rewards": "reward.components.name"}


@lru_cache
def check(kind: Kind, paths: tuple[str, ...]) -> tuple[Asked, ...]:
    """Imports functions as the processes of the run that call them will, and calls none.

    The runs of a sweep and the stages of a preset, which have the same ones, ask once.

    Args:
        kind: what they are, which says where their modules are looked for.
        paths: their import paths.

    Returns:
        Of reward functions what each asks for.

    Raises:
        ConfigError: there is no such function, it can't be called as it will be, or its module can't be imported.
    """
    named = f"{KEYS[kind]}={', '.join(paths)}"
    secret = "TANDEM_REDIS_PASSWORD"
    kept = [
        name
        for name in os.environ
        if (name in KEPT_ENVIRONMENT if kind == "rewards" else name != secret)
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, kind, *paths],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS + 10,
            env={name: os.environ[name] for name in kept},
            check=False,
        )
        ended = done.returncode
    except subprocess.TimeoutExpired:
        ended = -signal.SIGALRM
    if ended == -signal.SIGALRM:
        raise ConfigError(
            f"{named}: what it names wasn't imported in {SECONDS} s: let its module do less while it is imported"
        )
    try:
        answer = json.loads(done.stdout)
        error, asked = answer["error"], answer["asked"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{named}: the process that imports what it names ended with exit code {ended} and without an "
            f"answer: does its module end the interpreter?"
        ) from None
    if error is not None:
        raise ConfigError(str(error))
    return tuple((form, tuple(names)) for form, names in asked)


def main(arguments: Sequence[str]) -> int:
    """Prints ``{"error": why, "asked": [[form, arguments], …]}``, with null for no error, for the kind and the paths."""
    kind, *paths = arguments
    signal.alarm(SECONDS)
    # What the user's module prints isn't the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    error = None
    asked = []
    try:
        if kind == "objective":
            from ...learner.objectives.base import imported

            for path in paths:
                imported(path)
        else:
            from ...reward.graders import user_functions

            for path in paths:
                function = user_functions.load(path)
                asked.append((user_functions.form_of(function), user_functions.needed(function)))
    except ConfigError as refused:
        error = str(refused)
    json.dump({"error": error, "asked": asked}, answers)
    answers.flush()
    # Threads that the module has started don't delay the end.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
