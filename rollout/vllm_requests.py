"""One vLLM request: prompt and sampling parameters in, plain arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..common.errors import TandemError
from ..common.records import FinishReason, SamplingParams, Version
from .contract import Response

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
"""vLLM's finish reasons. It has more, of requests that failed; those fail their group."""


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
    versions: Mapping[str, Version],
) -> list[Response]:
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
        versions: by the names that vLLM was told; weights of other names have none.
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
    return [_response(output, versions) for output in last.outputs]


def _response(output: Any, versions: Mapping[str, Version]) -> Response:
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
    spans = tuple(
        (versions[span.version], span.start, span.end)
        for span in output.weight_versions or ()
        if span.version in versions
    )
    return Response(tokens, logprobs, spans, reason)
