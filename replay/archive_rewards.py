"""What an archive's groups were paid, read without their tokens or texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.records import FinishReason, Source, Verdict
from .archive import ArchivedStep, opened


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """What a group's rows were paid; rows without a verdict are left out."""

    own: tuple[tuple[float, FinishReason], ...]
    """Rewards of the own samples, and why each ended."""
    expert: tuple[float, ...]
    """Rewards of the traces."""


_REWARDS = (
    "step",
    *(
        f"{kind}.list.element.{name}"
        for kind, name in (
            ("samples", "reward"),
            ("samples", "verdict"),
            ("samples", "finish_reason"),
            ("traces", "reward"),
            ("traces", "verdict"),
        )
    ),
)


def rewards(where: ArchivedStep) -> tuple[list[GroupRewards], bool]:
    """Rewards of a step's groups, without reading tokens or texts.

    Returns:
        The groups' rewards, and whether a sample may hold tokens that it didn't sample itself, by the
        statistics of the file's column.

    Raises:
        DataError: the file isn't an archive, or is damaged.
    """
    with opened(where.path) as file:
        part = file.metadata.row_group(where.part)
        columns = {c.path_in_schema: c for c in map(part.column, range(part.num_columns))}
        source = columns["samples.list.element.source.list.element"].statistics
        foreign = source is None or not source.has_min_max or source.max != Source.OWN
        found = file.read_row_group(where.part, columns=list(_REWARDS)).to_pylist()
    return [
        GroupRewards(
            own=tuple(
                (one["reward"], FinishReason(one["finish_reason"]))
                for one in row["samples"]
                if _has_verdict(one)
            ),
            expert=tuple(one["reward"] for one in row["traces"] if _has_verdict(one)),
        )
        for row in found
        if row["step"] == where.step
    ], foreign


def _has_verdict(row: Mapping[str, Any]) -> bool:
    verdict = row["verdict"]
    return (
        verdict is not None and row["reward"] is not None and not Verdict(verdict).leaves_baseline
    )
