"""Sets to evaluate on that ``data.evaluate`` may name: ``evaluation_sets.yaml``."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def _known() -> dict[str, Any]:
    text = (Path(__file__).parent / "evaluation_sets.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def names() -> list[str]:
    """All names, those of lists included."""
    return list(_known())


def named(name: str) -> list[dict[str, Any]]:
    """The sets with this name, one or several, as entries of ``data.evaluate``.

    >>> [entry["name"] for entry in named("luffy-other")]
    ['arc-c', 'gpqa-diamond', 'mmlu-pro']

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    found = _known().get(name)
    if found is None:
        near = difflib.get_close_matches(name, _known(), n=1, cutoff=0.5)
        meant = f" (did you mean {near[0]}?)" if near else f": name one of {', '.join(_known())}"
        raise ValueError(
            f"there is no evaluation set {name!r}{meant}; a file or a set of the hub is given as {{path: …}}"
        )
    if isinstance(found, list):
        return [entry for one in found for entry in named(one)]
    return [{"name": name, **found}]


def entries(given: Any) -> Any:
    """The value of ``data.evaluate`` with known sets in the place of their names.

    Raises:
        ValueError: as :func:`named` does.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple):
        return given
    return [entry for one in given for entry in (named(one) if isinstance(one, str) else [one])]
