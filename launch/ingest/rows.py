"""Turns a source's rows into problems and expert traces: rendered, tokenised, graded; counts those left out.

Rows are taken in chunks, so that a file is never held whole, and a chunk's texts are encoded at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...common import prompts
from ...common.config import Config, EvalSetConfig, SourceConfig
from ...common.config.groups import has_groups, replays_own
from ...common.errors import DataError
from ...common.records import ExpertTrace, Float32Array, Problem, Verdict
from ...replay.forms import Content, DataRow, RowError, read_rows
from ...replay.forms.conversation import unread_label, unused_tools
from ...reward.answers.texts import read_gold
from ...reward.grading import Grade, Grader
from . import turns
from .accepting import accepted, item_of
from .archived import ArchiveReader, of_archive, refuse_archive_keys
from .chunk import Chunk, first_of
from .columns import broken, check_template, extra_of, task_of, with_tests
from .counts import SourceCounts, drawn
from .repeats import joined

OPENER = "<think>"
"""What the rendered prompt may end with; a trace that repeats it loses it."""
CHUNK_ROWS = 1024
SHOWN_TASK = 400
"""Characters of a task that stand for its prompt where people read one."""


def trains_on_traces(config: Config) -> bool:
    """Whether a run trains on stored responses alone."""
    return not has_groups(config)


def needs_traces(config: Config) -> bool:
    """Whether the data's expert traces are used at all; if not, they needn't be graded."""
    return (config.expert.per_group > 0 and not replays_own(config)) or trains_on_traces(config)


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A row on its way to a problem."""

    row: DataRow
    text: str
    gold: str
    judged: bool
    """Whether the data's own verdict counts."""
    task: Mapping[str, Any] | None = None
    """What its environment is given; None without one."""
    tokens: NDArray[np.int32] | None = None
    problem: Problem | None = None
    answers: tuple[turns.Answer, ...] = ()
    """All answers of its conversation, if they are learned from."""
    trace: ExpertTrace | None = None
    rejected: ExpertTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    """A chunk's rows on their way to tokens."""

    short: list[_Draft]
    """Rows with prompts."""
    shown: list[_Draft]
    """Rows whose environment shows them."""
    encoded: Future[list[NDArray[np.int32]]]
    """The tokens of the prompts."""


