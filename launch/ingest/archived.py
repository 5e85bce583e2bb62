"""Makes problems and traces of an archive's samples, as the very tokens that were sampled.

A problem that was asked in several groups is one problem with all its distinct samples. What a run trains
on as a group becomes a problem of its own: a pair, or else a single trace where no worker samples beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...common.config import Config, EvalSetConfig, SourceConfig
from ...common.errors import DataError
from ...common.models import read_model_config
from ...common.objectives.keys import EQUAL_REWARDS
from ...common.records import ExpertTrace, FinishReason, Group, Problem, Sample, Source, Verdict
from ...common.seeds import keyed_generator
from ...replay import archive
from ...replay.forms import data_files
from ...reward.grades import GradeItem, with_grade
from ...reward.grading import Grader
from . import regrading
from .counts import SourceCounts, drawn
from .pairing import pairs_of


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A problem, and the samples of all groups that asked it."""

    number: int
    """Place among the archive's problems, from 0."""
    group: Group
    """The first of its groups."""
    samples: dict[bytes, Sample] = field(default_factory=dict)
    """Distinct samples by their tokens."""
    right: list[Sample] = field(default_factory=list)
    wrong: list[Sample] = field(default_factory=list)


def of_archive(path: Path) -> bool:
    """Whether a source's file or folder is an archive.

    Raises:
        DataError: there is no such file.
    """
    return archive.is_archive(data_files(path)[0])


def refuse_archive_keys(source: SourceConfig | EvalSetConfig) -> None:
    """Raises ``DataError`` if a source that isn't an archive has a key about an archive's samples."""
    if isinstance(source, SourceConfig) and (source.pairs is not None or source.regrade):
        key = "regrade" if source.pairs is None else "pairs"
        raise DataError(
            f"data.train {source.short_name}: {key} is about an archive's samples, and "
            f"{source.path} isn't an archive: leave it out"
        )


