"""Compares two evaluations of the same problems, paired by problem; all figures follow from the samples.

A and B are folders of evaluations, whose cells are paired by benchmark, temperature, top-p and template, or single cells
(DIR/cells/CELL). The difference is B's accuracy less A's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import DataError
from ...common.run_folder import write_atomic
from ..evaluation.report import cell_name, percent
from ..wording import aligned
from .options import output_file

if TYPE_CHECKING:
    from ...replay.evaluating.evaluated import Cell
    from ...rollout.evaluate.scores import Group

Named = dict[str, "tuple[Cell, Path]"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first", metavar="A", help="folder of an evaluation, or of one of its cells"
    )
    parser.add_argument("second", metavar="B", help="the same")
    parser.add_argument("--seed", type=int, default=0, help="seed of the resampling (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", metavar="FILE", help="write the figures there, as JSON")


def run(arguments: argparse.Namespace) -> int:
    out = output_file(arguments.out) if arguments.out else None
    found = [
        {
            "first_cell": str(first),
            "second_cell": str(second),
            **_compared(first, second, arguments.seed),
        }
        for first, second in pairs(Path(arguments.first), Path(arguments.second))
    ]
    text = json.dumps(found, indent=1)
    if out is not None:
        write_atomic(out, text + "\n")
    if arguments.json:
        print(text)
        return 0
    rows: list[tuple[str, ...]] = [
        ("A", "B", "on", "A", "B", "B - A", "95%", "better", "worse", "McNemar p")
    ]
    rows += [_row(one) for one in found]
    print("\n".join(aligned(rows)))
    return 0


def pairs(first: Path, second: Path) -> list[tuple[Path, Path]]:
    """The files of samples that are compared; says which cells one folder alone has.

    Raises:
        DataError: the cells of two folders can't be paired, or have other templates.
    """
    ours, theirs = _cells(first), _cells(second)
    if len(ours) == len(theirs) == 1:
        ((cell, path),), ((other, other_path),) = ours.values(), theirs.values()
        if cell.template != other.template:
            raise DataError(
                f"{cell.name} has the template {cell.template} and {other.name} has {other.template}: a "
                f"difference would be the templates' as well"
            )
        return [(path, other_path)]
    both = [name for name in ours if name in theirs]
    if not both:
        raise DataError(
            f"{first} and {second} have no cell in common: {', '.join(ours)} against {', '.join(theirs)}; "
            f"name single cells, DIR/cells/CELL"
        )
    for folder, cells in ((first, ours), (second, theirs)):
        if alone := [name for name in cells if name not in both]:
            print(
                f"note: not compared, since only {folder} has them: {', '.join(alone)}",
                file=sys.stderr,
            )
    return [(ours[name][1], theirs[name][1]) for name in both]


def _cells(path: Path) -> Named:
    """The finished cells of a folder by what they are, without the model; or the one cell."""
    from ...replay.evaluating.evaluated import EvaluationFolder

    path = path.expanduser()
    single = path.parent.name == "cells"
    folder = EvaluationFolder(path.parent.parent if single else path)
    found: Named = {}
    for cell in folder.finished():
        if single and cell.name != path.name:
            continue
        name = cell_name(cell)
        if name in found:
            raise DataError(
                f"{path} has several models with {name} ({found[name][0].model}, {cell.model}): name single "
                f"cells, {path}/cells/CELL"
            )
        found[name] = (cell, folder.samples_file(cell.name))
    if not found:
        raise DataError(f"{path} has no finished cell: run `tandem evaluate` again")
    return found


def _compared(first: Path, second: Path, seed: int) -> dict[str, Any]:
    from ...replay.evaluating.evaluated import read_samples
    from ...rollout.evaluate import scores

    groups = [scores.by_problem(read_samples(path)) for path in (first, second)]
    _require_same(first, second, *groups)
    return scores.compare(*groups, seed=seed)


def _require_same(
    first: Path, second: Path, ours: Sequence[Group], theirs: Sequence[Group]
) -> None:
    ids = [
        {(group[0].problem_id, group[0].prompt, group[0].gold) for group in one}
        for one in (ours, theirs)
    ]
    if ids[0] != ids[1]:
        names = sorted({name for name, _, _ in ids[0] ^ ids[1]})
        raise DataError(
            f"{first} and {second} aren't of the same problems: {', '.join(names[:3])} "
            f"({len(names)} in all) are in one alone, or have another prompt or gold answer"
        )


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    low, high = one["interval"]
    names = [Path(one[key]).parent.name for key in ("first_cell", "second_cell")]
    return (
        *names,
        f"{one['problems']:,} problems",
        percent(one["first"]),
        percent(one["second"]),
        f"{100 * one['difference']:+.1f}",
        f"{100 * low:+.1f}..{100 * high:+.1f}",
        str(one["better"]),
        str(one["worse"]),
        f"{one['mcnemar_p']:.4f}" if "mcnemar_p" in one else "",
    )
