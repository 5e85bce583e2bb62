"""The policy's log-probs of a few fixed rows, in the dtype in which its weights travel.

They travel with the version; workers' engines score the same rows once they have loaded it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..common.seeds import keyed_generator
from ..common.weights.manifest import ScoredRows
from .engine.deepspeed_engine import DeepSpeedEngine

ROWS = 4
LENGTH = 24
"""Tokens per row; with 4 rows there are 96, of which 92 are scored."""


def fixed_rows(vocabulary: int, context: int, seed: int) -> NDArray[np.int64]:
    """``[R, S]`` the fixed rows of a run: random tokens, so that every matrix is used.

    Args:
        vocabulary: number of token ids.
        context: greatest length of a row.
        seed: the run's seed.

    >>> fixed_rows(32, 256, seed=0).shape
    (4, 24)
    """
    noise = keyed_generator(seed, "rows that check new weights", vocabulary)
    return noise.integers(0, vocabulary, (ROWS, max(2, min(LENGTH, context))), dtype=np.int64)


@torch.no_grad()
def score(engine: DeepSpeedEngine, rows: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
    """Log-probs of rows under the current weights, by the policy's own forward.

    Collective with ZeRO-3: every rank must call it with the same rows.

    Args:
        engine: this rank's engine.
        rows: ``[R, S]`` token ids.
        dtype: dtype of the weights on the wire. If it isn't the learner's own, the weights are rounded
            to it for this one pass (which costs a copy), and the computation is otherwise unchanged:
            an engine in bf16 then differs only by its own rounding. With ZeRO-3 no rank has all
            weights at once, so there only the matrix products are computed in it, by autocast.

    Returns:
        ``[R, S - 1]`` nats at temperature 1, float32, on the CPU.
    """
    policy = engine.policy
    tokens = torch.from_numpy(rows).to(engine.device)
    count, length = tokens.shape
    starts = torch.arange(count, device=engine.device)[:, None] * length
    before = (starts + torch.arange(length - 1, device=engine.device)).flatten()
    arguments = (tokens, before, tokens[:, 1:].flatten(), None)
    own = next(policy.parameters()).dtype
    policy.eval()
    try:
        if dtype == own:
            logprobs, _ = policy(*arguments)
        elif engine.stage < 3:
            with _rounded(policy, dtype):
                logprobs, _ = policy(*arguments)
        else:
            with torch.autocast(engine.device.type, dtype, enabled=dtype != torch.float32):
                logprobs, _ = policy(*arguments)
    finally:
        policy.train()
    return logprobs.view(count, length - 1).float().cpu()


def as_published(rows: NDArray[np.int64], logprobs: Tensor) -> ScoredRows:
    """The rows and their log-probs as they travel with a version."""
    return ScoredRows(
        rows=tuple(map(tuple, rows.tolist())), logprobs=tuple(map(tuple, logprobs.tolist()))
    )


@contextmanager
def _rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replaces the parameters by rounded copies, and puts the parameters back."""
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point()
    ]
    # Tied parameters stay tied.
    copies = {
        id(p): nn.Parameter(p.detach().to(dtype).to(p.dtype), requires_grad=False)
        for _, _, p in places
    }
    try:
        for parameters, name, parameter in places:
            parameters[name] = copies[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
