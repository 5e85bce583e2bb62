"""The sources of the steps' rows: the ledger, or stored expert traces (offline)."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...common.config import Config
from ...common.errors import DataError, FullError, StoreError
from ...common.models import read_model_config
from ...common.objectives.experts import ExGrpo
from ...common.records import ExpertTrace, Group
from ...common.seeds import keyed_generator
from ...replay import archive
from ...replay.archive_columns import ArchivedGroup
from ...replay.evaluating.held_out import held_out
from ...replay.experience import Experience
from ...replay.ledger import Ledger
from ...replay.ledger_records import Row, Waiting
from ...replay.rules import leases
from ...replay.store import RunStore
from ..resume.journal import Journal
from .groups import MixedGroup

log = logging.getLogger("tandem.learner")

CACHED_TRACES = 4096
"""Number of traces kept in memory, since each is used again in every pass."""
READ_AT_ONCE = 256
"""Number of traces or problems that are fetched from Redis at a time."""
COMPARED_ROWS = 16
"""Number of the journal's rows that are compared with those in Redis at a start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """Everything that a step is trained on."""

    step: int
    """The step's number, n."""
    row: dict[str, Any]
    """The row as it is in the journal."""
    groups: list[MixedGroup]
    """The step's groups, in the row's order."""
    quarantined: bool = False
    """Whether the row is marked: it uses up its number and isn't trained on."""


Fetch = Callable[[], StepBatch]
"""Fetches the samples of an existing row, apart from the waiting, so that both can be timed."""


class BatchSource(ABC):
    """Gives the batch of each step, the same one however often it is asked for."""

    total_steps: int
    """Number of steps of the run; for passes over a ledger that rejects groups, an upper bound."""

    @abstractmethod
    def begin(self, term: int, journal: Journal, step: int) -> int:
        """Brings the source in line with the journal; returns J, the number of steps that have rows.

        Args:
            term: the learner's term.
            journal: the journal as it was found; its outcomes above ``step`` are given up.
            step: step of the checkpoint that the run continues from.
        """

    @abstractmethod
    def take(self, step: int, term: int) -> Fetch | Waiting:
        """Returns a function that fetches the step's batch, or whom the batch waits for.

        Raises:
            FencedError: a newer learner has taken over.
        """

    @abstractmethod
    def confirm(self, step: int, term: int) -> None:
        """Records that the step is trained."""

    @abstractmethod
    def quarantine(self, step: int, term: int, reason: str, checkpoint: int) -> None:
        """Records that the step used up its number and changed nothing.

        It may have been trained before the learner went back to the newest checkpoint, whose step is
        ``checkpoint``.
        """

    @abstractmethod
    def durable(self, step: int, term: int) -> None:
        """Records that no checkpoint before this step will be gone back to."""

    @abstractmethod
    def waiting_for(self) -> str:
        """Says whom the next step waits for."""

    def checkpoint_is_due(self, saved: int) -> bool:
        """Whether what was trained since the checkpoint of step ``saved`` fills Redis too much."""
        return False

    def is_full(self) -> bool:
        """Whether no batch can come until samples are freed."""
        return False

    def held_out(self) -> list[MixedGroup]:
        """Pairs that are measured and not trained on, a group each."""
        return []


