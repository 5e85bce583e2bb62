"""The best model of a run by a figure of its evaluations, kept as an exported folder."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...common.errors import DataError
from ...common.parts import read_parts
from ...common.plain import read_object
from ...common.run_folder import SCORE, RunFolder, write_atomic

log = logging.getLogger("tandem.learner")


class Best:
    """Exports the weights whenever an evaluation of them is the best so far.

    Only evaluations of equally many problems are compared, which are the same ones. With ``evaluate.limit`` those are
    the ones in between: the first and the last, of the whole set, are left out. After a change of the limit the best
    begins anew.

    The learner waits for each evaluation (``evaluate.exact``), so it still holds the weights that were
    measured.

    Args:
        folder: the run's folder; the model is in ``best/``.
        metric: ``evaluate.best``: set and figure, as in ``heldout/accuracy``; with a minus in front, the
            smallest value is the best.
        export: writes the present weights to a folder.
        limit: ``evaluate.limit``.
    """

    def __init__(
        self,
        folder: RunFolder,
        metric: str,
        export: Callable[[Path], None],
        limit: int | None = None,
    ) -> None:
        self._folder = folder.best
        self._metrics = folder.metrics
        self._metric = metric
        self._name = metric.removeprefix("-")
        self._sign = -1.0 if metric.startswith("-") else 1.0
        self._export = export
        self._limit = limit
        self._score = -math.inf
        self._problems: int | None = None

    def begin(self, step: int) -> None:
        """Goes on from what was kept before by the same figure; a model that was best by another one gives way.

        A learner that was killed between an evaluation's record and the export makes up for it, if the
        checkpoint that it goes on from is of the step that was measured.
        """
        found = best_of(self._folder)
        if found is not None and is_by(found, self._metric):
            self._score = self._sign * float(found["value"])
            self._problems = found.get("problems")
        for record in read_parts(self._metrics, log.warning):
            if record.get("step") == step:
                self.saw(record)

    def saw(self, record: Mapping[str, Any]) -> None:
        """Takes in the record of an evaluation of the present weights."""
        value = record.get(f"eval/{self._name}")
        if not isinstance(value, int | float):
            return
        problems = record.get(f"eval/{problems_of(self._name)}")
        if self._is_of_more(problems):
            log.info(
                f"{self._name} of step {record['step']} is of {problems} problems: the best model is chosen among "
                f"evaluations of evaluate.limit={self._limit}"
            )
            return
        if problems is not None and self._problems not in (None, problems):
            log.info(
                f"the best {self._name} so far was of {self._problems} problems: it begins anew, of {problems}"
            )
            self._score = -math.inf
        if not self._sign * value > self._score:
            return
        self._score, self._problems = self._sign * value, problems
        self._export(self._folder)
        content = {
            "step": record["step"],
            "metric": self._name,
            "smallest": self._sign < 0,
            "value": value,
            "problems": problems,
        }
        write_atomic(self._folder / SCORE, json.dumps(content) + "\n")
        log.info(f"best {self._name} so far: {value:.4g}; its model is in {self._folder}")

    def missed(self, record: Mapping[str, Any], now: int) -> None:
        """Tells of an evaluation of weights that the learner no longer has, since it has gone on to the step ``now``."""
        value = record.get(f"eval/{self._name}")
        problems = record.get(f"eval/{problems_of(self._name)}")
        if isinstance(value, int | float) and not self._is_of_more(problems):
            metric = f"{self._name}:min" if self._sign < 0 else self._name
            log.warning(
                f"{self._name} of step {record['step']} is {value:.4g}, which came when the learner had gone on to "
                f"step {now} without it: it doesn't count for {self._folder}, since the learner no longer has its "
                f"weights; if its checkpoint is kept, `tandem export {self._folder.parent} --best {metric}` finds it"
            )

    def _is_of_more(self, problems: Any) -> bool:
        """Whether an evaluation is of more problems than those that are compared."""
        return self._limit is not None and problems is not None and problems > self._limit


def problems_of(name: str) -> str:
    """The figure that says of how many problems another one is, as in ``heldout/problems``."""
    return f"{name.partition('/')[0]}/problems"


def best_of(folder: Path) -> dict[str, Any] | None:
    """``step``, ``metric``, ``smallest``, ``value`` and ``problems`` of the best model; None if none is kept."""
    path = folder / SCORE
    way_out = f"restore it, or remove {folder}, which a better model then makes anew"
    try:
        found = read_object(path.read_bytes(), str(path), DataError, way_out)
    except OSError:
        return None
    if not isinstance(found.get("value"), int | float):
        raise DataError(f"{path} has no value: {way_out}")
    return found


def is_by(found: Mapping[str, Any], metric: str) -> bool:
    """Whether a best model, see :func:`best_of`, was chosen by this figure (as in ``evaluate.best``)."""
    smallest = metric.startswith("-")
    return (found.get("metric"), found.get("smallest")) == (metric.removeprefix("-"), smallest)
