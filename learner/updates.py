"""One ledger step on the learner's ranks: mini-batches, micro-batches, updates, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..common.config import Config
from ..common.config.choices import rows_of_group
from ..common.errors import ConfigError
from .coefficients import Coefficients
from .engine import DeepSpeedEngine, UpdateResult
from .losses.finite import widened
from .losses.penalties import kl_penalised
from .metrics.diagnostics import diagnose
from .metrics.ratio_check import RatioCheck
from .objectives import Objective, make
from .objectives.base import where
from .objectives.preference import Preference
from .reference import Reference
from .rendezvous import gather_over_ranks, max_over_ranks, sum_over_ranks
from .rows.groups import MixedGroup, rows_of
from .rows.microbatch import MicroBatch, micro_batch
from .rows.packing import plan
from .rows.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of a step."""

    applied: bool
    """False if a loss or gradient wasn't finite."""
    undone: bool
    """Whether updates of the step were made before that and must be undone."""
    refused: bool = False
    """Whether the ratio check prevented the step."""
    metrics: dict[str, float]
    """``train/…`` and ``ratio/…`` figures."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Update:
    """One mini-batch, ready to be trained on."""

    rows: Rows
    """All rows of the mini-batch."""
    micro_batches: list[MicroBatch]
    """This rank's share of the rows that can move the gradient."""
    scoring: list[MicroBatch]
    """This rank's share of all rows, if the objective's columns or statistics need it."""
    mismatched: bool
    """Whether ``scoring`` has other prompts' responses instead, see :attr:`Objective.mismatched`."""
    fixed: Mapping[str, float]
    """Scalars that don't come from the rows: ``constant`` (configured response length × nominal
    rows), ``width`` (that length) and ``step``."""
    active: int
    """Number of rows that can move the gradient, over all ranks."""
    forward_tokens: int
    """Tokens of this rank's forward passes."""
    measured: Mapping[str, float]
    """Metrics from preparing it."""

    @property
    def real(self) -> list[MicroBatch]:
        """``micro_batches`` without dummies."""
        return [micro for micro in self.micro_batches if not micro.dummy]


def objective_of(config: Config) -> Objective:
    """The configured objective.

    Raises:
        ConfigError: there is none of that name, or it needs a column that nothing fills.
    """
    wanted = config.learner.objective
    objective = make(wanted.name, wanted, expert_negative=config.expert.negative)
    if "values" in objective.columns:
        raise ConfigError(
            f"learner.objective.name={wanted.name} needs the values of a critic, and this learner has "
            f"none: choose an objective with a group's baseline, such as grpo"
        )
    return objective


def share_rows(rows: Rows | None) -> Rows:
    """Rank 0's rows on every rank; the other ranks pass None."""
    if dist.get_world_size() == 1:
        assert rows is not None
        return rows
    mine = rows_of((), step=0, temperature=1.0, baseline="none") if rows is None else rows
    sizes = torch.tensor([mine.groups, *(len(column) for _, column in mine.tensors())])
    dist.broadcast(sizes, 0)
    groups, *lengths = sizes.tolist()
    columns = {}
    for (name, column), length in zip(mine.tensors(), lengths, strict=True):
        columns[name] = torch.empty(length, dtype=column.dtype) if rows is None else column
        if length:
            dist.broadcast(columns[name], 0)
    return replace(mine, **columns, groups=groups)


