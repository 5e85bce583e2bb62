"""The figures of an evaluation, computed from its samples alone, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from ...common.errors import DataError
from ...common.plain import for_json
from ...common.records import EPISODE_FAILURES
from ...common.run_folder import write_atomic
from ...replay.evaluating.evaluated import Cell, EvaluatedSample, EvaluationFolder
from ...rollout.evaluate import scores
from ...rollout.evaluate.evaluation import Evaluation
from ..wording import aligned


def summarise(folder: EvaluationFolder) -> dict[str, Any]:
    """The figures of all finished cells; writes them into the folder.

    Raises:
        DataError: the folder isn't an evaluation's, or no cell is finished.
    """
    cells = folder.finished()
    if not cells:
        raise DataError(f"no cell of {folder.path} is finished: run `tandem evaluate` again")
    found = {
        "cells": [
            {
                **structs.asdict(cell),
                "figures": for_json(scores.summary(folder.samples(cell.name), seed=cell.seed)),
            }
            for cell in cells
        ]
    }
    write_atomic(folder.summary, json.dumps(found, indent=1) + "\n")
    return found


def told(result: Evaluation, samples: Sequence[EvaluatedSample], data: Path) -> str:
    """The figures of a set whose samples aren't kept, as lines for people.

    Args:
        result: the figures.
        samples: what they are of.
        data: where the set is.
    """
    form = "" if not result.classes else f"right form {100 * result.format_share:.1f}%, "
    text = (
        f"accuracy {100 * result.accuracy:.1f}% on {result.problems} problems of {data}\n"
        f"{form}{result.mean_length:.0f} tokens a response, {result.seconds:.1f} s"
    )
    if episodes := [one for one in samples if one.turns is not None]:
        failed = sum(one.verdict in EPISODE_FAILURES for one in episodes)
        turns = sum(one.turns or 0 for one in episodes) / len(episodes)
        text += (
            f"\nreward {result.reward:.3f}, {turns:.1f} turns an episode, {failed} of {len(episodes)} "
            f"episodes failed by no fault of the model"
        )
    if result.classes:
        shares = ", ".join(f"{k} {100 * v:.1f}%" for k, v in result.classes.items())
        text += f"\nform and answer: {shares}"
    return text


def table(summary: Mapping[str, Any]) -> str:
    """One line for each cell."""
    rows: list[tuple[str, ...]] = [
        (
            "model",
            "benchmark",
            "template",
            "T",
            "top-p",
            "n",
            "accuracy",
            "95%",
            "pass",
            "majority",
            "cut",
            "tokens",
        )
    ]
    rows += [_row(cell, cell["figures"]) for cell in summary["cells"]]
    return "\n".join(aligned(rows))


def _row(cell: Mapping[str, Any], figures: Mapping[str, Any]) -> tuple[str, ...]:
    passes = [name for name in figures if name.startswith("pass@")]
    majority = next((name for name in figures if name.startswith("maj")), None)
    each = figures["per_problem"]
    low, high = figures["interval"]
    return (
        cell["model"],
        cell["benchmark"],
        cell["template"],
        f"{cell['temperature']:g}",
        f"{cell['top_p']:g}",
        f"{figures['problems']:,}x{each if isinstance(each, int) else '-'.join(map(str, (each[0], each[-1])))}",
        percent(figures["accuracy"])
        + (f" ({figures['ungraded']} ungraded)" if figures["ungraded"] else ""),
        f"{100 * low:.1f}-{100 * high:.1f}",
        f"@{passes[-1].removeprefix('pass@')} {percent(figures[passes[-1]])}" if passes else "",
        percent(figures[majority]) if majority else "",
        percent(figures["truncated"]),
        f"{figures['length']:,.0f}",
    )


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.1f}%"


def cell_name(cell: Cell) -> str:
    """What a cell is, without its model."""
    return f"{cell.benchmark} t{cell.temperature:g} p{cell.top_p:g} {cell.template}"
