"""Turns a source's rows into problems and expert traces: rendered, tokenised, graded; counts those left out.

Rows are taken in chunks, so that a file is never held whole, and a chunk's texts are encoded at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from ...common.config.groups import is_online
from ...common.errors import DataError
from ...common.plain import one_line
from ...common.records import ExpertTrace, Problem
from ...replay.forms import Content, DataRow, RowError, read_rows
from ...replay.forms.conversation import unused_tools
from ...reward.answers.texts import read_gold
from ...reward.grading import Grader
from . import turns
from .accepting import trains_on_traces
from .archived import ArchiveReader, of_archive, refuse_archive_keys
from .chunk import Chunk, first_of
from .columns import broken, check_template, extra_of, task_of, with_tests
from .counts import LONGEST_GOLD, SourceCounts, drawn
from .drafts import Draft, leave_out
from .repeats import joined
from .traces import TraceReader, needs_traces

CHUNK_ROWS = 1024
SHOWN_TASK = 400
"""Characters of a task that stand for its prompt where people read one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    """A chunk's rows on their way to tokens."""

    short: list[Draft]
    """Rows with prompts."""
    shown: list[Draft]
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
        self._traces = TraceReader(
            *(config, tokenizer, grader), digest=self._digest, longest=self._longest, grades=grades
        )

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
        refuses = self._config.data.bad_rows == "refuse"
        whole = getattr(source, "turns", "last") == "all"
        if whole:
            turns.check(self._config, self._tokenizer)
        rows = read_rows(file, source.form, counts.bad_rows, whole=whole, refuses=refuses)
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
        drafts: list[Draft],
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
            drafts = self._traces.add(drafts, source, counts)
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

    def _golds(self, rows: Sequence[DataRow], counts: SourceCounts) -> list[Draft]:
        """The rows whose gold answers can be used, with them."""
        drafts = []
        for row in rows:
            content = row.content
            gold = content.gold
            if gold and gold == content.target:
                # The solution holds it.
                gold = read_gold(gold).text
            drafts.append(Draft(row=row, text="", gold=gold, judged=self._is_judged(content, gold)))
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
                needed = "gold answer"
                if not is_online(self._config):
                    needed += " and no response that is learned from"
                leave_out(self._config, draft, counts, f"no {needed}", f"it has no {needed}")
            elif draft.gold in bad:
                what = f"the gold answer {draft.gold[:60]!r} can't be parsed"
                leave_out(self._config, draft, counts, "gold answers unreadable", what)
            else:
                counts.long_golds += len(draft.gold.split()) > LONGEST_GOLD
                kept.append(draft)
        return kept

    def _is_judged(self, content: Content, gold: str) -> bool:
        """Whether an offline run takes a row's response as right or wrong without grading: the data say so, or have
        no gold answer. It does so with ``data.archive`` as well, which may be of a run on these very rows."""
        if not self._grades or is_online(self._config) or content.target is None:
            return False
        return content.rejected is not None or content.label is not None or not gold

    # Prompts.

    def _render(
        self, drafts: Sequence[Draft], counts: SourceCounts, encoder: Executor
    ) -> _Rendered:
        """The rows whose prompts aren't surely too long, rendered and about to be encoded."""
        data = self._config.data
        short: list[Draft] = []
        shown: list[Draft] = []
        for draft in drafts:
            try:
                if self._plays:
                    draft.task = task_of(draft.row, self._config.environments, data)
            except RowError as error:
                leave_out(self._config, draft, counts, error.reason, error)
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

    def _prompts(self, rendered: _Rendered, counts: SourceCounts) -> list[Draft]:
        """The rows whose prompts aren't too long, encoded."""
        data = self._config.data
        kept = []
        for draft, tokens in zip(rendered.short, rendered.encoded.result(), strict=True):
            if len(tokens) == 0:
                what = f"the prompt has no tokens after rendering: {draft.text[:80]!r}"
                leave_out(self._config, draft, counts, "prompts without a token", what)
                continue
            draft.tokens = tokens
            if len(tokens) > data.max_prompt_tokens:
                self._long_prompt(draft, f"{len(tokens):,} tokens", counts)
            else:
                kept.append(draft)
        return sorted(rendered.shown + kept, key=lambda draft: draft.row.number)

    def _with_texts(self, drafts: list[Draft], counts: SourceCounts) -> list[Draft]:
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
                    leave_out(self._config, draft, counts, reason, error)
                    continue
                what = f"the model's chat template refused the prompt: {one_line(error)}"
                leave_out(self._config, draft, counts, "prompts that the template refuses", what)
            else:
                kept.append(draft)
        return kept

    def _long_prompt(self, draft: Draft, length: str, counts: SourceCounts) -> None:
        data = self._config.data
        if data.overlong == "refuse":
            raise DataError(
                f"{draft.row.place}: the prompt has {length} and data.max_prompt_tokens is "
                f"{data.max_prompt_tokens:,}: raise it, or set data.overlong=drop"
            )
        counts.long_prompts += 1
