"""What the learner reports: metrics.jsonl, samples.jsonl, its report in Redis and its log."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...common import disk
from ...common.config import Config
from ...common.models import load_tokenizer
from ...common.parts import PartedLines
from ...common.records import Int32Array, Version
from ...common.run_folder import RunFolder
from ...common.telemetry import Clock
from ...replay import archive
from ...replay.archive_columns import ArchivedGroup
from ...replay.evaluating.evaluations import EvaluationResult
from ...replay.inspecting.rows import block_of, cut_logs, log_path, write_run_log
from ...replay.members import Members
from ...replay.store import RunStore
from ..metrics.grading_rates import GradingRates
from ..metrics.reports import text_of
from ..metrics.transfer_rates import TransferRates
from ..resume.cut_back import cut_back
from ..rows.groups import MixedGroup
from ..rows.sources import StepBatch
from .evaluations import record_of

log = logging.getLogger("tandem.learner")

REPORT_SECONDS = 1.0
"""Time between two reports to Redis, and between two reads of the reports of pools and workers."""
MEMORY = "memory/learner_"
"""Prefix of the metrics of the learner's own memory."""
PROGRESS = {
    "train/loss": "loss",
    "reward/mean": "reward",
    "reward/accuracy": "accuracy",
    "rollout/length_mean": "length",
    "replay/staleness_mean": "staleness",
    "train/grad_norm": "gradient",
}
"""Metrics in the log's lines, and their labels there."""