class TraceCache:
    """Expert traces by id; keeps those that were used last."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._kept: OrderedDict[str, ExpertTrace] = OrderedDict()

    def get(self, ids: Sequence[str]) -> dict[str, ExpertTrace]:
        """The traces with these ids."""
        wanted = list(dict.fromkeys(ids))
        missing = [name for name in wanted if name not in self._kept]
        for trace in self._runs.traces(missing) if missing else ():
            self._kept[trace.trace_id] = trace
        traces = {}
        for name in wanted:
            self._kept.move_to_end(name)
            traces[name] = self._kept[name]
        while len(self._kept) > CACHED_TRACES:
            self._kept.popitem(last=False)
        return traces


class LedgerSource(BatchSource):
    """Rows of graded groups, cut by the ledger.

    Args:
        ledger: the run's.
        runs: has the traces.
        replays_from: the share of right samples in a step from which on own successes come back; None = they don't.
    """

    def __init__(
        self, ledger: Ledger, runs: RunStore, *, replays_from: float | None = None
    ) -> None:
        self._ledger = ledger
        self._traces = TraceCache(runs)
        self._experience = Experience(runs)
        self._replays_from = replays_from
        self._told_full = False
        self._bytes: dict[int, int] = {}  # of the samples of each step that was taken
        settings = ledger.settings
        groups = (settings.passes or 0) * ledger.order.pass_length
        self.total_steps = settings.steps or math.ceil(groups / settings.groups_per_step)

    def begin(self, term: int, journal: Journal, step: int) -> int:
        # Rows that Redis lacks, and some before them: a different row there is another history.
        first = max(1, self._ledger.journalled() - COMPARED_ROWS + 1)
        rows = (Row.from_dict(journal.row_of(n)) for n in range(first, journal.last_step + 1))
        written = self._ledger.reassert(rows, term)
        if written:
            log.warning(
                f"Redis had lost {written} row(s) that stand in the journal; they are written again"
            )
        # For steps that the checkpoint includes, Redis may have lost the outcome: nobody trains these
        # again, and no later checkpoint would be durable over them.
        for taken in self._ledger.open_steps():
            outcome = journal.outcome(taken)
            if outcome == "quarantined":
                self._ledger.quarantine(taken, term, "quarantined before", step)
            elif outcome == "applied" and taken <= step:
                self._ledger.confirm(taken, term)
        return self._ledger.journalled()

    def take(self, step: int, term: int) -> Fetch | Waiting:
        row = self._ledger.take(step, term)
        if isinstance(row, Waiting):
            return row
        self._bytes[step] = sum(entry.nbytes for entry in row.ids)
        return partial(self._fetch, row)

    def _fetch(self, row: Row) -> StepBatch:
        groups: list[MixedGroup] = []
        if not row.quarantined:
            fetched = self._ledger.fetch(row)
            traces = self._read([name for entry in row.ids for name in entry.trace_ids])
            groups = [
                mixed(
                    group,
                    [traces[name] for name in entry.trace_ids if name in traces],
                    entry.replaced,
                )
                for group, entry in zip(fetched, row.ids, strict=True)
            ]
            if self._replays_from is not None:
                self._learn(row.step, fetched, self._replays_from)
        return StepBatch(
            step=row.step, row=row.to_dict(), groups=groups, quarantined=bool(row.quarantined)
        )

    def _learn(self, step: int, groups: Sequence[Group], replays_from: float) -> None:
        """Keeps the step's successes, unless Redis is full: the checkpoint that frees memory comes after the step."""
        try:
            self._experience.learn(step, groups, replays_from)
        except FullError as error:
            if not self._told_full:
                log.warning(f"past successes can't be kept while Redis is full: {error}")
            self._told_full = True
        else:
            self._told_full = False

    def _read(self, names: Sequence[str]) -> dict[str, ExpertTrace]:
        """Traces by id. Of own successes some may be lacking, if Redis lost its last second: the data don't have
        them to be put again."""
        try:
            return self._traces.get(names)
        except StoreError:
            if self._replays_from is None:
                raise
            there = self._experience.there(names)
            lost = sorted(set(names) - there)
            if not lost:
                raise
            log.warning(
                f"Redis lost {len(lost)} past success(es), which their groups do without: {', '.join(lost[:5])}"
            )
            return self._traces.get([name for name in names if name in there])

    def confirm(self, step: int, term: int) -> None:
        self._ledger.confirm(step, term)

    def quarantine(self, step: int, term: int, reason: str, checkpoint: int) -> None:
        self._ledger.quarantine(step, term, reason, checkpoint)

    def durable(self, step: int, term: int) -> None:
        self._ledger.durable(step, term)
        self._bytes = {taken: size for taken, size in self._bytes.items() if taken > step}

    def checkpoint_is_due(self, saved: int) -> bool:
        since = sum(size for step, size in self._bytes.items() if step > saved)
        return leases.checkpoint_is_due(since, self._ledger.maxmemory())

    def is_full(self) -> bool:
        return self._ledger.is_full()

    def waiting_for(self) -> str:
        reason = self._ledger.waiting_for()
        if self._ledger.is_full():
            reason += (
                f"; Redis is {self._ledger.memory_share():.0%} full, so that nothing is leased"
            )
            # No checkpoint lets their samples go.
            if held := self._ledger.quarantined_steps():
                reason += (
                    f", and keeps the samples of {held} quarantined step(s) for you to look at "
                    f"(`tandem status --json`): raise replay.maxmemory_mb, and mend what they failed on"
                )
            else:
                reason += ": raise replay.maxmemory_mb, or lower learner.checkpoint_every"
        return reason


