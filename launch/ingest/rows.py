"""Turns a source's rows into problems and expert traces: rendered, tokenised, graded; counts those left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...common import prompts
from ...common.config import Config
from ...common.errors import DataError
from ...common.records import ExpertTrace, FinishReason, Problem, Verdict
from ...replay.readers import ProblemRow
from ...reward.grading import Grade, GradeItem, Grader

OPENERS = ("<think>\n", "<think>")
"""Openers that the rendered prompt may end with; a trace that repeats one loses it."""


@dataclass(slots=True, kw_only=True)
class SourceCounts:
    """What became of a source's rows."""

    problems: int = 0
    """Rows that became problems."""
    traces: int = 0
    """Traces that were accepted."""
    long_prompts: int = 0
    """Rows dropped because the prompt is over ``data.max_prompt_tokens``."""
    long_traces: int = 0
    """Traces left out because they are over ``rollout.max_new_tokens``; the problem stays."""
    bad_golds: int = 0
    """Rows dropped because the grader can't read the gold answer."""
    refused_traces: dict[str, int] = field(default_factory=dict)
    """Traces left out because ``expert.accept`` lacks their verdict, by verdict."""
    unpaid_traces: int = 0
    """Traces left out because they are correct but their reward is 0, as with a closed gate."""
    unknown_logprobs: int = 0
    """Traces whose recorded log-probs are from another tokenizer and were left out."""

    def __str__(self) -> str:
        parts = [f"{self.problems:,} problems"]
        if self.traces or self.refused_traces or self.unpaid_traces or self.long_traces:
            parts.append(f"{self.traces:,} expert traces")
        left_out = [
            (self.long_prompts, "prompts too long"),
            (self.bad_golds, "gold answers unreadable"),
            (self.long_traces, "traces too long"),
            (self.unknown_logprobs, "traces with log-probs of another tokenizer (taken off)"),
            *((n, f"traces graded {verdict}") for verdict, n in self.refused_traces.items()),
            (self.unpaid_traces, "traces graded correct and paid nothing (is a gate closed?)"),
        ]
        listed = [f"{count:,} {what}" for count, what in left_out if count]
        return ", ".join(parts) + (f"; left out: {', '.join(listed)}" if listed else "")


def needs_traces(config: Config) -> bool:
    """Whether expert traces are used at all; if not, they needn't be graded."""
    return config.expert.per_group > 0 or config.learner.source == "offline"


