"""One ledger step on the learner's ranks: mini-batches, micro-batches, updates, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...common.config import Config
from ...common.config.groups import has_groups, rows_of_group
from ...common.seeds import keyed_generator
from ..engine.deepspeed_engine import DeepSpeedEngine
from ..engine.update_result import UpdateResult
from ..losses.finite import widened
from ..losses.ratios import k3
from ..metrics.diagnostics import diagnose
from ..metrics.ratio_check import RatioCheck
from ..objectives import Distill, Objective, Ppo
from ..objectives.configured import objective_of
from ..objectives.own import statistics_of
from ..objectives.preference import Preference
from ..rendezvous import gather_over_ranks, max_over_ranks, sum_over_ranks
from ..rows.groups import MixedGroup, rows_of
from ..rows.microbatch import MicroBatch
from ..rows.rows import Rows
from .coefficients import Coefficients
from .columns import Columns, share_rows
from .teacher import Teacher


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


@dataclass(slots=True, kw_only=True, eq=False)
class _Guard:
    """Looks at the updates of one step, each before a parameter changes, and may prevent it."""

    ratio_check: RatioCheck
    stop_kl: float | None
    """``learner.stop_kl``."""
    settled: bool
    """Whether the step was made before, so that an alarm changes nothing."""
    device: torch.device
    looked: bool = False
    """Whether an update was looked at."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Figures of the ratio check."""
    refused: bool = False
    """Whether the ratio check prevents the step."""
    stopped: bool = False
    """Whether the policy has gone farther than ``stop_kl``, so that this update and those after it are left out."""
    kl: float = 0.0
    """KL from the step's start to the weights before the last update that was looked at, in nats a token."""

    @property
    def looks(self) -> bool:
        """Whether the next update has to be looked at."""
        return not self.looked or self.stop_kl is not None

    def look(
        self, update: _Update, scored: Sequence[Tensor] | None, logprobs: Sequence[Tensor]
    ) -> bool:
        """Whether an update may be made; every rank comes to the same answer.

        Args:
            update: this rank's share.
            scored: ``[N]`` log-probs of each real micro-batch without dropout; None = ``logprobs`` are.
            logprobs: those of the training pass.
        """
        rows = [micro.to(self.device).rows for micro in update.real]
        if scored is not None:
            logprobs = scored
        first, self.looked = not self.looked, True
        # Sampled log-probs are checked once per step, while the weights are those of its start.
        if first:
            self.ratios, self.refused = self.ratio_check.look(rows, logprobs, settled=self.settled)
        if self.stop_kl is not None:
            self.kl = _kl_from_start(rows, logprobs)
            # Before the first update only rounding lies between the two passes of the same weights.
            self.stopped = not first and self.kl > self.stop_kl
        return not (self.refused or self.stopped)


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
        self._stop_kl = config.learner.stop_kl
        self.columns = Columns(
            engine,
            config,
            self.objective,
            penalised=bool(self.coefficients.kl_reward),
            reference_folder=reference_folder,
        )
        self.teacher: Teacher | None = None
        if isinstance(self.objective, Distill):
            self.teacher = Teacher(config, engine, self.objective)
            self.columns.readers.append(self.teacher.policy)

    @property
    def frozen_paths(self) -> list[str]:
        """Paths of the models that are loaded beside the policy and never change: the reference's and the teacher's."""
        config, reference = self.config, self.columns.reference
        own = reference is not None and reference.policy is not self.engine.policy
        teacher = config.learner.teacher if self.teacher is not None else None
        paths = dict.fromkeys((config.model.path if own else None, teacher))
        return [path for path in paths if path is not None]

    def train(
        self,
        step: int,
        groups: Sequence[MixedGroup] | None,
        *,
        lr: float,
        critic_lr: float | None = None,
        before_step: Callable[[], None] | None = None,
        settled: bool = False,
    ) -> StepOutcome:
        """Makes all updates of a step. Every rank calls it with the same arguments, except for the groups.

        Args:
            step: step of the ledger, from 1; the engine's weights are of ``step − 1``.
            groups: the step's groups in order, on rank 0; None on the other ranks, which get their
                rows from rank 0.
            lr: learning rate.
            critic_lr: the critic's learning rate; None = that of the policy.
            before_step: called once, before the first parameter changes.
            settled: the step was made before and is repeated: an alarm is reported but changes nothing.
        """
        rows, measured = self._filled(step, groups)
        critic = self.config.learner.critic
        critic_alone = critic is not None and step <= critic.warmup_steps
        guard = _Guard(
            ratio_check=self.ratio_check,
            stop_kl=self._stop_kl,
            settled=settled,
            device=self.engine.device,
        )
        found: list[dict[str, float]] = []
        in_first_pass = passes = made = 0
        for number, update in self._passes(step, rows, measured):
            if number and not in_first_pass:
                in_first_pass = len(found)
            scalars = self._scalars(update)
            if not update.active:
                # Nothing can move the gradient, so there is no pass and no step of the optimizer either.
                found.append({"applied": 1.0, "rows": float(update.rows.count), "rows_active": 0.0})
                continue
            looks = guard.looks
            sampled = self._without_dropout(update) if looks else None
            self.engine.seed_dropout(step, made)
            made += 1
            result = self.engine.update(
                update.micro_batches,
                self.objective,
                scalars,
                lr=lr,
                critic_lr=lr if critic_lr is None else critic_lr,
                critic_alone=critic_alone,
                before_step=before_step,
                inspect=partial(guard.look, update, sampled) if looks else None,
                teach=None if self.teacher is None else self.teacher.lesson,
            )
            before_step = None
            if guard.stopped:
                break
            found.append(self._metrics(update, result, scalars))
            if not result.applied:
                return StepOutcome(
                    applied=False,
                    undone=passes > 0,
                    refused=guard.refused,
                    metrics=_named(found[-1:], 1, lr) | guard.ratios,
                )
            passes = number + 1
            # While the policy stays as it is, they can't bring what they follow to its target.
            if not critic_alone:
                self.coefficients.follow(found[-1])
        if passes and not critic_alone:
            self.coefficients.follow_step(measured)
        if before_step is not None:
            before_step()
        metrics = _named(found, in_first_pass or len(found), lr) | guard.ratios
        if self.config.learner.update_epochs > 1:
            metrics["train/update_epochs"] = float(passes)
        if self._stop_kl is not None:
            metrics |= {"train/kl_stop": float(guard.stopped), "train/kl_start": guard.kl}
        return StepOutcome(applied=True, undone=False, metrics=metrics)

    def _filled(
        self, step: int, groups: Sequence[MixedGroup] | None
    ) -> tuple[Rows, dict[str, float]]:
        """All rows of a step with what its updates share, by the weights at its start, and figures of it."""
        rows, measured = self._all_rows(step, groups)
        columns, coefficient = self.columns, self.coefficients.kl_reward
        if self.config.learner.update_epochs > 1 or self._stop_kl is not None:
            start = "proximal" in self.objective.columns or self._stop_kl is not None
            rows = columns.filled(rows, start=start)
        if self.engine.critic is not None:
            assert isinstance(self.objective, Ppo)
            if coefficient:
                rows = columns.with_reference_of(rows)
            values = columns.of_tokens(rows, self.engine.critic.score)
            rows, figures = self.objective.estimated(rows, values, coefficient)
            measured |= figures
        elif coefficient:
            rows, penalty = columns.penalised(rows, coefficient)
            measured |= penalty
        return rows, measured

    def compare(self, step: int, groups: Sequence[MixedGroup] | None) -> dict[str, float]:
        """Measures the objective on pairs that it isn't trained on. Every rank calls it, as :meth:`train`.

        Returns:
            ``preference_pairs``, and means over them of ``preference_margin`` and ``preference_accuracy``.
        """
        rows, _ = self._all_rows(step, groups)
        assert isinstance(self.objective, Preference)
        micro_batches = self.columns.laid_out(rows, self.columns.shares(rows, units=rows.group))
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
        if self.columns.turn_discount is not None:
            rows = self.columns.compared(rows, rows.rewards)
        if self.columns.reference is None or has_groups(self.config):
            return rows, {}
        return self.columns.reference.fill(rows)

    def _rows(self, step: int, groups: Sequence[MixedGroup]) -> Rows:
        # A class of the user's own has keys that only its settings have.
        objective = self.objective.settings
        return rows_of(
            groups,
            step=step,
            temperature=self.config.rollout.temperature,
            baseline=objective.baseline,
            truncation=objective.truncation,
            stragglers=objective.stragglers,
            plain_temperature=self.objective.plain_temperature,
            mask_malformed=self.config.environments.mask_malformed,
        )

    def _passes(
        self, step: int, rows: Rows, measured: Mapping[str, float]
    ) -> Iterator[tuple[int, _Update]]:
        """The mini-batches of all passes over a step's rows, each with the number of its pass, from 0.

        Those of one pass are prepared together, by the weights before the first of them.
        The first pass takes the groups in their order, each further one in an order of its own, which
        depends on the run's seed, the step and the pass alone. Whatever a later pass needs of the step's
        first weights is in the rows already.
        """
        size = min(self.config.learner.minibatches, max(1, rows.groups))
        order = np.arange(rows.groups)
        for number in range(self.config.learner.update_epochs):
            if number:
                generator = keyed_generator("update epoch", self.config.run.seed, step, number)
                order = generator.permutation(rows.groups)
            shares = np.array_split(order, size)
            updates = [self._prepare(step, rows, np.sort(share), measured) for share in shares]
            yield from ((number, update) for update in updates)

    def _prepare(
        self, step: int, rows: Rows, share: np.ndarray, measured: Mapping[str, float]
    ) -> _Update:
        """The mini-batch of the groups with these numbers, which ascend."""
        nominal = len(share) * rows_of_group(self.config)
        rows = rows.select(torch.from_numpy(np.flatnonzero(np.isin(rows.group.numpy(), share))))
        # A mini-batch numbers its groups from 0.
        rows = rows.with_columns(
            group=torch.from_numpy(np.searchsorted(share, rows.group.numpy()).astype(np.int64))
        )
        columns = self.columns
        active = torch.nonzero(columns.active(rows)).squeeze(1)
        own = columns.pack(rows, active)
        scoring: list[MicroBatch] = []
        mismatched = self._mismatched(rows)
        if mismatched is not None:
            scoring = columns.laid_out(mismatched, columns.shares(mismatched))
        elif self.objective.columns & {"current", "proximal"}:
            scoring = columns.pack(rows)
        if "proximal" in self.objective.columns and rows.proximal is None:
            own = columns.with_proximal(own)
        if "reference" in self.objective.columns:
            own, scoring = columns.with_reference(own), columns.with_reference(scoring)
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

    @torch.no_grad()
    def _scalars(self, update: _Update) -> dict[str, float]:
        fixed = {**update.fixed, **self.coefficients.scalars}
        step = int(fixed["step"])
        if update.mismatched or "current" not in self.objective.columns:
            # Every rank has all rows, so nothing needs to be reduced.
            fixed |= statistics_of(self.objective, update.rows, step)
            return {**fixed, **(self._gain(update.scoring) if update.mismatched else {})}
        totals: dict[str, float] = {}
        scored = self.engine.score(update.scoring)
        for micro, (logprobs, entropy) in zip(update.scoring, scored, strict=True):
            if micro.dummy:
                continue
            rows = micro.to(self.engine.device).rows
            rows = rows.with_columns(logprobs=logprobs, entropy=entropy)
            for name, value in statistics_of(self.objective, rows, step).items():
                totals[name] = totals.get(name, 0.0) + value
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
        sums = dict(result.sums)
        critic: dict[str, float] = {}
        if result.critic is not None:
            sums |= result.critic.sums
            critic = {
                "critic_loss": result.critic.loss,
                "critic_grad_norm": result.critic.grad_norm,
            }
        return {
            # First, so that an objective of one's own can't take a name of these. Rows that the loss refuses have no
            # sums to report.
            **(self.objective.report(sums, scalars) if result.applied else {}),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            **critic,
            "applied": float(result.applied),
            **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
            "rows": float(update.rows.count),
            "rows_active": float(update.active),
            "micro_batches": float(len(update.micro_batches)),
            "forward_tokens": float(update.forward_tokens),
            **looked,
            **update.measured,
            **self.coefficients.metrics,
        }