def mixed(group: Group, traces: Sequence[ExpertTrace], replaced: Sequence[int]) -> MixedGroup:
    """The group with these traces, which take the places of some of its own samples."""
    if not replaced:
        return MixedGroup(group=group, traces=tuple(traces))
    kept = tuple(s for place, s in enumerate(group.samples) if place not in replaced)
    gone = tuple(group.samples[place] for place in replaced if place < len(group.samples))
    return MixedGroup(group=replace(group, samples=kept), traces=tuple(traces), replaced=gone)


class StoredSource(BatchSource):
    """What is stored: no rollout worker, no lease, but the same journal."""

    def begin(self, term: int, journal: Journal, step: int) -> int:
        return journal.last_step

    def take(self, step: int, term: int) -> Fetch | Waiting:
        if step > self.total_steps:
            return Waiting(group_id="", state="", worker="", reason="run ended", ended=True)
        return partial(self._fetch, step)

    @abstractmethod
    def _fetch(self, step: int) -> StepBatch:
        """The batch of a step."""

    def confirm(self, step: int, term: int) -> None:
        """Does nothing: the journal alone keeps count."""

    def quarantine(self, step: int, term: int, reason: str, checkpoint: int) -> None:
        """Does nothing: the journal alone keeps count."""

    def durable(self, step: int, term: int) -> None:
        """Does nothing: what is stored stays."""

    def waiting_for(self) -> str:
        raise StoreError("an offline step waits for nobody")


class OfflineSource(StoredSource):
    """Rows of stored expert traces.

    Pass e goes through the problems with accepted traces in a permutation keyed by (run seed, e); step n
    takes the next ``replay.groups_per_step`` of them, across the borders of passes. The traces of one
    problem are a group: usually one, or the better and the worse one of a pair.
    """

    def __init__(self, config: Config, runs: RunStore) -> None:
        self._runs = runs
        self._cache = TraceCache(runs)
        self._seed = config.run.seed
        self._size = config.replay.groups_per_step
        # Those whose verdict may not enter were left out of the ledger.
        accepted = self._accepted()
        self._held_out = self._drawn_out(accepted, config.data.heldout_pairs)
        self._ids = [names for name, names in accepted.items() if name not in self._held_out]
        if not self._ids:
            raise DataError(
                "learner.source=offline: the data has no expert trace: name a source with a target column"
            )
        self._drawn: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        groups = (config.run.passes or 0) * len(self._ids)
        self._last = groups if config.run.passes else None
        self.total_steps = config.run.steps or math.ceil(groups / self._size)

    def _accepted(self) -> dict[str, tuple[str, ...]]:
        """Trace ids of each problem."""
        ids = self._runs.all_trace_ids()
        accepted: dict[str, list[str]] = {}
        for start in range(0, len(ids), READ_AT_ONCE):
            for trace in self._runs.traces(ids[start : start + READ_AT_ONCE]):
                accepted.setdefault(trace.problem_id, []).append(trace.trace_id)
        return {problem: tuple(names) for problem, names in accepted.items()}

    def _drawn_out(
        self, accepted: Mapping[str, tuple[str, ...]], share: float
    ) -> dict[str, tuple[str, ...]]:
        """The part of the problems that is held out."""
        if not share:
            return {}
        ids = list(accepted)
        problems = (
            problem
            for start in range(0, len(ids), READ_AT_ONCE)
            for problem in self._runs.problems(ids[start : start + READ_AT_ONCE])
        )
        return {name: accepted[name] for name in held_out(problems, share, self._seed)}

    def held_out(self) -> list[MixedGroup]:
        # In the order of the data, whatever order the draw has.
        names = sorted(self._held_out.values())
        return self._groups(names, "held-out") if names else []

    def _fetch(self, step: int) -> StepBatch:
        chosen = self.names(step)
        groups = self._groups(chosen, f"offline:{step}")
        flat = [name for names in chosen for name in names]
        row = {"step": step, "short": len(chosen) < self._size, "offline": flat}
        return StepBatch(step=step, row=row, groups=groups)

    def _groups(self, chosen: Sequence[tuple[str, ...]], prefix: str) -> list[MixedGroup]:
        traces = self._cache.get([name for names in chosen for name in names])
        problems = self._runs.problems([traces[names[0]].problem_id for names in chosen])
        groups: list[MixedGroup] = []
        for place, (names, problem) in enumerate(zip(chosen, problems, strict=True)):
            group = Group.of(
                problem,
                (),
                group_id=f"{prefix}:{place}",
                attempt=1,
                worker="",
                trace_ids=names,
            )
            of_group = tuple(traces[name] for name in names)
            groups.append(MixedGroup(group=group, traces=of_group))
        return groups

    def names(self, step: int) -> list[tuple[str, ...]]:
        """Trace ids of each of a step's groups."""
        first = (step - 1) * self._size
        end = first + self._size if self._last is None else min(first + self._size, self._last)
        return [self._at(place) for place in range(first, end)]

    def _at(self, place: int) -> tuple[str, ...]:
        pass_, position = divmod(place, len(self._ids))
        if self._drawn[0] != pass_:
            order = keyed_generator(self._seed, "offline", pass_).permutation(len(self._ids))
            self._drawn = (pass_, order)
        return self._ids[int(self._drawn[1][position])]


