"""Import paths, by which a config names a user's own functions and classes.

An import path is ``package.module:name``, where the name may be an attribute's
(``module:Class.method``), or ``package.module.name``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from .errors import ConfigError

_WORD = r"[^\W\d]\w*"
_PATH = re.compile(
    rf"(?P<module>{_WORD}(?:\.{_WORD})*)(?::(?P<name>{_WORD}(?:\.{_WORD})*)|\.{_WORD})"
)


def is_import_path(text: str) -> bool:
    """Whether a name is an import path; built-in names have neither dot nor colon.

    >>> [is_import_path(text) for text in ("mine.rewards:short", "mine.short", "luffy", "a b:c")]
    [True, True, False, False]
    """
    return _PATH.fullmatch(text) is not None


def split_path(path: str) -> tuple[str, str]:
    """Splits an import path into module and name.

    >>> split_path("mine.rewards:Short.of"), split_path("mine.rewards.short")
    (('mine.rewards', 'Short.of'), ('mine.rewards', 'short'))

    Raises:
        ConfigError: it isn't an import path.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        raise ConfigError(f"{path!r} isn't an import path: write package.module:name")
    if match["name"] is not None:
        return match["module"], match["name"]
    module, _, name = path.rpartition(".")
    return module, name


WAY_OUT = "Install it, put its folder on PYTHONPATH, or start Tandem in that folder"


def load(path: str, *, key: str) -> Any:
    """Imports the object that a path names. Its module may also be in the working folder, where Tandem was started.

    Args:
        path: the import path.
        key: the setting that holds it, for the error.

    Raises:
        ConfigError: the path is malformed, the module can't be imported, or it has no such name.
    """
    top = split_path(path)[0].partition(".")[0]
    try:
        # Appended at the end, so that nothing there hides an installed module.
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
        return resolve(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        lacking = isinstance(error, ModuleNotFoundError) and error.name == top
        way_out = f". {WAY_OUT}" if lacking else ""
        raise ConfigError(
            f"{key}={path} can't be imported: {type(error).__name__}: {error}{way_out}"
        ) from None


def has_module(path: str) -> bool:
    """Whether :func:`load` would find the module or package that a path begins with; imports nothing."""
    top = split_path(path)[0].partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
    return here is not None or importlib.util.find_spec(top) is not None


def source_of(path: str) -> Path | None:
    """The file of the module that an import path names, where :func:`load` would find it; imports nothing.

    None if there is no such file.
    """
    top, *names = split_path(path)[0].split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        # The module that the interpreter was started with.
        return None
    find = importlib.machinery.PathFinder.find_spec
    spec = spec or find(top, [os.getcwd()])
    for name in names:
        # Unlike this finder, importlib.util imports the packages around a module to find it.
        below = None if spec is None else spec.submodule_search_locations
        spec = find(name, below) if below else None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def require_module(path: str, key: str) -> None:
    """Refuses an import path, the value of a setting, whose module isn't there; imports nothing.

    Raises:
        ConfigError: there is no such module, or it is no import path.
    """
    try:
        found = has_module(path)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{key}={path!r}: {error}") from None
    if not found:
        raise ConfigError(f"{key}={path!r}: there is no such module. {WAY_OUT}")


def is_installed(package: str) -> bool:
    """Whether a package is there; a plain folder of its name in the working folder, such as W&B's, isn't one."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_call(function: Any, named: str, words: str, *arguments: Any) -> None:
    """Refuses a function that can't be called with so many arguments; one without a signature, as of C, is let through.

    Args:
        function: what a setting names.
        named: the setting and its value, for the error.
        words: the arguments, for the error.
        arguments: them, or as many of anything.

    Raises:
        ConfigError: it takes fewer or more.
    """
    if why := misfit(function, *arguments):
        raise ConfigError(f"{named} can't be called with {words}: {why}")


def misfit(function: Any, /, *arguments: Any, **keywords: Any) -> str:
    """Why a function can't be called with these arguments; empty if it can, or has no signature."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def resolve(path: str) -> Any:
    """Imports the object that a path names, and raises whatever that raises."""
    module, name = split_path(path)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