def _kl_from_start(rows: Sequence[Rows], logprobs: Sequence[Tensor]) -> float:
    """Mean k3 of own tokens from the policy at the step's start, an estimate of KL(π_prox‖π_θ), over all
    ranks."""
    total = tokens = 0.0
    for these, scored in zip(rows, logprobs, strict=True):
        assert these.proximal is not None
        own = ~these.expert
        gap = (widened(scored) - widened(these.proximal))[own]
        total += float(k3(gap).double().sum())
        tokens += len(gap)
    total, tokens = sum_over_ranks([total, tokens])
    return total / max(tokens, 1.0)


_COUNTED_ONCE = frozenset(
    {"rows", "rows_active", "tokens_own", "tokens_expert", "preference_pairs"}
)
_SUMMED = frozenset({"micro_batches", "forward_tokens"})
_GREATEST = frozenset({"ratio_max", "k3_p99"})


def _named(updates: Sequence[Mapping[str, float]], first: int, lr: float) -> dict[str, float]:
    """Metrics of a step from those of its mini-batches, each under ``train/``; the first ones, this many, are those
    of the first pass, which has every row once."""
    names = dict.fromkeys(name for one in updates for name in one)
    # Without active rows a mini-batch has no step of the optimizer, and no gradient.
    made = [one for one in updates if "grad_norm" in one]
    metrics = {"train/lr": lr, "train/updates": float(len(made))}
    for name in names:
        values = [one[name] for one in updates if name in one]
        if name == "log_ratio_max_lag0":
            # Only in the first update are the weights those that sampled.
            if name not in made[0]:
                continue
            value = made[0][name]
        elif name in _COUNTED_ONCE:
            value = sum(one[name] for one in updates[:first] if name in one)
        elif name in _SUMMED:
            value = sum(values)
        elif name in _GREATEST:
            value = max(values)
        else:
            value = sum(values) / len(values)
        metrics[f"train/{name}"] = value
    return metrics
