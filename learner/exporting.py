"""Writes the model of a run's checkpoint as a Hugging Face folder, without Redis, the journal or the run's ranks.

The run may go on meanwhile: the checkpoint that is read stays as long as it is read.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..common import disk
from ..common.config import Config
from ..common.errors import DataError
from ..common.models import load_model, resolve
from ..common.parts import read_parts
from ..common.run_folder import RunFolder
from .adapters import Adapters, identity, require_same
from .engine.model_folder import (
    SHARD,
    adapter_folder,
    entries,
    write_adapters,
    write_folder,
    write_model,
)
from .loop.best import best_of, is_by, problems_of
from .resume.checkpoints import Checkpoint, Checkpoints
from .resume.former import is_former
from .resume.partitions import other_than
from .resume.state_files import POLICY, StateFiles

log = logging.getLogger("tandem.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A model that was written, or was there."""

    step: int
    """The step after which the run had these weights."""
    place: Path
    note: str = ""
    """By which value it was chosen, if it was chosen by one; a whole sentence or more."""


Values = dict[float | None, dict[int, float]]
"""Value of each step, by the number of problems that were evaluated; None = it isn't of problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure by which a model is chosen."""

    name: str
    smallest: bool
    """Whether the smallest value is the best one."""

    @classmethod
    def read(cls, text: str) -> Metric:
        """``heldout/accuracy``, ``train/loss:min``, ``heldout/accuracy:max``.

        Raises:
            DataError: there is another word after the colon.
        """
        name, _, way = text.partition(":")
        if way not in ("", "min", "max") or not name:
            raise DataError(
                f"--best {text}: name a metric, as in heldout/accuracy or train/loss:min"
            )
        return cls(name=name.removeprefix("eval/"), smallest=way == "min")

    def values(self, folder: RunFolder) -> Values:
        """The run's last value of each step that has one, those of equally many problems together.

        Raises:
            DataError: no step has any, and another name is like it.
        """
        found: Values = {}
        names: set[str] = set()
        for record in read_parts(folder.metrics, log.warning):
            names |= record.keys()
            value = record.get(f"eval/{self.name}", record.get(self.name))
            if isinstance(value, int | float) and math.isfinite(value):
                alike = found.setdefault(record.get(f"eval/{problems_of(self.name)}"), {})
                alike[int(record.get("step", 0))] = float(value)
        if not found:
            near = self._nearest({name.removeprefix("eval/") for name in names})
            if near:
                raise DataError(f"no step has the metric {self.name} (did you mean {near}?)")
        return found

    def _nearest(self, names: set[str]) -> str:
        """The name that is most like this one, of all that a run has; empty if none is."""
        ends = sorted(name for name in names if name.rpartition("/")[2] == self.name)
        return next(iter(ends or get_close_matches(self.name, sorted(names), n=1)), "")

    def best(self, values: Mapping[int, float]) -> int:
        """The step with the best value, the first of equal ones."""
        sign = 1 if self.smallest else -1
        return min(sorted(values), key=lambda step: sign * values[step])

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value is better than another one, and not equal to it."""
        return value < other if self.smallest else value > other

    def is_of(self, wanted: str) -> bool:
        """Whether it is the figure of ``evaluate.best``."""
        return wanted == ("-" if self.smallest else "") + self.name


def export(
    folder: RunFolder,
    config: Config,
    out: Path | None = None,
    *,
    step: int | None = None,
    best: str | None = None,
    shard: int | str = SHARD,
) -> Exported:
    """Writes the model of a whole checkpoint: of the newest one, unless a step or metric says otherwise.

    Adapters are merged into the model, and written by themselves beside it. One tensor at a time is in memory.

    Args:
        folder: the run's folder.
        config: the run's config.
        out: a folder that doesn't exist yet; None = ``model-of-step-N`` in the run's folder.
        step: the step whose checkpoint is wanted.
        best: the metric whose best value is wanted among the steps that are kept, see :meth:`Metric.read`. If the
            run keeps its best model by that figure (``evaluate.best``), it is that model, unless a kept step is better.
        shard: most bytes of a weights file.

    Raises:
        DataError: there is no such checkpoint, or its adapters are those of other settings or of another base;
            or an earlier version wrote it.
    """
    checkpoints = Checkpoints(folder.checkpoints)
    note = ""
    if best is not None:
        metric = Metric.read(best)
        values = metric.values(folder)
        wanted = config.evaluate.best
        if wanted is not None and metric.is_of(wanted):
            found = best_of(folder.best)
            # By another figure if the setting was changed, and nothing has been evaluated since.
            if found is not None and is_by(found, wanted):
                problems = found.get("problems")
                compared = values.get(problems, {})
                kept = _steps(checkpoints)
                # The run may have begun without the setting, and have been better before it.
                better = any(
                    metric.is_better(value, float(found["value"]))
                    for step, value in compared.items()
                    if step in kept and step != found["step"]
                )
                if not better:
                    return _best_model(folder, found, metric, compared, kept, out)
                values = {problems: compared}
        step, note = _best_step(checkpoints, metric, values)
    with checkpoints.hold(step) as checkpoint:
        if checkpoint is None:
            raise DataError(_none(checkpoints, step))
        step = checkpoint.version.step
        place = out or folder.path / f"model-of-step-{step}"
        _require_free(place, adapters=config.learner.lora is not None)
        require_same(checkpoint.state, identity(config), checkpoint.folder)
        if is_former(checkpoint.folder):
            raise DataError(
                f"an earlier version of Tandem wrote {checkpoint.folder}: resume the run, and its next checkpoint "
                f"can be exported; or python -m deepspeed.utils.zero_to_fp32 {checkpoint.folder} DIR joins it"
            )
        _write(checkpoint, config, place, shard)
    return Exported(step=step, place=place, note=note)


def _write(checkpoint: Checkpoint, config: Config, place: Path, shard: int | str) -> None:
    files = StateFiles(checkpoint.folder / POLICY)
    # transformers imports DeepSpeed, which would otherwise look for a GPU and say what it found.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Mapped from the base's files, as far as they have this dtype. A GPU isn't needed, and may be the learner's.
    model = load_model(config.model.path, dtype=config.model.dtype, flash=False)
    dtype = getattr(torch, config.model.dtype)
    lora = config.learner.lora
    adapters = None if lora is None else Adapters(model, lora, config.run.seed)
    if other := other_than(files, adapters.parameters() if adapters else model.named_parameters()):
        raise DataError(
            f"{checkpoint.folder} doesn't belong to the model in model.path={config.model.path}: {len(other)} "
            f"parameters differ, such as {other[0]}: restore the model that the run began with"
        )
    # A checkpoint has either the adapters or the model.
    trained = {n: files.whole(n).to(dtype) for n in files.names} if adapters else {}
    stored = set() if adapters else set(files.names)

    @contextmanager
    def whole(names: Sequence[str], tensor: Tensor) -> Iterator[Tensor]:
        found = [name for name in names if name in stored]
        yield files.whole(found[0]).to(dtype) if found else tensor.detach()

    base = Path(resolve(config.model.path))
    tensors = entries(model, adapters, trained, whole)
    with _writing(place):
        write_model(model, tensors, place, base, config.model.dtype, shard)
        if adapters is not None:
            with _both_or_none(place):
                write_adapters(adapters, trained, place, base)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Tells in one message why a folder can't be written."""
    try:
        yield
    except ValueError as error:
        raise DataError(
            f"{place} can't be written: transformers refuses the model: {' '.join(str(error).split())}: mend the "
            f"config files of the base model"
        ) from None
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        way_out = "look at its permissions"
        # safetensors says it in words.
        if disk.is_full(error) or os.strerror(errno.ENOSPC) in why:
            free = disk.free_bytes(place) / 1e6
            way_out = f"make room (a model needs twice its size, and {free:,.1f} MB are free)"
        raise DataError(
            f"{place} can't be written: {why}: {way_out}, or name another place with --out"
        ) from None


