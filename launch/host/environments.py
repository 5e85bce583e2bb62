"""Looks whether the environments of a config can be loaded, before anything is started."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from ...common.config.environments import (
    RENDERERS,
    AnyEnvironment,
    AppWorldEnvironment,
    VerifiersEnvironment,
)
from ...common.errors import ConfigError
from ...common.plain import read_object

if TYPE_CHECKING:
    from ...common.config import Config

SECONDS = 90.0
"""Time for one environment to be loaded, at most; where ``environments.reset_seconds`` is longer, its process has
that, and :data:`MORE_SECONDS` go on top."""
MORE_SECONDS = 30.0
FORMS = ("text", "tools", "agent")
"""Forms that are loaded in processes of ours."""


def _check_program(name: str, spec: AnyEnvironment) -> None:
    """Looks whether the program of a foreign environment is there, whose episodes would else all fail."""
    if isinstance(spec, VerifiersEnvironment):
        key, program = "python", spec.python
        way_out = "name the Python of a virtual environment that has verifiers"
    elif isinstance(spec, AppWorldEnvironment):
        key, program = "command", next(iter(shlex.split(spec.command)), "")
        way_out = "begin it with a program of a virtual environment that has appworld"
        if "{port}" not in spec.command:
            raise ConfigError(
                f"environments.use.{name}.command has no {{port}}: each episode's server needs one of its own"
            )
    else:
        return
    if shutil.which(program) is None:
        raise ConfigError(
            f"environments.use.{name}.{key} names {program!r}, which is no program that can be run here: {way_out}"
        )


def check_environments(config: Config) -> None:
    """Loads each environment once, in a process of its own, and looks for the programs of foreign ones.

    Raises:
        ConfigError: one can't be loaded; the message says which, why, and what to do.
    """
    settings = config.environments
    if settings.use and settings.tools.startswith(RENDERERS):
        from ...rollout.endpoint.families import config_of

        config_of(settings.tools.removeprefix(RENDERERS))
    if settings.servers:
        for name, spec in settings.use.items():
            _check_program(name, spec)
    use = {
        name: spec.model_dump(mode="json")
        for name, spec in settings.use.items()
        if spec.form in FORMS
    }
    if not use or not settings.servers:
        return
    bounds = {
        "reset_seconds": settings.reset_seconds,
        "step_seconds": settings.step_seconds,
        "episode_seconds": settings.episode_seconds,
        "memory_mb": settings.memory_mb,
    }
    seconds = max(SECONDS, settings.reset_seconds + MORE_SECONDS) * len(use)
    asked = json.dumps({"use": use, "bounds": bounds, "path": [os.getcwd()]})
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem.rollout.environments.checking"],
            input=asked.encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the environments {', '.join(use)} weren't loaded within {seconds:.0f} s"
        ) from None
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    if done.returncode:
        raise ConfigError(f"the environments {', '.join(use)} can't be checked: {' '.join(last)}")
    found = read_object(done.stdout, "the check of the environments", ConfigError)
    for name, why in found.items():
        raise ConfigError(
            f"environments.use.{name}.target={use[name]['target']} can't be loaded: {why}"
        )
