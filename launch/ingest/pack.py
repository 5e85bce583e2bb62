"""Joins the responses of all sources to blocks of a constant length, for ``data.pack_tokens``.

This is how CS336's supplementary assignment on alignment packs its instruction data: documents in a random order are joined,
and cut without regard to where one ends. Documents are prompts with their responses, which end with the
end token; a block attends across them, and is trained on as a whole, prompts included. Block i reads
the tokens [i N, i N + N) and predicts those after them, so that every token but the first is
predicted once. For all that comes after the ingest, a block is a problem whose prompt is one token, with
a trace of N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...common import prompts
from ...common.errors import DataError
from ...common.records import ExpertTrace, Problem, Verdict
from ...replay.rules.order import permutation
from .counts import SourceCounts

NAME = "packed"
"""Name of the one source that all sources become."""


def packed(
    problems: Sequence[Problem],
    traces: Sequence[ExpertTrace],
    tokenizer: Any,
    *,
    tokens: int,
    seed: int,
) -> tuple[list[Problem], list[ExpertTrace], SourceCounts]:
    """Blocks of the documents, and how many there are.

    Args:
        problems: problems of all sources.
        traces: the accepted responses to them.
        tokenizer: the model's.
        tokens: N: length of a block, in tokens that are predicted.
        seed: seed of the documents' order.

    Raises:
        DataError: the documents don't fill one block.
    """
    prompt_of = {problem.problem_id: problem.prompt_tokens for problem in problems}
    documents = [
        np.concatenate([prompt_of[trace.problem_id], trace.tokens])
        for trace in (traces[index] for index in permutation(len(traces), seed, "pack"))
    ]
    joined = np.concatenate(documents) if documents else np.empty(0, np.int32)
    count = max(0, len(joined) - 1) // tokens
    if not count:
        raise DataError(
            f"data.pack_tokens={tokens:,} is more than the {len(joined):,} tokens of all sources: lower it"
        )
    digest = prompts.tokenizer_digest(tokenizer)
    blocks, made = [], []
    for index in range(count):
        block = joined[index * tokens : (index + 1) * tokens + 1].astype(np.int32)
        problem_id = f"{NAME}/{index}"
        trace = ExpertTrace(
            trace_id=f"{problem_id}#0",
            problem_id=problem_id,
            tokens=block[1:],
            logprobs=None,
            text=tokenizer.decode(block[1:]),
            tokenizer_digest=digest,
            reward=1.0,
            verdict=Verdict.CORRECT,
            components={},
            grader=None,
        )
        blocks.append(
            Problem(
                problem_id=problem_id,
                prompt_text=tokenizer.decode(block[:1]),
                prompt_tokens=block[:1],
                gold="",
                data_source=NAME,
                ability="",
                trace_ids=(trace.trace_id,),
                extra={},
            )
        )
        made.append(trace)
    counts = SourceCounts(problems=count, traces=count, ungraded_traces=count)
    rest = len(joined) - 1 - count * tokens
    if rest:
        counts.filtered["tokens after the last whole block"] = rest
    return blocks, made, counts
