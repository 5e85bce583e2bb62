"""Draws ``report.png`` from a run's metrics: the course of accuracy, reward, lengths and weights.

It is drawn by a process of its own (:class:`Drawing`), so that matplotlib costs the run nothing
before its end, and nothing that happens there can make the run fail::

    python -m tandem.launch.board.report RUN_FOLDER

The report of several stages shows one after the other, with a line between them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import DataError
from ...common.parts import read_parts
from ...common.plain import one_line
from ...common.run_folder import RunFolder, read_stages

log = logging.getLogger("tandem.launch")

SECONDS = 120.0
"""How long the drawing may take; at its first start on a machine matplotlib reads all fonts."""
REAP_SECONDS = 10.0
"""A killed process that is still there after this long is left behind, and the user is told."""
POINTS = 2000
"""Most points of a curve; of a longer run only every n-th step is drawn."""
SMOOTHED = 40
"""Number of steps from which a running mean is drawn beside a curve."""

Series = tuple[list[int], list[float]]
"""Steps and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a panel."""

    metric: str
    """Name of the figure in ``metrics.jsonl``."""
    label: str
    """Name of the curve in the legend."""
    colour: str
    """A colour by matplotlib's name."""
    thin: bool = False
    """Whether it is drawn thin and pale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram."""

    title: str
    unit: str
    """Label of the vertical axis."""
    curves: tuple[Curve, ...]
    """Only those whose metric the run has are drawn."""
    logarithmic: bool = False
    """Whether the vertical axis is logarithmic, if all values are positive."""


PANELS = (
    Panel(
        title="Reward",
        unit="mean of a step",
        curves=(
            Curve(metric="reward/mean", label="reward", colour="tab:blue"),
            Curve(
                metric="reward/zero_variance",
                label="groups without signal",
                colour="tab:gray",
            ),
        ),
    ),
    Panel(
        title="Response length",
        unit="tokens",
        curves=(
            Curve(metric="rollout/length_mean", label="mean", colour="tab:orange"),
            Curve(metric="rollout/length_max", label="longest", colour="tab:gray", thin=True),
            Curve(
                metric="replay/expert_length", label="expert traces", colour="tab:green", thin=True
            ),
        ),
    ),
    Panel(
        title="Importance weights of own tokens",
        unit="π / μ",
        curves=(
            Curve(metric="train/ratio_max", label="greatest", colour="tab:red", thin=True),
            Curve(metric="train/ratio_mean", label="mean", colour="tab:purple"),
            Curve(metric="train/ess", label="effective sample share", colour="tab:cyan"),
        ),
        logarithmic=True,
    ),
    Panel(
        title="Entropy",
        unit="nats a token",
        curves=(
            Curve(metric="train/entropy", label="own tokens, learner", colour="tab:green"),
            Curve(
                metric="rollout/entropy",
                label="own tokens, as sampled",
                colour="tab:gray",
                thin=True,
            ),
            Curve(
                metric="train/entropy_expert",
                label="expert tokens, learner",
                colour="tab:olive",
                thin=True,
            ),
        ),
    ),
    Panel(
        title="Staleness",
        unit="steps",
        curves=(
            Curve(metric="replay/staleness_max", label="oldest", colour="tab:gray", thin=True),
            Curve(metric="replay/staleness_mean", label="mean", colour="tab:brown"),
        ),
    ),
)
"""All panels but accuracy, whose metrics are named after the held-out sets."""


class Drawing:
    """The process that draws."""

    def __init__(self, folder: RunFolder) -> None:
        command = [sys.executable, "-P", "-m", "tandem.launch.board.report", str(folder.path)]
        self.interrupted = False
        """Whether Ctrl-C came while it was waited for: whatever was to follow is given up."""
        self._problem = ""
        # The report of a shorter run would be mistaken for this run's if the drawing failed.
        folder.report.unlink(missing_ok=True)
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._problem = str(error)

    def wait(self, seconds: float = SECONDS) -> str:
        """Waits for the drawing; returns why there is no report, or an empty text."""
        if self._process is None:
            return self._problem
        try:
            _, output = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it took longer than {seconds:.0f} s{self._end()}"
        except KeyboardInterrupt:
            self.interrupted = True
            return f"interrupted{self._end()}"
        if self._process.returncode:
            last = (output.strip() or f"exit code {self._process.returncode}").splitlines()[-1]
            return last[:300]
        return ""

    def _end(self) -> str:
        """Kills the process; says so if it stays, as in a kernel call on a dead disk."""
        assert self._process is not None
        self._process.kill()
        try:
            self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"; process {self._process.pid} was killed and has not gone"
        return ""


