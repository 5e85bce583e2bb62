"""What became of a source's rows, and which of them a limited source keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...replay.forms import LeftOut

LONGEST_GOLD = 40
"""Words of the longest gold answer that isn't told of."""


@dataclass(slots=True, kw_only=True)
class SourceCounts:
    """What became of a source's rows."""

    used: int = 0
    """Rows that could be read."""
    problems: int = 0
    """Rows that became problems."""
    traces: int = 0
    """Traces that were accepted."""
    bad_rows: LeftOut = field(default_factory=LeftOut)
    """Rows left out because they can't be used: malformed, with a prompt that the template refuses, without a gold
    answer that the reward needs, or with one that the grader can't read."""
    long_prompts: int = 0
    """Rows left out because the prompt is over ``data.max_prompt_tokens``."""
    long_traces: int = 0
    """Traces left out because they are over ``rollout.max_new_tokens``; the problem stays."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Rows left out by the source's own filters, by filter."""
    over_limit: int = 0
    """Rows that can be used and were read, but come after as many as the source's ``limit`` says."""
    refused_traces: dict[str, int] = field(default_factory=dict)
    """Traces left out because ``expert.accept`` lacks their verdict, or because it and their reward don't go together,
    by what they were graded."""
    unpaid_traces: int = 0
    """Traces left out because they are correct but their reward is 0, as with a closed gate."""
    ungraded_traces: int = 0
    """Traces that aren't graded, since the data judge them or have no gold answer."""
    pairs: int = 0
    """Pairs that were made of an archive's samples."""
    chosen_longer: int = 0
    """Those of them whose chosen response has more tokens than the rejected one."""
    chosen_shorter: int = 0
    """Those whose chosen response has fewer."""
    earlier_answers: int = 0
    """Traces of conversations with earlier answers, which aren't learned from."""
    other_responses: int = 0
    """Traces that are solutions of rows whose ``messages`` end with another response."""
    unused_tools: int = 0
    """Rows that became problems and whose prompts don't show the tools that the rows have."""
    lacking: list[str] = field(default_factory=list)
    """What a reward that grades an archive anew asks for and some of its groups lack."""
    long_golds: int = 0
    """Rows whose gold answer has over :data:`LONGEST_GOLD` words: likely a whole solution, which no answer equals."""
    unfit_logprobs: int = 0
    """Traces whose recorded log-probs were left out, since they aren't one for each token."""

    @property
    def seen(self) -> int:
        """Number of rows that were read, whether they could be used or not."""
        return max(self.used, self.bad_rows.seen)

    def filter(self, what: str, number: int) -> None:
        """Counts what one of the source's filters has left out."""
        if number:
            self.filtered[what] = self.filtered.get(what, 0) + number

    def add(self, other: SourceCounts) -> None:
        """Adds the traces and samples that were left out of a part of the source."""
        for what, number in other.filtered.items():
            self.filter(what, number)
        for verdict, number in other.refused_traces.items():
            self.refused_traces[verdict] = self.refused_traces.get(verdict, 0) + number

    def add_pair(self, gap: int) -> None:
        """Counts a pair whose chosen response has so many tokens more than the rejected one."""
        self.pairs += 1
        self.chosen_longer += gap > 0
        self.chosen_shorter += gap < 0

    def left_out(self) -> list[tuple[int, str]]:
        """Numbers of rows and traces that were left out, and why."""
        return [
            *((count, reason) for reason, count in self.bad_rows.counts.items()),
            (self.long_prompts, "prompts too long"),
            *((count, what) for what, count in self.filtered.items()),
            (self.long_traces, "traces too long"),
            (
                self.earlier_answers,
                "rows' earlier answers (only the last one of each row is learned from)",
            ),
            (
                self.other_responses,
                "rows' messages (they end with another response than the solution; form=conversation learns from it)",
            ),
            (self.unused_tools, "rows' tools (only turns=all renders that column)"),
            (self.unfit_logprobs, "traces whose log-probs aren't one a token (taken off)"),
            *((n, f"traces graded {verdict}") for verdict, n in self.refused_traces.items()),
            (self.unpaid_traces, "traces graded correct and paid nothing (is a gate closed?)"),
        ]

    def __str__(self) -> str:
        parts = [f"{self.problems:,} problems"]
        if self.pairs:
            longer, shorter = f"{self.chosen_longer:,}", f"{self.chosen_shorter:,}"
            parts = [f"{self.pairs:,} pairs (chosen longer in {longer}, shorter in {shorter})"]
        if self.traces or self.refused_traces or self.unpaid_traces or self.long_traces:
            ungraded = f" ({self.ungraded_traces:,} not graded)" if self.ungraded_traces else ""
            parts.append(f"{self.traces:,} expert traces{ungraded}")
        listed = [f"{count:,} {what}" for count, what in self.left_out() if count]
        left_out = [f"left out: {', '.join(listed)}"] if listed else []
        told = list(self.lacking)
        if self.long_golds:
            told.append(
                f"{self.long_golds:,} gold answers have over {LONGEST_GOLD} words (whole solutions? Then no answer equals them)"
            )
        return "; ".join([", ".join(parts), *left_out, *told])


def drawn(problem_ids: Sequence[str], count: int, seed: int) -> set[str]:
    """A random subset of a source's problems; a smaller one of the same seed is a part of a larger one.

    >>> ids = [f"gsm8k/{row}" for row in range(100)]
    >>> drawn(ids, 5, seed=1) < drawn(ids, 20, seed=1)
    True
    """

    def rank(problem_id: str) -> bytes:
        row = problem_id.rpartition("/")[2]
        return hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()

    return set(sorted(problem_ids, key=rank)[:count])