@contextmanager
def _both_or_none(model: Path) -> Iterator[None]:
    """Removes a model whose adapters can't be written beside it."""
    try:
        yield
    except BaseException:
        shutil.rmtree(model)
        raise


def _require_free(place: Path, *, adapters: bool) -> None:
    taken = place
    if adapters and not place.exists():
        taken = adapter_folder(place)
    if taken.exists():
        raise DataError(f"{taken} already exists: name another folder with --out")


def _steps(checkpoints: Checkpoints) -> set[int]:
    """Steps whose checkpoints are kept."""
    return {checkpoint.version.step for checkpoint in checkpoints.all()}


def _none(checkpoints: Checkpoints, step: int | None) -> str:
    kept = _shown(_steps(checkpoints))
    if step is None or not kept:
        return f"{checkpoints.folder} has no whole checkpoint to export"
    return (
        f"there is no whole checkpoint of step {step}; there are those of step {kept}. A run saves one every "
        f"learner.checkpoint_every steps and keeps the newest learner.checkpoints_kept of them, and both may be set "
        f"anew when it is resumed"
    )


def _best_step(checkpoints: Checkpoints, metric: Metric, values: Values) -> tuple[int, str]:
    """The best step that has a checkpoint, and what is to be said of it.

    Of evaluations of other numbers of problems, those of which most steps are kept are compared.
    """
    kept = _steps(checkpoints)
    problems = max(values, key=lambda n: (len(values[n].keys() & kept), n or 0), default=None)
    alike = values.get(problems, {})
    measured = {step: value for step, value in alike.items() if step in kept}
    if not measured:
        steps = {step for one in values.values() for step in one}
        found = f"it was measured at step {_shown(steps)}" if steps else "no step has it"
        raise DataError(
            f"no checkpoint belongs to a step with the metric {metric.name}: {found}, and there are checkpoints of step "
            f"{_shown(kept) or 'none'}. With evaluate.best a run keeps the best model by a figure of its evaluations"
        )
    step = metric.best(measured)
    of = f" of {problems:,.0f} problems" if len(values) > 1 and problems is not None else ""
    better = _better(metric, alike, alike[step], kept)
    return step, f"{metric.name}{of} is {alike[step]:.6g} there.{better}"


