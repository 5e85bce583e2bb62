"""A row of a source on its way to a problem with its traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.config import Config
from ...common.errors import DataError
from ...common.records import ExpertTrace, Problem
from ...replay.forms import DataRow
from . import turns
from .counts import SourceCounts


@dataclass(slots=True, kw_only=True)
class Draft:
    """What is made of a row so far."""

    row: DataRow
    text: str
    gold: str
    judged: bool
    """Whether the data's own verdict counts."""
    task: Mapping[str, Any] | None = None
    """What its environment is given; None without one."""
    tokens: NDArray[np.int32] | None = None
    problem: Problem | None = None
    answers: tuple[turns.Answer, ...] = ()
    """All answers of its conversation, if they are learned from."""
    trace: ExpertTrace | None = None
    rejected: ExpertTrace | None = None


def leave_out(
    config: Config, draft: Draft, counts: SourceCounts, reason: str, what: str | DataError
) -> None:
    """Counts a row that can't be used.

    Raises:
        DataError: ``data.bad_rows`` is ``refuse``.
    """
    if config.data.bad_rows == "refuse":
        # An error ends in a way out already.
        way_out = "" if isinstance(what, DataError) else ": correct it"
        raise DataError(f"{draft.row.place}: {what}{way_out}, or set data.bad_rows=leave_out")
    counts.bad_rows.add(reason, f"{draft.row.place}: {what}")
