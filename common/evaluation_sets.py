"""Sets to evaluate on that ``data.evaluate`` and ``tandem evaluate`` may name: ``evaluation_sets.yaml``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

VARIABLE = "TANDEM_BENCHMARKS"
"""Environment variable that names another folder than ``benchmarks``, here."""
GET = "get"
"""Key of a set that can't be fetched: false."""


def home() -> Path:
    """Where `tandem get benchmarks` puts sets, and where a set is looked for by its name first."""
    return Path(os.environ.get(VARIABLE) or "benchmarks").expanduser()


@cache
def _known() -> dict[str, Any]:
    text = (Path(__file__).parent / "evaluation_sets.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def names() -> list[str]:
    """All names, those of lists included."""
    return list(_known())


def fetchable(given: Iterable[str] = ()) -> dict[str, str]:
    """Sets that are on the hub, by name, with their names there.

    Args:
        given: names, also of lists; all sets if there are none.

    Raises:
        ValueError: there is no such set, or it isn't on the hub.
    """
    wanted = dict.fromkeys(one for name in given for one in _single(name)) or [
        name for name, about in _known().items() if isinstance(about, dict) and about.get(GET, True)
    ]
    for name in wanted:
        if not _known()[name].get(GET, True):
            raise ValueError(
                f"{name} isn't on the hub in a form that can be read: put its file there as "
                f"{_known()[name]['path']}"
            )
    return {name: _known()[name]["path"] for name in wanted}


def named(name: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """The sets with this name, one or several, as entries of ``data.evaluate``.

    Args:
        name: of a set or of a list.
        folder: a set that was fetched into it, under its name, is read from there; None = :func:`home`.

    >>> [entry["name"] for entry in named("luffy-other")]
    ['arc-c', 'gpqa-diamond', 'mmlu-pro']

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    entries = []
    for one in _single(name):
        about = {**_known()[one]}
        on_hub = about.pop(GET, True)
        here = (folder or home()) / one
        if here.is_dir():
            about["path"] = str(here if on_hub else here / Path(about["path"]).name)
        entries.append({"name": one, **about})
    return entries


def _single(name: str) -> list[str]:
    found = _known().get(name)
    if found is None:
        near = difflib.get_close_matches(name, _known(), n=1, cutoff=0.5)
        meant = f" (did you mean {near[0]}?)" if near else f": name one of {', '.join(_known())}"
        raise ValueError(
            f"there is no evaluation set {name!r}{meant}; a file or a set of the hub is given as {{path: …}}"
        )
    if isinstance(found, list):
        return [single for one in found for single in _single(one)]
    return [name]


def entries(given: Any) -> Any:
    """The value of ``data.evaluate`` with known sets in the place of their names.

    A mapping with a known name and no ``path`` is that set with these settings; one with the name of a list gives
    them to each of its sets.

    >>> [(one["name"], one["samples"]) for one in entries([{"name": "aime24", "samples": 32}])]
    [('aime24', 32)]

    Raises:
        ValueError: as :func:`named` does.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple):
        return given
    return [entry for one in given for entry in _entry(one)]


def _entry(given: Any) -> list[Any]:
    if isinstance(given, str):
        return named(given)
    if not isinstance(given, Mapping) or "path" in given or not isinstance(given.get("name"), str):
        return [given]
    own = {key: value for key, value in given.items() if key != "name"}
    return [{**entry, **own} for entry in named(given["name"])]