def draw(folder: RunFolder) -> Path:
    """Draws the report in this process and returns its path.

    Raises:
        DataError: there are no metrics to draw, or matplotlib isn't installed.
    """
    wanted = {"step", "train/lr", *(c.metric for panel in PANELS for c in panel.curves)}
    runs = _runs(folder)
    metrics: list[dict[str, Any]] = []
    borders = []
    for run in runs:
        # The steps of a later stage go on after those of the stages before it.
        before = max((int(record.get("step") or 0) for record in metrics), default=0)
        borders.append(before)
        # A line that is damaged is left out here; the summary has told of it.
        for record in read_parts(run.metrics, log.warning):
            kept = {k: v for k, v in record.items() if k in wanted or k.startswith("eval/")}
            if "step" in kept:
                kept["step"] += before
            metrics.append(kept)
    if not any("train/lr" in record for record in metrics):
        raise DataError(f"{folder.metrics} has no steps to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("matplotlib isn't installed: pip install matplotlib") from None
    figure = Figure(figsize=(12, 10))
    # matplotlib's own layouts measure every label once more, which takes as long as the whole drawing.
    figure.subplots_adjust(0.075, 0.06, 0.985, 0.925, wspace=0.17, hspace=0.17)
    FigureCanvasAgg(figure)
    figure.suptitle(_title(folder, metrics), fontsize=13)
    axes = list(figure.subplots(3, 2, sharex=True).flat)
    _accuracy(axes[0], metrics)
    for axis, panel in zip(axes[1:], PANELS, strict=True):
        _panel(axis, panel, metrics)
    for axis in axes:
        for border in borders[1:]:
            axis.axvline(border, color="gray", lw=0.8, ls=":")
    for axis in axes[-2:]:
        axis.set_xlabel("step")
    path = folder.report
    # Written under another name first, so that whoever opens it sees a whole picture.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.png")
    try:
        figure.savefig(temporary, dpi=100)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _runs(folder: RunFolder) -> list[RunFolder]:
    """The run, or the stages that were made one after another in its folder."""
    record = read_stages(folder.path)
    return [RunFolder(folder.path / name) for name in record["stages"]] if record else [folder]


def series(metrics: Sequence[Mapping[str, Any]], metric: str) -> Series:
    """Steps and values of a metric, thinned out to :data:`POINTS`."""
    points = [
        (int(record["step"]), float(value))
        for record in metrics
        if isinstance(value := record.get(metric), int | float) and "step" in record
    ]
    stride = -(-len(points) // POINTS) if points else 1
    kept = points[::stride]
    return [step for step, _ in kept], [value for _, value in kept]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and up to ``width − 1`` values before it.

    >>> running_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    means, total = [], 0.0
    for at, value in enumerate(values):
        total += value
        if at >= width:
            total -= values[at - width]
        means.append(total / min(at + 1, width))
    return means


def _title(folder: RunFolder, metrics: Sequence[Mapping[str, Any]]) -> str:
    record = read_stages(folder.path) or folder.read_run()
    steps = max(int(one.get("step") or 0) for one in metrics)
    return f"{record.get('preset') or folder.path.name}, {steps:,} steps"


def _accuracy(axis: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    names = sorted(
        {
            name
            for record in metrics
            for name in record
            if name.startswith("eval/") and name.endswith("/accuracy")
        }
    )
    sources = Counter(name.partition("/source/")[0] for name in names if "/source/" in name)
    for name in names:
        whole, of_source, _ = name.partition("/source/")
        if of_source and sources[whole] == 1:
            continue  # The set's own line has the same points.
        steps, values = series(metrics, name)
        pairs = sorted(zip(steps, values, strict=True))
        axis.plot(
            [step for step, _ in pairs],
            [100 * value for _, value in pairs],
            marker="o",
            label=name.removeprefix("eval/").removesuffix("/accuracy"),
        )
    _finish(axis, "Held-out accuracy", "% of problems", drawn=bool(names))
    axis.set_ylim(0, 100)


def _panel(axis: Any, panel: Panel, metrics: Sequence[Mapping[str, Any]]) -> None:
    drawn: list[float] = []
    for curve in panel.curves:
        steps, values = series(metrics, curve.metric)
        if not values:
            continue
        drawn += values
        if curve.thin:
            axis.plot(steps, values, color=curve.colour, lw=0.8, alpha=0.6, label=curve.label)
        elif len(values) < SMOOTHED:
            axis.plot(steps, values, color=curve.colour, label=curve.label)
        else:
            axis.plot(steps, values, color=curve.colour, lw=0.8, alpha=0.25)
            mean = running_mean(values, max(2, len(values) // 20))
            axis.plot(steps, mean, color=curve.colour, lw=1.8, label=curve.label)
    if panel.logarithmic and drawn and min(drawn) > 0 and max(drawn) / min(drawn) > 3:
        axis.set_yscale("log")
        for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            ticks(lambda value, _: f"{value:g}")
    _finish(axis, panel.title, panel.unit, drawn=bool(drawn))


def _finish(axis: Any, title: str, unit: str, *, drawn: bool) -> None:
    axis.set_title(title, fontsize=11)
    axis.set_ylabel(unit)
    axis.grid(alpha=0.3)
    if drawn:
        axis.legend(fontsize=8, framealpha=0.6)
    else:
        axis.text(
            *(0.5, 0.5, "not recorded in this run"),
            ha="center",
            va="center",
            transform=axis.transAxes,
            color="gray",
        )


def main(arguments: Sequence[str]) -> int:
    """Draws the report of the run's folder that is named; an error is one line."""
    (place,) = arguments
    try:
        draw(RunFolder(place))
    except Exception as error:  # noqa: BLE001 - whatever it is, the run's end reports it in one line
        print(one_line(error, 300, kind=not isinstance(error, DataError)), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