class SourceReader:
    """Turns the rows of one source after another into problems and traces."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        grader: Grader,
        doing: Callable[[str], None],
        *,
        grades: bool = True,
        plays: bool = True,
        messages: bool = False,
    ) -> None:
        """Nothing is read yet.

        Args:
            config: what is left out, and how answers are graded.
            tokenizer: the model's.
            grader: reads gold answers, and grades traces.
            doing: called for every chunk with what is being done.
            grades: whether traces are graded; if not, all of them are kept, and rows need no gold answer.
            plays: whether rows without a prompt need an environment of the config's.
            messages: whether problems keep the messages of their prompts, whatever the reward asks for.
        """
        check_template(config, tokenizer)
        self._config = config
        self._doing = doing
        self._longest = prompts.longest_token(tokenizer)
        self._tokenizer = tokenizer
        self._grader = grader
        self._grades = grades
        self._plays = plays
        self._messages = messages
        self._digest = prompts.tokenizer_digest(tokenizer)

    def read(
        self, source: SourceConfig | EvalSetConfig, file: Path
    ) -> tuple[list[Problem], list[ExpertTrace], SourceCounts]:
        """Problems and traces of one source, and counts of what was left out."""
        counts = SourceCounts()
        problems: list[Problem] = []
        traces: list[ExpertTrace] = []
        if of_archive(file):
            archives = ArchiveReader(
                *(self._config, self._tokenizer, self._digest, self._grader, self._doing),
                alone=trains_on_traces(self._config),
                traces=needs_traces(self._config),
            )
            return *archives.read(source, file, counts), counts
        refuse_archive_keys(source)
        # A held-out set's limit counts problems, which may have several rows.
        whole = (
            source
            if isinstance(source, SourceConfig)
            else source.model_copy(update={"limit": None})
        )
        for chunk in self.chunks(whole, file, counts):
            problems += chunk.problems
            traces += chunk.traces
        if not problems:
            first = next(iter(counts.bad_rows.first.values()), None)
            way_out = "raise data.max_prompt_tokens, or name another file"
            raise DataError(
                f"{file.name}: not one of its rows can be used ({counts}): "
                f"{f'the first, {first}' if first else way_out}"
            )
        expected = getattr(source, "rows", None)
        if expected is not None and counts.seen != expected:
            raise DataError(
                f"{source.short_name} should have {expected:,} rows and {file.name} has {counts.seen:,}, so "
                f"that it isn't the set that was meant: set rows of this set to {counts.seen} or null in "
                f"data.evaluate, if it is"
            )
        if isinstance(source, EvalSetConfig):
            problems = joined(problems, source.repeated)[: source.limit]
            counts.problems = len(problems)
            return problems, traces, counts
        seed = source.seed
        if source.limit is not None and seed is not None:
            kept = drawn([problem.problem_id for problem in problems], source.limit, seed)
            problems = [problem for problem in problems if problem.problem_id in kept]
            traces = [trace for trace in traces if trace.problem_id in kept]
            counts.problems, counts.traces = len(problems), len(traces)
        return problems, traces, counts

    def chunks(
        self,
        source: SourceConfig | EvalSetConfig,
        file: Path,
        counts: SourceCounts,
        *,
        excluded: Callable[[DataRow], str | None] = lambda row: None,
    ) -> Iterator[Chunk]:
        """The same in chunks, in the file's order, with the counts so far. A subset that is drawn by a
        seed is not: it can only be drawn once all rows are known.

        Args:
            source: what is read.
            file: where it is.
            counts: what becomes of its rows is added to them.
            excluded: why a row isn't wanted, whatever it holds; None = it is. Such a row doesn't count for the limit.
        """
        name = source.short_name
        left_out = None if self._config.data.bad_rows == "refuse" else counts.bad_rows
        whole = getattr(source, "turns", "last") == "all"
        if whole:
            turns.check(self._config, self._tokenizer)
        rows = read_rows(file, source.form, left_out, whole=whole)
        limit = source.limit if getattr(source, "seed", None) is None else None
        done = 0
        for drafts in self._rendered_chunks(rows, file, counts, excluded, ahead=limit is None):
            made = self._chunk(name, self._prompts(drafts, counts), source, counts)
            if limit is not None:
                usable = len(made.problems)
                made = first_of(made, limit - done)
                counts.over_limit += usable - len(made.problems)
            done += len(made.problems)
            counts.problems += len(made.problems)
            counts.traces += len(made.traces)
            if not self._config.environments.is_on:  # An environment may offer them.
                counts.unused_tools += sum(unused_tools(row.raw, row.content) for row in made.rows)
            yield made
            if limit is not None and done == limit:
                return

    def _rendered_chunks(
        self,
        rows: Iterator[DataRow],
        file: Path,
        counts: SourceCounts,
        excluded: Callable[[DataRow], str | None],
        *,
        ahead: bool,
    ) -> Iterator[_Rendered]:
        """Chunks of rendered rows, whose prompts are being encoded by another thread.

        Args:
            ahead: whether the next chunk is read meanwhile; not where its rows may not be wanted any more.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="encode") as encoder:
            waiting: deque[_Rendered] = deque()
            while chunk := [with_tests(row, self._grader) for row in islice(rows, CHUNK_ROWS)]:
                self._doing(f"{file.name}: row {chunk[-1].number + 1:,}")
                counts.used += len(chunk)
                wanted = []
                for row in chunk:
                    reason = excluded(row)
                    if reason is None:
                        wanted.append(row)
                    else:
                        counts.filter(reason, 1)
                waiting.append(self._render(self._golds(wanted, counts), counts, encoder))
                if len(waiting) > ahead:
                    yield waiting.popleft()
            yield from waiting

    def _chunk(
        self,
        name: str,
        drafts: list[_Draft],
        source: SourceConfig | EvalSetConfig,
        counts: SourceCounts,
    ) -> Chunk:
        for draft in drafts:
            assert draft.tokens is not None
            content = draft.row.content
            draft.problem = Problem(
                problem_id=f"{name}/{draft.row.number}",
                prompt_text=draft.text,
                prompt_tokens=draft.tokens,
                gold=draft.gold,
                data_source=content.data_source or name,
                ability=content.ability,
                trace_ids=(),
                extra=extra_of(
                    draft.row,
                    self._grader,
                    self._config.data,
                    draft.task,
                    messages=self._messages,
                ),
            )
        if isinstance(source, SourceConfig):
            drafts = self._with_traces(drafts, source, counts)
        problems, traces = [], []
        for draft in drafts:
            assert draft.problem is not None
            problem = draft.problem
            of_it = [trace for trace in (draft.trace, draft.rejected) if trace is not None]
            if of_it:
                traces += of_it
                problem = replace(problem, trace_ids=tuple(trace.trace_id for trace in of_it))
            problems.append(problem)
        return Chunk(
            problems=tuple(problems),
            traces=tuple(traces),
            rows=tuple(draft.row for draft in drafts),
        )

    # Gold answers.

    def _golds(self, rows: Sequence[DataRow], counts: SourceCounts) -> list[_Draft]:
        """The rows whose gold answers can be used, with them."""
        drafts = []
        for row in rows:
            content = row.content
            gold = content.gold
            if gold and gold == content.target:
                # The solution holds it.
                gold = read_gold(gold).text
            drafts.append(
                _Draft(row=row, text="", gold=gold, judged=self._is_judged(content, gold))
            )
        if not self._grader.needs_verdict:
            return drafts  # No component compares with the gold answer.
        judged = [draft for draft in drafts if not self._grader.has_tests(draft.row.content.extra)]
        unique = sorted({draft.gold for draft in judged if draft.gold})
        bad = self._grader.unreadable_golds(unique)
        if self._grader.mode.compare != "exact":
            bad |= {gold for gold in unique if broken(gold)}
        kept = []
        for draft in drafts:
            has_tests = self._grader.has_tests(draft.row.content.extra)
            if has_tests or draft.judged or not (draft.gold or self._grades):
                kept.append(draft)
            elif not draft.gold:
                self._leave_out(draft, counts, "no gold answer", "it has no gold answer")
            elif draft.gold in bad:
                what = f"the gold answer {draft.gold[:60]!r} can't be parsed"
                self._leave_out(draft, counts, "gold answers unreadable", what)
            else:
                kept.append(draft)
        return kept

    def _is_judged(self, content: Content, gold: str) -> bool:
        """Whether a run that trains on stored responses takes a row's as right or wrong without grading:
        the data say so, or have no gold answer."""
        if not self._grades or not trains_on_traces(self._config) or content.target is None:
            return False
        return content.rejected is not None or content.label is not None or not gold

    def _leave_out(
        self,
        draft: _Draft,
        counts: SourceCounts,
        reason: str,
        what: str | DataError,
    ) -> None:
        if self._config.data.bad_rows == "refuse":
            # An error ends in a way out already.
            way_out = "" if isinstance(what, DataError) else ": correct it"
            raise DataError(f"{draft.row.place}: {what}{way_out}, or set data.bad_rows=leave_out")
        counts.bad_rows.add(reason, f"{draft.row.place}: {what}")

    # Prompts.

    def _render(
        self, drafts: Sequence[_Draft], counts: SourceCounts, encoder: Executor
    ) -> _Rendered:
        """The rows whose prompts aren't surely too long, rendered and about to be encoded."""
        data = self._config.data
        short: list[_Draft] = []
        shown: list[_Draft] = []
        for draft in drafts:
            try:
                if self._plays:
                    draft.task = task_of(draft.row, self._config.environments, data)
            except RowError as error:
                self._leave_out(draft, counts, error.reason, error)
                continue
            # Ten million characters would take a tokenizer many seconds.
            size = sum(len(message.content) for message in draft.row.content.prompt)
            if size > data.max_prompt_tokens * self._longest:
                self._long_prompt(draft, f"{size:,} characters", counts)
                continue
            if not draft.row.content.prompt:
                # Its environment shows what there is to see.
                draft.text = json.dumps(draft.row.content.extra.get("task"))[:SHOWN_TASK]
                draft.tokens = np.zeros(0, np.int32)
                shown.append(draft)
                continue
            short.append(draft)
        short = self._with_texts(short, counts)
        texts = [draft.text for draft in short]
        encoded = encoder.submit(prompts.encode_prompts, self._tokenizer, texts, data)
        return _Rendered(short=short, shown=shown, encoded=encoded)

    def _prompts(self, rendered: _Rendered, counts: SourceCounts) -> list[_Draft]:
        """The rows whose prompts aren't too long, encoded."""
        data = self._config.data
        kept = []
        for draft, tokens in zip(rendered.short, rendered.encoded.result(), strict=True):
            if len(tokens) == 0:
                what = f"the prompt has no tokens after rendering: {draft.text[:80]!r}"
                self._leave_out(draft, counts, "prompts without a token", what)
                continue
            draft.tokens = tokens
            if len(tokens) > data.max_prompt_tokens:
                self._long_prompt(draft, f"{len(tokens):,} tokens", counts)
            else:
                kept.append(draft)
        return sorted(rendered.shown + kept, key=lambda draft: draft.row.number)

    def _with_texts(self, drafts: list[_Draft], counts: SourceCounts) -> list[_Draft]:
        """Renders prompts; leaves out the rows that the template refuses."""
        asked = [
            [{"role": m.role, "content": m.content} for m in draft.row.content.prompt]
            for draft in drafts
        ]
        if not any(draft.row.content.tools for draft in drafts):
            try:
                texts = prompts.render_texts(self._tokenizer, asked, self._config.data)
            except Exception:  # noqa: BLE001 - one of them can't be rendered: which one, and why?
                pass
            else:
                for draft, text in zip(drafts, texts, strict=True):
                    draft.text = text
                return drafts
        kept = []
        for draft, messages in zip(drafts, asked, strict=True):
            tools = draft.row.content.tools
            try:
                draft.text = prompts.render_text(
                    self._tokenizer, messages, self._config.data, tools
                )
            except Exception as error:  # noqa: BLE001 - a chat template may raise anything
                if isinstance(error, DataError):
                    template = f"data.template={self._config.data.template}"
                    reason = f"prompts with more messages than {template} holds (own holds them)"
                    self._leave_out(draft, counts, reason, error)
                    continue
                said = " ".join(str(error).split())[:200]
                what = f"the model's chat template refused the prompt: {said}"
                self._leave_out(draft, counts, "prompts that the template refuses", what)
            else:
                kept.append(draft)
        return kept

    def _long_prompt(self, draft: _Draft, length: str, counts: SourceCounts) -> None:
        data = self._config.data
        if data.overlong == "refuse":
            raise DataError(
                f"{draft.row.place}: the prompt has {length} and data.max_prompt_tokens is "
                f"{data.max_prompt_tokens:,}: raise it, or set data.overlong=drop"
            )
        counts.long_prompts += 1

    # Traces.

    def _with_traces(
        self, drafts: list[_Draft], source: SourceConfig, counts: SourceCounts
    ) -> list[_Draft]:
        """Adds accepted traces; leaves out the rows that the source's filters name."""
        filters = source.correct_only or source.max_target_tokens is not None
        if not (needs_traces(self._config) or filters or not self._grades):
            return drafts
        if source.turns == "all":
            drafts = [draft for draft in drafts if self._told_apart(draft, counts)]
        rejects = self._config.learner.objective.rejects
        if rejects:
            drafts = [draft for draft in drafts if self._label_is_read(draft, counts)]
        answered = []
        for draft in drafts:
            wanted = draft.row.content.label is not False or (rejects and draft.judged)
            if draft.row.content.target is not None and wanted:
                answered.append(draft)
        lengths = self._encode_traces(answered, counts)
        if source.max_target_tokens is not None:
            most = source.max_target_tokens
            long = {id(d) for d, length in zip(answered, lengths, strict=True) if length > most}
            counts.filter(f"targets over {most:,} tokens", len(long))
            drafts = [draft for draft in drafts if id(draft) not in long]
        self._judge([d for d in drafts if d.judged and d.trace is not None], counts)
        with_trace = [d for d in drafts if d.trace is not None and not d.judged]
        if not (self._grades or source.correct_only):
            return drafts
        grades = self._grade(with_trace)
        if source.correct_only:
            verdicts = {id(d): g.verdict for d, g in zip(with_trace, grades, strict=True)}
            right = {
                id(draft)
                for draft in drafts
                if draft.trace is not None
                and verdicts.get(id(draft), draft.trace.verdict) is Verdict.CORRECT
            }
            counts.filter("targets not correct", len(drafts) - len(right))
            drafts = [draft for draft in drafts if id(draft) in right]
        if not self._grades:
            return drafts
        for draft, grade in zip(with_trace, grades, strict=True):
            assert draft.trace is not None
            draft.trace = accepted(
                draft.trace, grade, self._grader.name, self._config.expert.accept, counts
            )
        if not needs_traces(self._config):
            for draft in drafts:
                draft.trace = None
        return drafts

    def _encode_traces(self, drafts: Sequence[_Draft], counts: SourceCounts) -> list[int]:
        """Gives the drafts their traces, ungraded, unless they are too long; returns their lengths in tokens
        (in characters if they are surely too long)."""
        limit = self._config.rollout.max_new_tokens
        texts = [
            draft.row.content.target or ""
            if draft.answers
            else self._continued(draft, draft.row.content.target or "")
            for draft in drafts
        ]
        sizes = [
            turns.size(draft.answers) if draft.answers else len(text)
            for draft, text in zip(drafts, texts, strict=True)
        ]
        surely = [size > limit * self._longest for size in sizes]
        each = list(zip(drafts, texts, sizes, surely, strict=True))
        alone = ["" if long or draft.answers else text for draft, text, _, long in each]
        encoded = prompts.encode_responses(self._tokenizer, alone)
        whole = turns.encode(
            self._tokenizer,
            [draft.answers for draft, _, _, long in each if not long and draft.answers],
        )
        lengths = []
        for (draft, text, size, long), tokens in zip(each, encoded, strict=True):
            source = None
            if draft.answers and not long:
                tokens, source = next(whole)
            lengths.append(size if long else len(tokens))
            if long or len(tokens) > limit:
                if self._config.data.overlong == "refuse":
                    length = f"{size:,} characters" if long else f"{len(tokens):,} tokens"
                    raise DataError(
                        f"{draft.row.place}: the trace has {length} and rollout.max_new_tokens is "
                        f"{limit:,}: raise it, or set data.overlong=drop"
                    )
                counts.long_traces += 1
                continue
            draft.trace = replace(self._trace(draft, text, tokens), source=source)
            content = draft.row.content
            earlier = any(message.role == "assistant" for message in content.prompt)
            # Of a pair both responses go on from the same answers.
            counts.earlier_answers += earlier and content.rejected is None
        self._add_logprobs(drafts, counts)
        return lengths

    def _add_logprobs(self, drafts: Sequence[_Draft], counts: SourceCounts) -> None:
        """Gives traces the log-probs that the data have of their tokens."""
        more: list[tuple[_Draft, Float32Array]] = []
        for draft in drafts:
            logprobs = draft.row.content.target_logprobs
            if logprobs is None or draft.trace is None:
                continue
            if len(logprobs) == len(draft.trace.tokens):
                draft.trace = _with_logprobs(draft.trace, logprobs)
            else:
                more.append((draft, logprobs))
        # The data have them of the whole response, and a trace may lack its opener.
        whole = [draft.row.content.target or "" for draft, _ in more]
        encoded = prompts.encode_responses(self._tokenizer, whole)
        for (draft, logprobs), tokens in zip(more, encoded, strict=True):
            assert draft.trace is not None
            length = len(draft.trace.tokens)
            same_end = np.array_equal(tokens[-length:], draft.trace.tokens)
            if len(logprobs) == len(tokens) and same_end:
                draft.trace = _with_logprobs(draft.trace, logprobs[-length:])
            else:
                counts.unfit_logprobs += 1

    def _told_apart(self, draft: _Draft, counts: SourceCounts) -> bool:
        """Tells the answers of a draft's conversation apart; False if the row has to be left out."""
        content = draft.row.content
        said = sum(len(one["content"]) for one in content.turns)
        if said > self._config.rollout.max_new_tokens * self._longest:
            # To render it again and again would take long, and it is left out anyhow.
            draft.answers = (
                turns.Answer(said="".join(one["content"] for one in content.turns), after=""),
            )
        elif content.turns:
            try:
                draft.answers = turns.answers(self._tokenizer, content, self._config)
            except RowError as error:
                self._leave_out(draft, counts, error.reason, error)
                return False
        return True

    def _label_is_read(self, draft: _Draft, counts: SourceCounts) -> bool:
        """False if the row has to be left out: its label would decide what is learned from it, and can't be read."""
        error = unread_label(draft.row.raw, draft.row.content) if draft.judged else None
        if error is None:
            return True
        self._leave_out(draft, counts, error.reason, error)
        return False

    def _judge(self, drafts: Sequence[_Draft], counts: SourceCounts) -> None:
        """Gives traces the data's own verdicts, and pairs their worse responses."""
        if self._config.learner.objective.rejects:
            self._encode_rejected(drafts, counts)
        for draft in drafts:
            if draft.trace is not None:
                draft.trace = _as_judged(draft.trace, draft.row.content.label is not False)
                counts.ungraded_traces += 1

    def _encode_rejected(self, drafts: Sequence[_Draft], counts: SourceCounts) -> None:
        """A pair of which one response is too long is left out."""
        paired = [draft for draft in drafts if draft.row.content.rejected is not None]
        limit = self._config.rollout.max_new_tokens
        texts = [self._continued(draft, draft.row.content.rejected or "") for draft in paired]
        short = [text if len(text) <= limit * self._longest else "" for text in texts]
        encoded = prompts.encode_responses(self._tokenizer, short)
        for draft, text, tokens in zip(paired, texts, encoded, strict=True):
            if len(text) > limit * self._longest or len(tokens) > limit:
                counts.long_traces += 1
                draft.trace = None
                continue
            trace = self._trace(draft, text, tokens)
            draft.rejected = _as_judged(replace(trace, trace_id=f"{trace.problem_id}#1"), False)
            counts.ungraded_traces += 1

    @staticmethod
    def _continued(draft: _Draft, text: str) -> str:
        """A response without the opener that the prompt ends with already, and the space that the prompt has behind it."""
        opened, said = draft.text.rstrip(), text.lstrip()
        if not (opened.endswith(OPENER) and said.startswith(OPENER)):
            return text
        space, rest = draft.text[len(opened) :], said.removeprefix(OPENER)
        if rest.startswith(space):
            return rest.removeprefix(space)
        # The prompt has other space in the place of the response's.
        return rest.lstrip()

    def _trace(self, draft: _Draft, text: str, tokens: NDArray[np.int32]) -> ExpertTrace:
        assert draft.problem is not None
        return ExpertTrace(
            trace_id=f"{draft.problem.problem_id}#0",
            problem_id=draft.problem.problem_id,
            tokens=tokens,
            logprobs=None,
            text=text,
            tokenizer_digest=self._digest,
            reward=None,
            verdict=Verdict.UNPARSABLE,
            components={},
            grader=None,
        )

    def _grade(self, drafts: Sequence[_Draft]) -> list[Grade]:
        items = []
        for draft in drafts:
            assert draft.problem is not None
            assert draft.trace is not None
            items.append(item_of(draft.trace, draft.problem))
        return self._grader.grade_texts(items)


def _with_logprobs(trace: ExpertTrace, logprobs: Float32Array) -> ExpertTrace:
    return replace(trace, logprobs=np.asarray(logprobs, np.float32))


def _as_judged(trace: ExpertTrace, wanted: bool) -> ExpertTrace:
    """A trace with the data's own verdict, which no grader has seen."""
    verdict = Verdict.CORRECT if wanted else Verdict.WRONG
    return replace(trace, reward=1.0 if wanted else -1.0, verdict=verdict)
