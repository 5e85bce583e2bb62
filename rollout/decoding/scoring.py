"""Log-probs of tokens that are given: scores of rows, and the likeliest tokens beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...common.records import Float32Array, Int32Array
from ..engine import Likeliest
from .decoder import Decoder

SCORED_LOGITS = 1 << 24
"""Logits that one pass of scoring computes at most, unless one row has more: they are in memory together,
64 MB of them in float32, which is 110 tokens of a vocabulary of 151,936."""
SCORED_TOKENS = 4096
"""Tokens that are scored in one pass at most, unless one row has more."""


def score(
    decoder: Decoder,
    rows: Sequence[Int32Array],
    temperature: float,
    device: torch.device,
    *,
    vocabulary: int,
) -> list[Float32Array]:
    """For each row ``[S - 1]`` log-probs of its tokens."""
    found: list[Float32Array] = []
    for chunk, tokens, logits in _passes(decoder, rows, device, vocabulary):
        logps = (logits.float() / temperature).log_softmax(-1)
        scored = logps.gather(2, tokens[:, 1:, None]).squeeze(2).cpu().numpy()
        found += [one[: len(row) - 1] for one, row in zip(scored, chunk, strict=True)]
    return found


def rank(
    decoder: Decoder,
    rows: Sequence[Int32Array],
    count: int,
    device: torch.device,
    *,
    vocabulary: int,
) -> list[Likeliest]:
    """For each row the log-probs of its tokens and of the most likely ones."""
    found: list[Likeliest] = []
    # Rows of a length together: they come in any order, and the longest decides how wide a pass is.
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    ordered = [rows[place] for place in order]
    for chunk, tokens, logits in _passes(decoder, ordered, device, vocabulary):
        logps = logits.float().log_softmax(-1)
        own = logps.gather(2, tokens[:, 1:, None]).squeeze(2).cpu().numpy()
        values, ids = (one.cpu().numpy() for one in logps.topk(min(count, logps.shape[2]), -1))
        for place, row in enumerate(chunk):
            end = len(row) - 1
            found.append(
                Likeliest(
                    own=own[place, :end],
                    tokens=ids[place, :end].astype(np.int32),
                    logprobs=values[place, :end],
                )
            )
    return [one for _, one in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _passes(
    decoder: Decoder, rows: Sequence[Int32Array], device: torch.device, vocabulary: int
) -> Iterator[tuple[Sequence[Int32Array], torch.Tensor, torch.Tensor]]:
    """Passes over as many rows at a time as the memory for their logits allows: the rows, ``[B, S]`` their
    tokens, padded, and ``[B, S - 1, V]`` logits."""
    bound = min(SCORED_TOKENS, SCORED_LOGITS // vocabulary)
    start = 0
    while start < len(rows):
        # Each row is padded to the longest one of its pass.
        count, longest = 1, len(rows[start])
        for row in rows[start + 1 :]:
            wider = max(longest, len(row))
            if wider * (count + 1) > bound:
                break
            count, longest = count + 1, wider
        chunk = rows[start : start + count]
        start += count
        lengths = torch.tensor([len(row) for row in chunk], device=device)
        padded = np.zeros((len(chunk), longest), dtype=np.int64)
        for row, place in zip(chunk, padded, strict=True):
            place[: len(row)] = row
        tokens = torch.from_numpy(padded).to(device)
        yield chunk, tokens, decoder.logits(tokens, lengths)[:, :-1]