class Reporter:
    """Reports what the learner does; :meth:`cut_back` must come before the first record.

    Args:
        runs: holds the reports.
        config: the run's config.
        folder: the run's folder.
        name: the learner's member id.
        clock: clock of the learner's loop.
        total_steps: number of steps of the run.
    """

    def __init__(
        self,
        runs: RunStore,
        config: Config,
        folder: RunFolder,
        name: str,
        clock: Clock,
        total_steps: int,
    ) -> None:
        self._runs = runs
        self._config = config
        self._folder = folder
        self._name = name
        self._clock = clock
        self._total = total_steps
        self.always: Mapping[str, float] = {}
        """Figures that every step's record has."""
        self._metrics: PartedLines | None = None
        self._samples: PartedLines | None = None
        self._block: list[Mapping[str, Any]] = []
        self._tokenizer: Any = None
        self._rates = GradingRates()
        self._transfers = TransferRates()
        self._asked = 0.0
        self._reported = 0.0
        self._seconds: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._memory: dict[str, float] = {}
        self._progress = (time.monotonic(), 0)

    def cut_back(self, step: int) -> None:
        """Sets aside what was reported of later steps, which will be trained again."""
        if self._metrics is None:
            # Pools and workers may outlive a learner, whose records have what they had counted by then.
            reports = self._runs.reports()
            for count in (self._rates.take, self._transfers.lost, self._transfers.checked):
                count(reports)
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()
        for path in (self._folder.metrics, self._folder.samples):
            cut_back(path, step, self._folder.cut)
        for part in self._folder.archive.glob(".*"):
            part.unlink()  # A learner was killed while it wrote the file.
        if self._config.log.inspect or self._folder.inspect.exists():
            self._block = cut_logs(self._folder, step)
        self._metrics = PartedLines(self._folder.metrics)
        self._samples = PartedLines(self._folder.samples)

    def begin(self, step: int) -> None:
        """Starts to measure the pace shown in the log at this step."""
        self._progress = (time.monotonic(), step)

    def record(self, version: Version, metrics: Mapping[str, Any]) -> None:
        """Writes a record of metrics.jsonl."""
        assert self._metrics is not None, "cut_back opens the files"
        stamp = {"step": version.step, "term": version.term, "time": time.time()}
        self._metrics.write({**stamp, **metrics})

    def samples(self, step: int, groups: Sequence[MixedGroup]) -> None:
        """Writes the step's first groups into samples.jsonl."""
        assert self._samples is not None, "cut_back opens the files"
        for mixed in groups[: self._config.log.samples_per_step]:
            played = any(sample.episode is not None for sample in mixed.group.samples)
            record = text_of(step, mixed, self._decode if played else None)
            self._samples.write(record)
            if self._config.log.inspect:
                self._log_for_inspect(record)

    def _log_for_inspect(self, record: Mapping[str, Any]) -> None:
        """Keeps a record until its block of steps is complete, which is then written as a log."""
        block = self._block
        if block and block_of(block[0]["step"]) != block_of(record["step"]):
            self.end_block()
        self._block.append(record)

    def end_block(self) -> None:
        """Writes the log of a block of steps for Inspect; the run's last one may have fewer than the others."""
        block, self._block = self._block, []
        if block and self._config.log.inspect:
            path = log_path(self._folder, block)
            disk.persist(path, lambda: write_run_log(self._folder, self._config, block))

    def _decode(self, tokens: Int32Array) -> str:
        """The text of an episode's tokens, special ones included: they show where a turn ends."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._config.model.path)
        text: str = self._tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def archive(self, batch: StepBatch) -> None:
        """Keeps the step's groups. A step that is trained again has the same ones.

        Groups of another archive keep the step that they have there, by which their spans count.
        """
        path = self._folder.archive / archive.file_name(batch.step)
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        groups = [
            ArchivedGroup(
                step=batch.step - mixed.later,
                place=place,
                group=mixed.group,
                traces=mixed.traces,
                replaced=mixed.replaced,
                row=batch.row if place == 0 else None,
            )
            for place, mixed in enumerate(batch.groups)
        ]
        disk.persist(path, lambda: archive.write(path, groups))

    def step(self, version: Version, metrics: dict[str, float], weights: Mapping[str, Any]) -> None:
        """Records a step that was trained, with what pools and workers have reported since the last one.

        Args:
            version: the version that the step made.
            metrics: the step's figures.
            weights: counters of the sender of weights.
        """
        counters = self._counters(weights, force=version.step == self._total)
        self._last = {**metrics, **self.always, **counters}
        self._memory = {
            k.removeprefix(MEMORY): v for k, v in metrics.items() if k.startswith(MEMORY)
        }
        self._seconds = self._clock.take()
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self.record(version, {**self._last, **times})

    def compared(self, version: Version, found: Mapping[str, float]) -> None:
        """Records how the held-out pairs are preferred; see :meth:`Updates.compare`."""
        self.record(version, {f"heldout/{name}": value for name, value in found.items()})
        log.info(
            f"step {version.step}: {found['preference_accuracy']:.1%} of "
            f"{found['preference_pairs']:.0f} held-out pairs have the right response before the wrong one"
        )

    def evaluation(self, result: EvaluationResult, term: int) -> None:
        """Records the result of an evaluation."""
        record = record_of(result)
        assert self._metrics is not None, "cut_back opens the files"
        self._metrics.write({**record, "term": term, "time": time.time()})
        log.info(
            f"evaluation {result.id}: accuracy {result.accuracy:.1%} on {result.problems} "
            f"problems (weights of step {result.step}, {result.seconds:.1f} s)"
        )

    def report(
        self,
        version: Version,
        *,
        weights: Mapping[str, Any],
        alarm: str,
        waiting: str = "",
        force: bool = False,
    ) -> None:
        """Reports the learner's progress to Redis, at most once a second unless forced."""
        now = time.monotonic()
        if not force and now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        self._runs.report(
            self._name,
            {
                "role": "learner",
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "time": time.time(),
                "version": [version.term, version.step],
                "total_steps": self._total,
                "waiting": waiting,
                "alarm": alarm,
                # Of the others there is a record in the metrics.
                "weights_alarm": weights.get("alarm", ""),
                "seconds": self._seconds,
                "weights": dict(weights),
                "memory": self._memory,
                "loss": _finite(self._last.get("train/loss")),
                "reward": _finite(self._last.get("reward/mean")),
            },
        )

    def progress(self, step: int) -> None:
        """Logs a line every ``log.every`` steps, and at the last step."""
        if step % self._config.log.every and step != self._total:
            return
        since, before = self._progress
        now = time.monotonic()
        pace = (now - since) / max(1, step - before)
        self._progress = (now, step)
        parts = [f"step {step}/{self._total}", f"{pace:.3f} s a step"]
        for name, label in PROGRESS.items():
            if name in self._last:
                parts.append(f"{label} {self._last[name]:.4g}")
        waited = sum(s for name, s in self._seconds.items() if name.startswith("wait/"))
        parts.append(f"waited {waited / max(self._seconds.get('total', 0.0), 1e-9):.0%}")
        log.info(", ".join(parts))

    def _counters(self, weights: Mapping[str, Any], *, force: bool) -> dict[str, float]:
        """What pools and workers have reported since the last call, at most once a second unless forced."""
        now = time.monotonic()
        if not force and now - self._asked < REPORT_SECONDS:
            return {}
        self._asked = now
        reports = self._runs.reports()
        workers = Members(self._runs.store).live("rollout")
        return {
            **self._rates.take(reports),
            **self._transfers.lost(reports),
            **self._transfers.checked(reports),
            **_rollout_memory(reports.get(m.member, {}) for m in workers),
            **(self._transfers.sent(weights) if weights else {}),
        }


def _rollout_memory(reports: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The most that a rollout worker has held, by these last reports: of main memory with its engine's processes,
    and of a GPU if it has one itself."""
    workers = [r["memory"] for r in reports if r.get("memory")]
    found: dict[str, float] = {}
    for name, metric in (
        ("peak", "memory/rollout_peak_bytes"),
        ("gpu", "memory/rollout_gpu_bytes"),
    ):
        sizes = [float(one[name]) for one in workers if isinstance(one, Mapping) and name in one]
        if sizes:
            found[metric] = max(sizes)
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
