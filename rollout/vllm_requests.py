"""One vLLM request: prompt and sampling parameters in, plain arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import TandemError
from ..common.records import FinishReason, Float32Array, Int32Array, SamplingParams

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
"""vLLM's finish reasons. It has more, of requests that failed; those fail their group."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One sample as vLLM made it, its prefix not included."""

    tokens: Int32Array
    """``[L]``."""
    logprobs: Float32Array
    """``[L]``."""
    spans: tuple[tuple[str, int, int], ...]
    """Label of the version, start, end, counted in the sampled tokens."""
    reason: FinishReason
    """Why it ended."""


ABORTED = Finished(
    np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32), (), FinishReason.ABORT
)
"""A sample that never began."""


async def sample(
    llm: Any,
    name: str,
    context: list[int],
    sampling: SamplingParams,
    *,
    count: int,
    room: int,
    end_tokens: Sequence[int],
    salt: str,
) -> list[Finished]:
    """Draws some samples of one prompt. Up to vLLM's hearing of the request it doesn't wait.

    Args:
        llm: vLLM's ``AsyncLLM``; it must have been asked for its tasks before.
        name: the request's id, by which it can be aborted.
        context: token ids of prompt and prefix.
        sampling: the distribution; at temperature 0 one sample is all that vLLM gives.
        count: of samples.
        room: tokens that the engine's context, or the request's longest response, has left.
        end_tokens: end a response.
        salt: requests with unlike salts share no cached keys.
    """
    import vllm
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    parameters = vllm.SamplingParams(
        n=count,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_new_tokens, room),
        # The sampled token's log-prob and no other's.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # What ends a response is for Tandem to say, not for vLLM's reading of the model's files.
        ignore_eos=True,
        stop_token_ids=list(end_tokens),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    last = None
    async for output in llm.generate(tokens_input(context, cache_salt=salt), parameters, name):
        last = output
    if last is None:
        raise TandemError(f"vLLM ended request {name} without a word")
    return [_finished(output) for output in last.outputs]


def _finished(output: Any) -> Finished:
    """A ``CompletionOutput`` as plain arrays."""
    reason = REASONS.get(output.finish_reason)
    if reason is None:
        raise TandemError(f"vLLM ended a sample with {output.finish_reason!r}")
    tokens = np.array(output.token_ids, dtype=np.int32)
    flat = output.logprobs
    logprobs = np.empty(0, dtype=np.float32)
    if flat is not None and len(flat):
        # The sampled token stands first at its position.
        logprobs = np.array(flat.logprobs, dtype=np.float32)[flat.start_indices]
    if len(logprobs) != len(tokens):
        raise TandemError(f"vLLM gave {len(logprobs)} log-probs for {len(tokens)} tokens")
    spans = tuple((s.version, s.start, s.end) for s in output.weight_versions or ())
    return Finished(tokens, logprobs, spans, reason)