def _best_model(
    folder: RunFolder,
    found: Mapping[str, Any],
    metric: Metric,
    values: Mapping[int, float],
    kept: set[int],
    out: Path | None,
) -> Exported:
    """The run's own best model, copied if a folder is named."""
    step, value = int(found["step"]), float(found["value"])
    note = f"{metric.name} is {value:.6g} there.{_better(metric, values, value, {step, *kept})}"
    if out is None:
        return Exported(step=step, place=folder.best, note=note)

    def copy(source: Path, staging: Path) -> None:
        try:
            shutil.copytree(source, staging, dirs_exist_ok=True)
        except OSError:
            if best_of(folder.best) == found:
                raise
        if best_of(folder.best) != found:
            raise DataError(f"{folder.best} was replaced by a better one meanwhile: try again")

    adapter = adapter_folder(folder.best)
    _require_free(out, adapters=adapter.is_dir())
    with _writing(out):
        write_folder(out, lambda staging: copy(folder.best, staging))
        if adapter.is_dir():
            with _both_or_none(out):
                write_folder(adapter_folder(out), lambda staging: copy(adapter, staging))
    return Exported(step=step, place=out, note=note)


def _better(metric: Metric, values: Mapping[int, float], here: float, there: set[int]) -> str:
    """A sentence about a better value than this one that the run had at a step that is gone, if it had one.

    Args:
        metric: says what is better.
        values: value of each step.
        here: value of the step that is exported.
        there: the steps whose weights are still there.
    """
    gone = {step: value for step, value in values.items() if step not in there}
    top = metric.best(gone) if gone else None
    if top is None or not metric.is_better(gone[top], here):
        return ""
    return (
        f" Step {top} had {gone[top]:.6g}, and its checkpoint is no longer kept (learner.checkpoints_kept; "
        f"evaluate.best keeps a run's best model)."
    )


def _shown(steps: Iterable[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps))
