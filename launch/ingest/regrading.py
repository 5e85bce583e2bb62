"""What a reward asks for of an archive's rows, and which groups lack it.

Of its rows a run keeps what its own reward asks for: the tests that are run, the columns that functions may name, and the
messages of prompts. Another reward may ask for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.config import RewardConfig
from ...common.errors import DataError
from ...common.import_path import is_import_path
from ...common.records import PROMPT_MESSAGES
from ...replay import archive
from ...reward.components import functions
from ...reward.components.scoring import Scorer
from ..host import own_functions


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One thing that a component asks for."""

    component: str
    """The component's name."""
    what: str
    """What it asks for."""
    has: Callable[[Mapping[str, Any]], bool]
    """Whether a group with this ``extra`` has it."""
    otherwise: str
    """What becomes of a group without it."""
    is_needed: bool = True
    """Whether an archive without it is refused."""


def check(reward: RewardConfig, files: Sequence[Path]) -> list[str]:
    """Says which groups lack what a reward asks for, a line for each thing.

    Raises:
        DataError: no group has something that a component can't do without.
    """
    needs = list(_needs(reward))
    if not needs:
        return []
    count, lacking = 0, [0] * len(needs)
    for file in files:
        for extra in archive.extras(file):
            count += 1
            for place, need in enumerate(needs):
                lacking[place] += not need.has(extra)
    found = []
    for need, number in zip(needs, lacking, strict=True):
        named = f"reward component {need.component} asks for {need.what}"
        if 0 < number == count and need.is_needed:
            raise DataError(
                f"{named}, and not one of the archive's {count:,} groups has that: a run keeps what its own "
                f"reward asks for, so archive a run whose reward has this component (with weight: 0 it only "
                f"records its values)"
            )
        if number:
            found.append(f"{named}, and {number:,} of {count:,} groups have none: {need.otherwise}")
    return found


def _needs(reward: RewardConfig) -> Iterator[Need]:
    scorer = Scorer(reward)
    for part in scorer.sandboxed:
        yield Need(
            component=part.name,
            what=f"tests ({part.function.tests})",
            has=part.function.has_tests,
            otherwise="these are graded by their gold answers",
        )
    messages = [part.name for part in scorer.remote]
    own = [part for part in scorer.parts if is_import_path(part.name)]
    asked = own_functions.check("rewards", tuple(part.name for part in own)) if own else ()
    given = set(functions.columns([]))
    for part, (form, columns) in zip(own, asked, strict=True):
        used = form if part.config.form == "auto" else part.config.form
        if "prompts" in columns and used == "conversation":
            messages.append(part.name)
        for column in columns:
            if column not in given and column not in part.config.params:
                yield Need(
                    component=part.name,
                    what=f"the column {column!r}",
                    has=lambda extra, column=column: column in extra,  # type: ignore[misc]
                    otherwise="it fails for these",
                )
    for name in messages:
        yield Need(
            component=name,
            what="the messages of prompts",
            has=lambda extra: PROMPT_MESSAGES in extra,
            otherwise="it gets their rendered prompts as one message of the user",
            is_needed=False,
        )
