"""Rows on their way to an update: laid out over ranks and micro-batches, with the columns that the
objective asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.config import Config
from ...common.objectives.keys import Kl, OwnTokens
from ..engine.critic import CriticEngine
from ..engine.deepspeed_engine import DeepSpeedEngine
from ..forward.policy import Policy
from ..losses.finite import widened
from ..losses.penalties import kl_in_reward
from ..losses.ratios import row_sums
from ..objectives import Objective
from ..objectives.base import where
from ..rendezvous import sum_over_ranks
from ..rows.groups import rows_of
from ..rows.microbatch import MicroBatch, micro_batch
from ..rows.packing import plan
from ..rows.rows import Rows, ragged
from .reference import Reference

Scores = Callable[[list[MicroBatch]], Sequence[Tensor]]
"""One ``[N]`` value per token of each micro-batch; every rank has the same number of micro-batches."""


class Columns:
    """Lays out rows and fills in their columns, on every rank.

    Args:
        engine: this rank's engine.
        config: the run's config.
        objective: says which columns it needs, and which rows stay together.
        penalised: whether a KL to the reference is in the reward.
        reference_folder: where the reference's log-probs of stored rows are kept; None = nowhere.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: Config,
        objective: Objective,
        *,
        penalised: bool,
        reference_folder: Path | None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.objective = objective
        settings = objective.settings
        self.turn_discount = settings.turn_discount if isinstance(settings, OwnTokens) else None
        """γ of the turns of episodes; None = tokens have the advantages of their rows."""
        self.reference: Reference | None = None
        if "reference" in objective.columns or penalised:
            self.reference = Reference(config, engine, reference_folder)
        self.readers: list[Policy | CriticEngine] = [engine.policy]
        """All that read the micro-batches, each in its own layout."""
        if engine.critic is not None:
            self.readers.append(engine.critic)
        if self.reference is not None:
            self.readers.append(self.reference.policy)

    # Layout.

    def units(self, rows: Rows) -> Tensor | None:
        """``[R]`` the unit of each row that nothing splits; None if each row is its own."""
        if self.objective.unit == "row":
            return None
        # Both rows of a pair are in one group, so keeping the group together keeps the pair.
        return rows.group

    def active(self, rows: Rows) -> Tensor:
        """``[R]`` bool: rows whose unit has an active row (units stay whole)."""
        active = self.objective.active(rows)
        units = self.units(rows)
        if units is None or not len(units):
            return active
        most = torch.zeros(int(units.max()) + 1, dtype=torch.int64)
        return most.index_add(0, units, active.to(torch.int64))[units] > 0

    def shares(
        self, rows: Rows, which: Tensor | None = None, units: Tensor | None = None
    ) -> list[Tensor]:
        """Indices of the rows (or of ``which`` only) in each of this rank's micro-batches; empty for a
        dummy. ``units`` stay together; None = those of the objective."""
        if which is None:
            which = torch.arange(rows.count)
        if units is None:
            units = self.units(rows)
        shares = plan(
            rows.forward_lengths[which].numpy(),
            (which if units is None else units[which]).numpy(),
            budget=self.config.learner.micro_batch_tokens,
            ranks=self.engine.world_size,
            # Where one of them pads, the budget counts its padding.
            packed=all(reader.layout == "packed" for reader in self.readers),
        )
        return [which[torch.from_numpy(part)] for part in shares[self.engine.rank]]

    def laid_out(self, rows: Rows, shares: Sequence[Tensor]) -> list[MicroBatch]:
        """The micro-batches of these shares."""
        return [micro_batch(rows.select(part), self.engine.policy.layout) for part in shares]

    def pack(self, rows: Rows, which: Tensor | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of the rows, or of ``which`` only."""
        return self.laid_out(rows, self.shares(rows, which))

    # Columns of micro-batches.

    def with_proximal(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """With the log-probs of the current weights as ``proximal``."""
        scored = [logprobs for logprobs, _ in self.engine.score(micro_batches)]
        return _with_column("proximal", micro_batches, scored)

    @torch.no_grad()
    def with_reference(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """With the reference's log-probs."""
        assert self.reference is not None
        # Stored rows have theirs already, and so have those of a step with several passes; that is so of all of
        # them, on every rank.
        if all(micro.rows.reference is not None for micro in micro_batches):
            return micro_batches
        return _with_column("reference", micro_batches, self.reference.score(micro_batches))

    # Columns of a step's whole batch.

    def filled(self, rows: Rows, *, start: bool) -> Rows:
        """All rows with the columns that every pass over them shares.

        Args:
            rows: the step's rows, the same on each rank.
            start: whether the log-probs of the step's start are needed, as ``proximal``.
        """
        if start:
            rows = rows.with_columns(
                proximal=self.of_tokens(
                    rows, lambda micros: [logprobs for logprobs, _ in self.engine.score(micros)]
                )
            )
        if "reference" in self.objective.columns:
            rows = self.with_reference_of(rows)
        return rows

    def with_reference_of(self, rows: Rows) -> Rows:
        """All rows with the reference's log-probs."""
        if rows.reference is not None:
            return rows
        assert self.reference is not None
        return rows.with_columns(reference=self.of_tokens(rows, self.reference.score))

    @torch.no_grad()
    def of_tokens(self, rows: Rows, scores: Scores) -> Tensor:
        """``[N]`` float32 values of all tokens: each rank scores its share of the rows, and has them all."""
        values = torch.zeros(len(rows.row), dtype=torch.float32)
        starts = rows.lengths.cumsum(0) - rows.lengths
        shares = self.shares(rows)
        micro_batches = self.laid_out(rows, shares)
        for part, micro, scored in zip(shares, micro_batches, scores(micro_batches), strict=True):
            if not micro.dummy:
                values[ragged(starts[part], rows.lengths[part])] = scored.float().cpu()
        if self.engine.world_size > 1:
            # Each place is filled by one rank, and 0 on all others.
            dist.all_reduce(values)
        return values

    def compared(self, rows: Rows, rewards: Tensor) -> Rows:
        """All rows with the advantages of these rewards ``[R]``, of their turns where the objective asks for that."""
        baseline = self.objective.settings.baseline
        return rows.with_advantages(rewards, baseline, self.turn_discount)

    def penalised(self, rows: Rows, coefficient: float) -> tuple[Rows, dict[str, float]]:
        """Rows whose advantages include the KL in the reward: every rank scores its share under π_ref, and
        all ranks get all rows' sums."""
        settings = self.objective.settings
        assert isinstance(settings, Kl)
        gaps, k1 = torch.zeros(rows.count, dtype=torch.float64), 0.0
        shares = self.shares(rows)
        scored = self.with_reference(self.laid_out(rows, shares))
        for part, micro in zip(shares, scored, strict=True):
            if micro.dummy:
                continue
            these = micro.rows
            assert these.reference is not None
            behaviour = where(~these.expert, widened(these.behaviour))
            reference = where(~these.expert, widened(these.reference))
            penalty = kl_in_reward(behaviour, reference, settings.kl_reward_form)
            gaps[part] = row_sums(penalty.double(), these.row, these.count)
            k1 += float((behaviour - reference).double().sum())
        *found, k1 = sum_over_ranks([*gaps.tolist(), k1])
        paid = rows.rewards - coefficient * torch.tensor(found, dtype=torch.float64)
        changed = self.compared(rows, paid)
        tokens = int((~rows.expert).sum())
        return changed, {"k1_reference": k1 / max(tokens, 1)}


def _with_column(
    name: str, micro_batches: Sequence[MicroBatch], scored: Sequence[Tensor]
) -> list[MicroBatch]:
    """The micro-batches with ``[N]`` log-probs as a column of their rows; dummies stay as they are."""
    return [
        micro
        if micro.dummy
        else replace(
            micro, rows=micro.rows.with_columns(**{name: logprobs.to(micro.rows.row.device)})
        )
        for micro, logprobs in zip(micro_batches, scored, strict=True)
    ]


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