class SourceReader:
    """Turns the rows of one source after another into problems and traces."""

    def __init__(
        self, config: Config, tokenizer: Any, grader: Grader, doing: Callable[[str], None]
    ) -> None:
        self._config = config
        self._doing = doing
        self._longest = prompts.longest_token(tokenizer)
        self._tokenizer = tokenizer
        self._grader = grader
        self._digest = prompts.tokenizer_digest(tokenizer)

    def read(
        self, name: str, rows: Sequence[ProblemRow], file: Path, *, held_out: bool = False
    ) -> tuple[list[Problem], list[ExpertTrace], SourceCounts]:
        """Problems and traces of one source, and counts of what was left out."""
        counts = SourceCounts()
        self._doing(f"reading the gold answers of {file.name}")
        bad = self._bad_golds(rows)
        data = self._config.data
        if bad and data.bad_golds == "refuse":
            first = min(bad)
            more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
            gold = next(row.gold for row in rows if row.row == first)
            raise DataError(
                f"{file.name} row {first}: the gold answer {gold[:60]!r} can't be parsed{more}: "
                f"correct it, or set data.bad_golds=drop to leave such rows out"
            )
        counts.bad_golds = len(bad)
        problems: list[Problem] = []
        drafts: list[tuple[Problem, ExpertTrace]] = []
        wanted = needs_traces(self._config) and not held_out
        for place, row in enumerate(rows, 1):
            self._doing(f"{file.name}: row {place:,} of {len(rows):,}")
            if row.row in bad:
                continue
            # Ten million characters would take a tokenizer many seconds.
            size = sum(len(message.content) for message in row.prompt)
            if size > data.max_prompt_tokens * self._longest:
                problem, length = None, f"{size:,} characters"
            else:
                problem = self._problem(name, row, file)
                length = f"{len(problem.prompt_tokens):,} tokens"
            if problem is None or len(problem.prompt_tokens) > data.max_prompt_tokens:
                if data.overlong == "refuse":
                    raise DataError(
                        f"{file.name} row {row.row}: the prompt has {length} and "
                        f"data.max_prompt_tokens is {data.max_prompt_tokens:,}: raise it, or set "
                        f"data.overlong=drop"
                    )
                counts.long_prompts += 1
                continue
            trace = self._trace(problem, row, file, counts) if wanted else None
            if trace is not None:
                drafts.append((problem, trace))
            problems.append(problem)
        if drafts:
            self._doing(f"grading {len(drafts):,} traces of {file.name}")
        traces = self._graded(drafts, counts)
        with_trace = {trace.problem_id: trace.trace_id for trace in traces}
        problems = [
            replace(problem, trace_ids=(with_trace[problem.problem_id],))
            if problem.problem_id in with_trace
            else problem
            for problem in problems
        ]
        counts.problems, counts.traces = len(problems), len(traces)
        if not problems:
            raise DataError(
                f"{file.name}: not one of its {len(rows):,} rows can be used ({counts}): raise "
                f"data.max_prompt_tokens, or name another file"
            )
        return problems, traces, counts

    def _problem(self, name: str, row: ProblemRow, file: Path) -> Problem:
        messages = [{"role": m.role, "content": m.content} for m in row.prompt]
        try:
            text, tokens = prompts.render(
                self._tokenizer, messages, self._config.data.system_prompt
            )
        except DataError as error:
            raise DataError(f"{file.name} row {row.row}: {error}") from None
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything
            raise DataError(
                f"{file.name} row {row.row}: the model's chat template refused the prompt: "
                f"{' '.join(str(error).split())[:200]}"
            ) from None
        return Problem(
            problem_id=f"{name}/{row.row}",
            prompt_text=text,
            prompt_tokens=tokens,
            gold=row.gold,
            data_source=row.data_source,
            ability=row.ability,
            trace_ids=(),
            extra=row.extra,
        )

    def _trace(
        self, problem: Problem, row: ProblemRow, file: Path, counts: SourceCounts
    ) -> ExpertTrace | None:
        """The row's trace, ungraded; None if there is none or it is too long."""
        if row.target is None:
            return None
        text = row.target
        for opener in OPENERS:
            if problem.prompt_text.endswith(opener) and text.startswith(opener):
                text = text.removeprefix(opener)
                break
        limit = self._config.rollout.max_new_tokens
        if len(text) > limit * self._longest:
            tokens, length = None, f"{len(text):,} characters"
        else:
            tokens = prompts.encode_response(self._tokenizer, text)
            length = f"{len(tokens):,} tokens"
        if tokens is None or len(tokens) > limit:
            if self._config.data.overlong == "refuse":
                raise DataError(
                    f"{file.name} row {row.row}: the trace has {length} and "
                    f"rollout.max_new_tokens is {limit:,}: raise it, or set data.overlong=drop"
                )
            counts.long_traces += 1
            return None
        logprobs = row.target_logprobs
        if logprobs is not None and len(logprobs) != len(tokens):
            counts.unknown_logprobs += 1
            logprobs = None
        return ExpertTrace(
            trace_id=f"{problem.problem_id}#0",
            problem_id=problem.problem_id,
            tokens=tokens,
            logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
            text=text,
            tokenizer_digest=self._digest,
            reward=None,
            verdict=Verdict.UNPARSABLE,
            components={},
            grader=None,
        )

    def _graded(
        self, drafts: Sequence[tuple[Problem, ExpertTrace]], counts: SourceCounts
    ) -> list[ExpertTrace]:
        accepted = []
        for (_, trace), grade in zip(drafts, self._grade(drafts), strict=True):
            if grade.verdict.value not in self._config.expert.accept:
                name = grade.verdict.value
                counts.refused_traces[name] = counts.refused_traces.get(name, 0) + 1
                continue
            if grade.verdict is Verdict.CORRECT and not grade.reward:
                # Its row would be below the baseline, so that the expert's tokens would be unlearned.
                counts.unpaid_traces += 1
                continue
            accepted.append(
                replace(
                    trace,
                    reward=grade.reward,
                    verdict=grade.verdict,
                    components=grade.components,
                    grader=self._grader.name,
                )
            )
        return accepted

    def _grade(self, drafts: Sequence[tuple[Problem, ExpertTrace]]) -> list[Grade]:
        return self._grader.grade_texts(
            [
                GradeItem(
                    text=trace.text,
                    gold=problem.gold,
                    data_source=problem.data_source,
                    finish_reason=FinishReason.STOP,
                    prompt_text=problem.prompt_text,
                    tokens=trace.tokens,
                    extra=problem.extra,
                )
                for problem, trace in drafts
            ]
        )

    def _bad_golds(self, rows: Sequence[ProblemRow]) -> set[int]:
        """Indices of rows whose gold answer the grader can't read, or not within its limits."""
        if not self._grader.needs_verdict:
            return set()  # No component compares with the gold answer.
        rows = [row for row in rows if not self._grader.has_tests(row.extra)]
        unique = sorted({row.gold for row in rows})
        bad = self._grader.unreadable_golds(unique)
        if self._grader.mode.compare != "exact":
            bad |= {gold for gold in unique if broken(gold)}
        return {row.row for row in rows if row.gold in bad}


def broken(gold: str) -> bool:
    """Whether a gold answer is cut off or holds nothing to compare.

    Parsers of mathematics take such a text for a name and compare it letter by letter, so that
    every answer would be wrong.

    >>> [broken(gold) for gold in ("\\\\frac{1}{", "??", "[0, 1)", "\\\\{1, 2\\\\}", "∅")]
    [True, True, False, False, False]
    """
    plain = gold.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
    depth = 0
    for character in plain:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return True
    return depth != 0 or not any(c.isalnum() or c in "∅∞" for c in plain)