class ArchiveReader:
    """Reads one archive after another.

    Args:
        config: what is left out, and what the run trains on.
        tokenizer: the model's.
        digest: the tokenizer's.
        grader: grades samples anew, where a source asks for that.
        doing: called for every group with what is being done.
        alone: whether the run trains on stored responses alone.
        traces: whether it uses any.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        digest: str,
        grader: Grader,
        doing: Callable[[str], None],
        *,
        alone: bool,
        traces: bool,
    ) -> None:
        self._config = config
        self._traces = traces
        self._alone = alone
        self._pairs_up = alone and config.learner.objective.rejects
        self._digest = digest
        self._grader = grader
        self._doing = doing
        model = read_model_config(config.model.path)
        size = model.get("text_config", model).get("vocab_size")
        self._vocabulary = len(tokenizer) if size is None else int(size)

    def read(
        self, source: SourceConfig | EvalSetConfig, path: Path, counts: SourceCounts
    ) -> tuple[list[Problem], list[ExpertTrace]]:
        """Problems and traces of an archive, with counts of what was left out.

        Raises:
            DataError: it is damaged, is of a model with another tokenizer, or has no problem left; or it is to be graded
                anew, and no group has what the reward asks for.
        """
        if isinstance(source, SourceConfig) and source.regrade:
            counts.lacking += regrading.check(self._config.reward, data_files(path))
        asked = list(self._asked(path, counts).values())
        if isinstance(source, SourceConfig):
            asked = self._judged(asked, source, counts)
        # A limit counts problems that can be used.
        limit, seed = source.limit, getattr(source, "seed", None)
        found: dict[str, tuple[Group, list[tuple[Sample, ...]], SourceCounts]] = {}
        usable: list[str] = []
        for one in asked:
            if seed is None and len(usable) == limit:
                break
            name, of_it = f"{source.short_name}/{one.number}", SourceCounts()
            groups = self._groups(one, source, of_it)
            found[name] = one.group, groups, of_it
            if groups:
                usable.append(name)
        not_drawn: set[str] = set()
        if limit is not None and seed is not None:
            not_drawn = set(usable) - drawn(usable, limit, seed)
        made = _Made(source.short_name, self._digest)
        for name, (group, groups, of_it) in found.items():
            if name in not_drawn:
                continue
            counts.add(of_it)
            for samples in groups:
                made.add(group, samples)
                if self._pairs_up and samples:
                    right, wrong = samples
                    counts.add_pair(len(right.tokens) - len(wrong.tokens))
        if not made.problems:
            lacking = (
                "a right and a wrong sample that make a pair" if self._pairs_up else "a use here"
            )
            raise DataError(
                f"{path}: not one problem of the archive's {counts.used:,} groups has {lacking} "
                f"({counts}): name another archive, or take a filter off"
            )
        counts.problems, counts.traces = len(made.problems), len(made.traces)
        return made.problems, made.traces

    # What was asked, and what came.

    def _asked(self, path: Path, counts: SourceCounts) -> dict[tuple[bytes, str], _Asked]:
        found: dict[tuple[bytes, str], _Asked] = {}
        data = self._config.data
        for file in data_files(path):
            for one in archive.read(file):
                group = one.group
                where = f"{file}: group {group.group_id} of step {one.step}"
                self._doing(f"{file.name}: group {group.group_id}")
                counts.used += 1
                samples = (*group.samples, *one.replaced)
                self._check(where, group, samples)
                if len(group.prompt_tokens) > data.max_prompt_tokens:
                    if data.overlong == "refuse":
                        raise DataError(
                            f"{where} has a prompt of {len(group.prompt_tokens):,} tokens, and "
                            f"data.max_prompt_tokens is {data.max_prompt_tokens:,}: raise it, or set "
                            f"data.overlong=drop"
                        )
                    counts.long_prompts += 1
                    continue
                key = group.prompt_tokens.tobytes(), group.gold
                if key not in found:
                    found[key] = _Asked(number=len(found), group=replace(group, samples=()))
                for sample in samples:
                    found[key].samples.setdefault(sample.tokens.tobytes(), sample)
        return found

    def _check(self, where: str, group: Group, samples: Sequence[Sample]) -> None:
        texts = (group.prompt_tokens, *(sample.tokens for sample in samples))
        highest = max((int(tokens.max()) for tokens in texts if len(tokens)), default=0)
        if highest >= self._vocabulary:
            raise DataError(
                f"{where} has token {highest}, and the model of model.path="
                f"{self._config.model.path} knows {self._vocabulary:,}: the archive is of a model with "
                f"another tokenizer"
            )
        if not len(group.prompt_tokens):
            raise DataError(f"{where} has an empty prompt: leave it out of the archive")

    # Which of it is right.

    def _judged(
        self, asked: list[_Asked], source: SourceConfig, counts: SourceCounts
    ) -> list[_Asked]:
        """The problems with their right and wrong samples; without those that the source's filters name."""
        longest = source.max_target_tokens
        for one in asked:
            usable = list(self._usable(one.samples.values(), counts))
            if longest is not None:
                short = [sample for sample in usable if len(sample.tokens) <= longest]
                counts.filter(f"samples over {longest:,} tokens", len(usable) - len(short))
                usable = short
            if source.regrade:
                usable = self._regraded(one.group, usable)
            for sample in usable:
                if not sample.has_verdict:
                    counts.filter("samples without a verdict", 1)
                elif sample.verdict is not Verdict.CORRECT:
                    one.wrong.append(sample)
                elif not sample.reward:
                    counts.unpaid_traces += 1
                elif sample.finish_reason is not FinishReason.STOP:
                    counts.filter("right samples that were cut", 1)
                else:
                    one.right.append(sample)
        if source.correct_only:
            counts.filter("samples not correct", sum(len(one.wrong) for one in asked))
            right = [one for one in asked if one.right]
            counts.filter("problems without a right sample", len(asked) - len(right))
            for one in right:
                one.wrong = []
            return right
        return asked

    def _usable(self, samples: Iterable[Sample], counts: SourceCounts) -> Iterator[Sample]:
        limit = self._config.rollout.max_new_tokens
        for sample in samples:
            if sample.finish_reason in (FinishReason.DEADLINE, FinishReason.ABORT):
                counts.filter("samples cut at a deadline", 1)
            elif not len(sample.tokens):
                counts.filter("samples without a token", 1)
            elif (sample.source == Source.ENVIRONMENT).any():
                counts.filter("samples with an environment's text", 1)
            elif len(sample.tokens) > limit:
                counts.long_traces += 1
            else:
                yield sample

    def _regraded(self, group: Group, samples: Sequence[Sample]) -> list[Sample]:
        items = [GradeItem.of(group, sample) for sample in samples]
        return [
            with_grade(sample, grade, self._grader.name)
            for sample, grade in zip(samples, self._grader.grade_texts(items), strict=True)
        ]

    # What a run trains on.

    def _groups(
        self, one: _Asked, source: SourceConfig | EvalSetConfig, counts: SourceCounts
    ) -> list[tuple[Sample, ...]]:
        """The samples of each group that the run makes of a problem; no groups if it has no use for it."""
        if not isinstance(source, SourceConfig):
            return [()]
        if self._pairs_up:
            return list(self._pairs(one, source, counts))
        accepted = []
        for sample in (*one.right, *one.wrong):
            assert sample.verdict is not None
            if sample.verdict.value in self._config.expert.accept:
                accepted.append(sample)
            else:
                name = sample.verdict.value
                counts.refused_traces[name] = counts.refused_traces.get(name, 0) + 1
        if not self._alone:
            return [tuple(accepted) if self._traces else ()]
        return [(sample,) for sample in accepted]

    def _pairs(
        self, one: _Asked, source: SourceConfig, counts: SourceCounts
    ) -> Iterator[tuple[Sample, Sample]]:
        seed = source.pairs.seed if source.pairs is not None else 0
        chosen = pairs_of(
            [len(sample.tokens) for sample in one.right],
            [len(sample.tokens) for sample in one.wrong],
            source.pairs,
            keyed_generator(seed, "pairs", one.group.prompt_tokens.tobytes().hex(), one.group.gold),
        )
        for right, wrong in ((one.right[r], one.wrong[w]) for r, w in chosen):
            assert right.reward is not None
            assert wrong.reward is not None
            if right.reward - wrong.reward <= EQUAL_REWARDS:
                counts.filter("pairs whose wrong sample is paid as much", 1)
                continue
            yield right, wrong


class _Made:
    """Problems and traces with the ids that a source's have: ``<name>/<row>`` and ``<problem>#<number>``."""

    def __init__(self, name: str, digest: str) -> None:
        self._name = name
        self._digest = digest
        self.problems: list[Problem] = []
        self.traces: list[ExpertTrace] = []

    def add(self, group: Group, samples: Sequence[Sample]) -> None:
        name = f"{self._name}/{len(self.problems)}"
        traces = [
            ExpertTrace.of(
                sample, trace_id=f"{name}#{place}", problem_id=name, tokenizer_digest=self._digest
            )
            for place, sample in enumerate(samples)
        ]
        self.traces += traces
        self.problems.append(
            Problem(
                problem_id=name,
                prompt_text=group.prompt_text,
                prompt_tokens=group.prompt_tokens,
                gold=group.gold,
                data_source=group.data_source,
                ability="",
                trace_ids=tuple(trace.trace_id for trace in traces),
                extra=group.extra,
            )
        )
