"""``learner.objective``: the loss. The kinds and their keys are those of :mod:`tandem.common.objectives`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from ..objectives import DEFAULT, OBJECTIVES, ObjectiveConfig, OwnObjective, kind_of

_KINDS = (*OBJECTIVES.values(), OwnObjective)


def _kind(given: Any) -> str:
    if isinstance(given, Mapping):
        return kind_of(str(given.get("name", DEFAULT))).__name__
    return type(given).__name__ if isinstance(given, ObjectiveConfig) else OwnObjective.__name__


if TYPE_CHECKING:
    AnyObjective = ObjectiveConfig
else:
    AnyObjective = Annotated[
        Union[tuple(Annotated[kind, Tag(kind.__name__)] for kind in _KINDS)],  # noqa: UP007
        Discriminator(_kind),
    ]
    """The section of the class that its ``name`` selects."""