class Updates:
    """Trains one step at a time, on every rank.

    Args:
        engine: this rank's engine.
        config: the run's config.
        objective: None = the configured one.
        reference_folder: where the reference's log-probs of stored rows are kept; None = nowhere.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: Config,
        objective: Objective | None = None,
        *,
        reference_folder: Path | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.objective = objective if objective is not None else objective_of(config)
        self.coefficients = Coefficients.of(self.objective.settings)
        """The coefficients of the next update; a checkpoint keeps them."""
        self.ratio_check = RatioCheck(config, self.objective)
        """The ratio check; a checkpoint keeps its history."""
        self._reference: Reference | None = None
        if "reference" in self.objective.columns or self.coefficients.kl_reward:
            self._reference = Reference(config, engine, reference_folder)

    def train(
        self,
        step: int,
        groups: Sequence[MixedGroup] | None,
        *,
        lr: float,
        before_step: Callable[[], None] | None = None,
        settled: bool = False,
    ) -> StepOutcome:
        """Makes all updates of a step. Every rank calls it with the same arguments, except for the groups.

        Args:
            step: step of the ledger, from 1; the engine's weights are of ``step − 1``.
            groups: the step's groups in order, on rank 0; None on the other ranks, which get their
                rows from rank 0.
            lr: learning rate.
            before_step: called once, before the first parameter changes.
            settled: the step was made before and is repeated: an alarm is reported but changes nothing.
        """
        rows, measured = self._all_rows(step, groups)
        if self.coefficients.kl_reward:
            rows, penalty = self._penalised(rows)
            measured |= penalty
        size = min(self.config.learner.minibatches, max(1, rows.groups))
        shares = np.array_split(np.arange(rows.groups), size)
        updates = [self._prepare(step, rows, share, measured) for share in shares]
        found: list[dict[str, float]] = []
        # Sampled log-probs are checked once per step, while the weights are those of its start.
        ratios: dict[str, float] = {}
        looked = refused = False

        def inspect(logprobs: Sequence[Tensor]) -> bool:
            nonlocal looked, refused
            looked = True
            there = [micro.to(self.engine.device).rows for micro in update.real]
            if sampled is not None:
                logprobs = sampled
            figures, refused = self.ratio_check.look(there, logprobs, settled=settled)
            ratios.update(figures)
            return not refused

        for number, update in enumerate(updates):
            scalars = self._scalars(update)
            if not update.active:
                # Nothing can move the gradient, so there is no pass and no step of the optimizer either.
                found.append({"applied": 1.0, "rows": float(update.rows.count), "rows_active": 0.0})
                continue
            sampled = None if looked else self._without_dropout(update)
            self.engine.seed_dropout(step, number)
            result = self.engine.update(
                update.micro_batches,
                self.objective,
                scalars,
                lr=lr,
                before_step=before_step,
                inspect=None if looked else inspect,
            )
            before_step = None
            found.append(self._metrics(update, result, scalars))
            if not result.applied:
                return StepOutcome(
                    applied=False,
                    undone=number > 0,
                    refused=refused,
                    metrics=_named(found[-1:], lr) | ratios,
                )
            self.coefficients.follow(found[-1])
        if before_step is not None:
            before_step()
        return StepOutcome(applied=True, undone=False, metrics=_named(found, lr) | ratios)

    def compare(self, step: int, groups: Sequence[MixedGroup] | None) -> dict[str, float]:
        """Measures the objective on pairs that it isn't trained on. Every rank calls it, as :meth:`train`.

        Returns:
            ``preference_pairs``, and means over them of ``preference_margin`` and ``preference_accuracy``.
        """
        rows, _ = self._all_rows(step, groups)
        assert isinstance(self.objective, Preference)
        micro_batches = self._laid_out(rows, self._shares(rows, units=rows.group))
        totals: dict[str, float] = {}
        for micro, (logprobs, _) in zip(
            micro_batches, self.engine.score(micro_batches), strict=True
        ):
            if micro.dummy:
                continue
            these = micro.to(self.engine.device).rows.with_columns(logprobs=logprobs)
            for name, value in self.objective.compared(these).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        totals = self.engine.sum_by_name(totals)
        pairs = totals.pop("preference_pairs", 0.0)
        means = {name: value / max(pairs, 1.0) for name, value in totals.items()}
        return {"preference_pairs": pairs, **means}

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps besides the engine's own state; it is the same on every rank."""
        return {**self.coefficients.state(), **self.ratio_check.state()}

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of :meth:`state`."""
        self.coefficients.restore(state)
        self.ratio_check.restore(state)

    def _all_rows(
        self, step: int, groups: Sequence[MixedGroup] | None
    ) -> tuple[Rows, dict[str, float]]:
        """All rows of some groups, with the reference's log-probs if they are stored responses.

        An archive's groups are scored as they were in the run that made it, bit for bit.
        """
        rows = share_rows(None if groups is None else self._rows(step, groups))
        stored = self.config.learner.source == "offline" and self.config.data.archive is None
        if self._reference is None or not stored:
            return rows, {}
        return self._reference.fill(rows)

    def _rows(self, step: int, groups: Sequence[MixedGroup]) -> Rows:
        objective = self.config.learner.objective
        return rows_of(
            groups,
            step=step,
            temperature=self.config.rollout.temperature,
            baseline=objective.baseline,
            truncation=objective.truncation,
            stragglers=objective.stragglers,
            plain_temperature=self.objective.plain_temperature,
        )

    def _prepare(
        self, step: int, rows: Rows, share: np.ndarray, measured: Mapping[str, float]
    ) -> _Update:
        """The mini-batch of the groups with these numbers, which are consecutive."""
        nominal = len(share) * rows_of_group(self.config)
        rows = rows.select(torch.from_numpy(np.flatnonzero(np.isin(rows.group.numpy(), share))))
        if len(share):
            # A mini-batch numbers its groups from 0.
            rows = rows.with_columns(group=rows.group - int(share[0]))
        active = torch.nonzero(self._active_units(rows)).squeeze(1)
        own = self._pack(rows, active)
        scoring: list[MicroBatch] = []
        mismatched = self._mismatched(rows)
        if mismatched is not None:
            scoring = self._laid_out(mismatched, self._shares(mismatched))
        elif self.objective.columns & {"current", "proximal"}:
            scoring = self._pack(rows)
        if "proximal" in self.objective.columns:
            own = self._with_proximal(own)
        if "reference" in self.objective.columns:
            own, scoring = self._with_reference(own), self._with_reference(scoring)
        return _Update(
            rows=rows,
            micro_batches=own,
            scoring=scoring,
            mismatched=mismatched is not None,
            fixed={
                "constant": float(self.config.rollout.max_new_tokens * nominal),
                "width": float(self.config.rollout.max_new_tokens),
                "step": float(step),
            },
            active=len(active),
            forward_tokens=sum(micro.forward_tokens for micro in own),
            measured=measured,
        )

    def _without_dropout(self, update: _Update) -> list[Tensor] | None:
        """``[N]`` log-probs of each real micro-batch for the ratio check, if training passes change them by
        dropout; None if they don't, or if nothing was sampled."""
        if not self.engine.drops or bool(update.rows.expert.all()):
            return None
        scored = self.engine.score(update.micro_batches)
        return [
            logprobs
            for micro, (logprobs, _) in zip(update.micro_batches, scored, strict=True)
            if not micro.dummy
        ]

    def _mismatched(self, rows: Rows) -> Rows | None:
        if not self.objective.mismatched or bool((~rows.expert_row).any()):
            return None
        return rows.mismatched()

    def _penalised(self, rows: Rows) -> tuple[Rows, dict[str, float]]:
        """Rows whose advantages include the KL in the reward: every rank scores its share under π_ref, and
        all ranks get all rows' sums."""
        gaps = torch.zeros(rows.count, dtype=torch.float64)
        shares = self._shares(rows)
        scored = self._with_reference(self._laid_out(rows, shares))
        for part, micro in zip(shares, scored, strict=True):
            if micro.dummy:
                continue
            these = micro.rows
            assert these.reference is not None
            gaps[part] = -kl_penalised(
                torch.zeros(these.count, dtype=torch.float64),
                where(~these.expert, widened(these.behaviour)),
                where(~these.expert, widened(these.reference)),
                these.row,
                1.0,
            )
        gaps = torch.tensor(sum_over_ranks(gaps.tolist()), dtype=torch.float64)
        paid = rows.rewards - self.coefficients.kl_reward * gaps
        changed = rows.with_advantages(paid, self.config.learner.objective.baseline)
        tokens = int((~rows.expert).sum())
        return changed, {"k1_reference": float(gaps.sum()) / max(tokens, 1)}

    def _active_units(self, rows: Rows) -> Tensor:
        """``[R]`` bool: rows whose unit has an active row (units stay whole)."""
        active = self.objective.active(rows)
        units = self._units(rows)
        if units is None or not len(units):
            return active
        most = torch.zeros(int(units.max()) + 1, dtype=torch.int64)
        return most.index_add(0, units, active.to(torch.int64))[units] > 0

    def _units(self, rows: Rows) -> Tensor | None:
        if self.objective.unit == "row":
            return None
        # Both rows of a pair are in one group, so keeping the group together keeps the pair.
        return rows.group

    def _shares(
        self, rows: Rows, which: Tensor | None = None, units: Tensor | None = None
    ) -> list[Tensor]:
        """Indices of the rows (or of ``which`` only) in each of this rank's micro-batches; empty for a
        dummy. ``units`` stay together; None = those of the objective."""
        if which is None:
            which = torch.arange(rows.count)
        if units is None:
            units = self._units(rows)
        shares = plan(
            rows.forward_lengths[which].numpy(),
            (which if units is None else units[which]).numpy(),
            budget=self.config.learner.micro_batch_tokens,
            ranks=self.engine.world_size,
        )
        return [which[torch.from_numpy(part)] for part in shares[self.engine.rank]]

    def _laid_out(self, rows: Rows, shares: Sequence[Tensor]) -> list[MicroBatch]:
        together = self.engine.policy.shares_prompts
        return [micro_batch(rows.select(part), share_prompts=together) for part in shares]

    def _pack(self, rows: Rows, which: Tensor | None = None) -> list[MicroBatch]:
        return self._laid_out(rows, self._shares(rows, which))

    def _with_proximal(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        scored = self.engine.score(micro_batches)
        return [
            micro
            if micro.dummy
            else replace(
                micro, rows=micro.rows.with_columns(proximal=logprobs.to(micro.rows.row.device))
            )
            for micro, (logprobs, _) in zip(micro_batches, scored, strict=True)
        ]

    def _with_reference(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        assert self._reference is not None
        # Stored rows have theirs already; that is so of all of them, on every rank.
        if all(micro.rows.reference is not None for micro in micro_batches):
            return micro_batches
        scored = self._reference.score(micro_batches)
        return [
            micro
            if micro.dummy
            else replace(
                micro, rows=micro.rows.with_columns(reference=logprobs.to(micro.rows.row.device))
            )
            for micro, logprobs in zip(micro_batches, scored, strict=True)
        ]

    @torch.no_grad()
    def _scalars(self, update: _Update) -> dict[str, float]:
        fixed = {**update.fixed, **self.coefficients.scalars}
        if update.mismatched or "current" not in self.objective.columns:
            # Every rank has all rows, so nothing needs to be reduced.
            counted = self.objective.statistics(update.rows)
            fixed |= {k: float(v) for k, v in counted.items()}
            return {**fixed, **(self._gain(update.scoring) if update.mismatched else {})}
        totals: dict[str, float] = {}
        scored = self.engine.score(update.scoring)
        for micro, (logprobs, entropy) in zip(update.scoring, scored, strict=True):
            if micro.dummy:
                continue
            rows = micro.to(self.engine.device).rows
            rows = rows.with_columns(logprobs=logprobs, entropy=entropy)
            for name, value in self.objective.statistics(rows).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return {**fixed, **self.engine.sum_by_name(totals)}

    def _gain(self, mismatched: list[MicroBatch]) -> dict[str, float]:
        """The scalars of :attr:`Objective.mismatched`."""
        gain = rows = 0.0
        for micro, (logprobs, _) in zip(mismatched, self.engine.score(mismatched), strict=True):
            if not micro.dummy:
                assert micro.rows.reference is not None
                reference = micro.rows.reference.to(logprobs.device)
                gain += float((logprobs.double() - reference.double()).sum())
                rows += micro.rows.count
        gain, rows = sum_over_ranks([gain, rows])
        return {"mismatched_gain": gain, "mismatched_rows": rows}

    def _metrics(
        self, update: _Update, result: UpdateResult, scalars: Mapping[str, float]
    ) -> dict[str, float]:
        looked = diagnose(
            [micro.to(self.engine.device).rows for micro in update.real],
            result.logprobs,
            result.entropies,
            sum_over_ranks=sum_over_ranks,
            max_over_ranks=max_over_ranks,
            gather_over_ranks=gather_over_ranks,
        )
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "applied": float(result.applied),
            "rows": float(update.rows.count),
            "rows_active": float(update.active),
            "micro_batches": float(len(update.micro_batches)),
            "forward_tokens": float(update.forward_tokens),
            # Rows that the loss refuses have no sums to report.
            **(self.objective.report(result.sums, scalars) if result.applied else {}),
            **looked,
            **update.measured,
            **self.coefficients.metrics,
        }


_SUMMED = frozenset(
    {"rows", "rows_active", "tokens_own", "tokens_expert", "micro_batches", "forward_tokens"}
)
_GREATEST = frozenset({"ratio_max", "k3_p99"})


def _named(updates: Sequence[Mapping[str, float]], lr: float) -> dict[str, float]:
    """Metrics of a step from those of its updates, each under ``train/``."""
    names = dict.fromkeys(name for one in updates for name in one)
    metrics = {"train/lr": lr, "train/updates": float(len(updates))}
    for name in names:
        values = [one[name] for one in updates if name in one]
        if name == "log_ratio_max_lag0":
            # Only in the first update are the weights those that sampled.
            if name not in updates[0]:
                continue
            value = updates[0][name]
        elif name in _SUMMED:
            value = sum(values)
        elif name in _GREATEST:
            value = max(values)
        else:
            value = sum(values) / len(values)
        metrics[f"train/{name}"] = value
    return metrics
