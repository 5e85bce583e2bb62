"""The expert traces of a source's rows: encoded, judged by the data or graded, and filtered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...common import prompts
from ...common.config import Config, SourceConfig
from ...common.config.groups import replays_own
from ...common.errors import DataError
from ...common.records import ExpertTrace, Float32Array, Verdict
from ...replay.forms import RowError
from ...replay.forms.conversation import unread_label
from ...replay.forms.problem_solution import other_response
from ...reward.grading import Grade, Grader
from . import turns
from .accepting import accepted, item_of, trains_on_traces
from .counts import SourceCounts
from .drafts import Draft, leave_out

OPENER = "<think>"
"""What the rendered prompt may end with; a trace that repeats it loses it."""


def needs_traces(config: Config) -> bool:
    """Whether the data's expert traces are used at all; if not, they needn't be graded."""
    return (config.expert.per_group > 0 and not replays_own(config)) or trains_on_traces(config)


class TraceReader:
    """Gives drafts the traces of their rows."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        grader: Grader,
        *,
        digest: str,
        longest: int,
        grades: bool,
    ) -> None:
        """Nothing is read yet.

        Args:
            config: what is left out, and how answers are graded.
            tokenizer: the model's.
            grader: grades traces.
            digest: of the tokenizer.
            longest: greatest number of characters of one of its tokens.
            grades: whether traces are graded; if not, all of them are kept.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._longest = longest
        self._digest = digest
        self._grader = grader
        self._grades = grades

    def add(self, drafts: list[Draft], source: SourceConfig, counts: SourceCounts) -> list[Draft]:
        """Adds accepted traces; leaves out the rows that the source's filters name."""
        filters = source.correct_only or source.max_target_tokens is not None
        if not (needs_traces(self._config) or filters or not self._grades):
            return drafts
        if source.turns == "all":
            drafts = [draft for draft in drafts if self._told_apart(draft, counts)]
        rejects = self._config.learner.objective.rejects
        drafts = [draft for draft in drafts if self._is_read(draft, counts)]
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
            draft.trace = accepted(draft.trace, grade, self._grader.name, self._config, counts)
        if not needs_traces(self._config):
            for draft in drafts:
                draft.trace = None
        return drafts

    def _encode_traces(self, drafts: Sequence[Draft], counts: SourceCounts) -> list[int]:
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
            counts.other_responses += other_response(draft.row.raw, content)
        self._add_logprobs(drafts, counts)
        return lengths

    def _add_logprobs(self, drafts: Sequence[Draft], counts: SourceCounts) -> None:
        """Gives traces the log-probs that the data have of their tokens."""
        more: list[tuple[Draft, Float32Array]] = []
        for draft in drafts:
            logprobs = draft.row.content.target_logprobs
            if logprobs is None or draft.trace is None:
                continue
            if len(logprobs) == len(draft.trace.tokens):
                draft.trace = _with_logprobs(draft.trace, logprobs)
            else:
                more.append((draft, logprobs))
        # The data have them of the whole response, and a trace may lack its opener.
        responses = [draft.row.content.target or "" for draft, _ in more]
        encoded = prompts.encode_responses(self._tokenizer, responses)
        for (draft, logprobs), tokens in zip(more, encoded, strict=True):
            assert draft.trace is not None
            length = len(draft.trace.tokens)
            same_end = np.array_equal(tokens[-length:], draft.trace.tokens)
            if len(logprobs) == len(tokens) and same_end:
                draft.trace = _with_logprobs(draft.trace, logprobs[-length:])
            else:
                counts.unfit_logprobs += 1

    def _told_apart(self, draft: Draft, counts: SourceCounts) -> bool:
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
                leave_out(self._config, draft, counts, error.reason, error)
                return False
        return True

    def _is_read(self, draft: Draft, counts: SourceCounts) -> bool:
        """False if the row has to be left out: its response isn't read whole, or its label, which would decide what is
        learned from it, can't be read."""
        content = draft.row.content
        error = content.unread
        if error is None and draft.judged and self._config.learner.objective.rejects:
            error = unread_label(draft.row.raw, content)
        if error is None:
            return True
        leave_out(self._config, draft, counts, error.reason, error)
        return False

    def _judge(self, drafts: Sequence[Draft], counts: SourceCounts) -> None:
        """Gives traces the data's own verdicts, and pairs their worse responses."""
        if self._config.learner.objective.rejects:
            self._encode_rejected(drafts, counts)
        for draft in drafts:
            if draft.trace is not None:
                draft.trace = _as_judged(draft.trace, draft.row.content.label is not False)
                counts.ungraded_traces += 1

    def _encode_rejected(self, drafts: Sequence[Draft], counts: SourceCounts) -> None:
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

    def _continued(self, draft: Draft, text: str) -> str:
        """A response without what the prompt ends with already, the prefill or an opener of thoughts, and without the
        space that the prompt has behind it."""
        prefill = self._config.data.prefill
        begin = prefill.strip() or OPENER
        opened, said = draft.text.rstrip(), text.lstrip()
        if not (opened.endswith(begin) and said.startswith(begin)):
            return text if prefill.strip() else text.removeprefix(prefill)
        space, rest = draft.text[len(opened) :], said.removeprefix(begin)
        if _may_go_on(begin[-1]) and _may_go_on(rest[:1]):
            # It begins with a longer word or number.
            return text
        if rest.startswith(space):
            return rest.removeprefix(space)
        # The prompt has other space in the place of the response's.
        return rest.lstrip()

    def _trace(self, draft: Draft, text: str, tokens: NDArray[np.int32]) -> ExpertTrace:
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

    def _grade(self, drafts: Sequence[Draft]) -> list[Grade]:
        items = []
        for draft in drafts:
            assert draft.problem is not None
            assert draft.trace is not None
            items.append(item_of(draft.trace, draft.problem))
        return self._grader.grade_texts(items)


def _may_go_on(character: str) -> bool:
    """Whether it is a digit, or a letter of a script that has two cases: these put spaces between words, which
    Chinese, Japanese and Thai don't."""
    return character.isdigit() or character.lower() != character.upper()


def _with_logprobs(trace: ExpertTrace, logprobs: Float32Array) -> ExpertTrace:
    return replace(trace, logprobs=np.asarray(logprobs, np.float32))


def _as_judged(trace: ExpertTrace, wanted: bool) -> ExpertTrace:
    """A trace with the data's own verdict, which no grader has seen."""
    verdict = Verdict.CORRECT if wanted else Verdict.WRONG
    return replace(trace, reward=1.0 if wanted else -1.0, verdict=verdict)