class ArchiveSource(StoredSource):
    """Groups of an archive: step n trains on the n-th step of the archive as it was, and after the last
    one on the first again.

    Spans count the steps of the run that made it, and the learner's version those of this run: each group says how
    far apart they are (:attr:`MixedGroup.later`), so tokens keep the lag that they had.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        model = read_model_config(config.model.path)
        self._vocabulary = model.get("text_config", model).get("vocab_size")
        self._steps = list(archive.steps(folder))
        if not self._steps:
            raise DataError(f"data.archive={folder} has no groups: name another archive")
        self.total_steps = config.run.steps or (config.run.passes or 0) * len(self._steps)

    def _fetch(self, step: int) -> StepBatch:
        place = self._steps[(step - 1) % len(self._steps)]
        groups = []
        ids = []
        for one in place.read():
            self._check(one)
            groups.append(
                MixedGroup(
                    group=one.group,
                    traces=one.traces,
                    replaced=one.replaced,
                    later=step - one.step,
                )
            )
            ids.append(one.group.group_id)
        row = {
            "step": step,
            "short": False,
            "archived": {"file": place.path.name, "step": place.step, "groups": ids},
        }
        return StepBatch(step=step, row=row, groups=groups)

    def _check(self, one: ArchivedGroup) -> None:
        """Refuses a group that this run's model or settings can't take."""
        data, rollout = self._config.data, self._config.rollout
        where = f"data.archive={data.archive}: group {one.group.group_id} of step {one.step}"
        prompt = one.group.prompt_tokens
        responses = [sample.tokens for sample in one.group.samples]
        responses += [trace.tokens for trace in one.traces]
        longest = max(map(len, responses), default=0)
        # Of an episode the whole is bounded: see rollout/endpoint/sessions.py.
        fits = len(prompt) <= data.max_prompt_tokens and longest <= rollout.max_new_tokens
        if any(sample.episode is not None for sample in one.group.samples):
            fits = len(prompt) + longest <= data.max_prompt_tokens + rollout.max_new_tokens
        if not fits:
            raise DataError(
                f"{where} has a prompt of {len(prompt):,} tokens and responses of up to {longest:,}: "
                f"raise data.max_prompt_tokens={data.max_prompt_tokens:,} or "
                f"rollout.max_new_tokens={rollout.max_new_tokens:,}, and start over with --fresh"
            )
        highest = max(int(tokens.max()) for tokens in (prompt, *responses) if len(tokens))
        if self._vocabulary is not None and highest >= self._vocabulary:
            raise DataError(
                f"{where} has token {highest}, and the model of model.path={self._config.model.path} "
                f"knows {self._vocabulary:,}: the archive is of a model with another tokenizer"
            )


def source_of(config: Config, ledger: Ledger, runs: RunStore) -> BatchSource:
    """The source of batches that the run's config names."""
    if config.learner.source == "ledger":
        objective = config.learner.objective
        return LedgerSource(
            ledger,
            runs,
            replays_from=objective.replay_from if isinstance(objective, ExGrpo) else None,
        )
    if config.data.archive is not None:
        return ArchiveSource(config, Path(config.data.archive))
    return OfflineSource(config, runs)
