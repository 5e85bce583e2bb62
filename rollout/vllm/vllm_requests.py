"""One vLLM request: prompt and sampling parameters in, plain arrays out.

Newer versions of vLLM report which weights sampled which tokens. For others :class:`Progress` records how
far each sample was when the weights changed, which happens while no step runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import TandemError
from ...common.records import FinishReason, Float32Array, SamplingParams, Version
from ..contract import Response
from ..engine import Likeliest
from ..stops import StopStrings

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
"""vLLM's finish reasons; any other means that the request failed, and fails its group."""
FIRST = -1
"""vLLM's priority for urgent requests; lower comes first, and all others have 0."""
ABORT_SECONDS = 60.0
"""Deadline for the last output of a request that was aborted; it comes at once, also while vLLM is paused."""


def says_versions(llm: Any) -> bool:
    """Whether vLLM reports by itself which weights sampled which tokens."""
    from vllm.outputs import CompletionOutput

    fields = getattr(CompletionOutput, "__dataclass_fields__", {})
    return "weight_versions" in fields and callable(getattr(llm, "update_weight_version", None))


class Progress:
    """The progress of one request's samples, and which weights sampled which of their tokens."""

    def __init__(self, count: int, version: Version | None) -> None:
        """Starts with no tokens sampled, for ``count`` samples under weights ``version``."""
        self.latest: list[Any] = [None] * count
        """The newest ``CompletionOutput`` of each sample, with all its tokens."""
        self._version = version
        self._since = [0] * count
        self._spans: list[list[tuple[Version, int, int]]] = [[] for _ in range(count)]

    def lengths(self) -> list[int]:
        """Number of tokens of each sample so far."""
        return [0 if output is None else len(output.token_ids) for output in self.latest]

    def change(self, version: Version) -> None:
        """Records that other weights sample from here on; all earlier tokens must have arrived."""
        self._close()
        self._version = version

    def spans(self) -> list[tuple[tuple[Version, int, int], ...]]:
        """Each sample's spans, once all samples have ended."""
        self._close()
        return [tuple(spans) for spans in self._spans]

    def _close(self) -> None:
        for index, length in enumerate(self.lengths()):
            if self._version is not None and length > self._since[index]:
                self._spans[index].append((self._version, self._since[index], length))
            self._since[index] = length


async def sample(
    llm: Any,
    name: str,
    context: list[int],
    sampling: SamplingParams,
    *,
    count: int,
    room: int,
    least: int = 0,
    end_tokens: Sequence[int],
    salt: str,
    versions: Mapping[str, Version],
    progress: Progress | None = None,
    urgent: bool = False,
    stops: StopStrings | None = None,
    adapter: Any = None,
    before: tuple[int, ...] = (),
    seed: int | None = None,
    follow: Callable[[Sequence[int]], None] | None = None,
) -> list[Response]:
    """Draws samples of one prompt. Doesn't wait until vLLM has registered the request.

    Args:
        llm: vLLM's ``AsyncLLM``, on which ``get_supported_tasks`` must have been called.
        name: the request's id, by which it can be aborted.
        context: token ids of prompt and prefix.
        sampling: the distribution; at temperature 0 vLLM draws only one sample.
        count: number of samples.
        room: number of tokens left in the engine's context and the request's longest response.
        least: number of tokens before which no end token is drawn.
        end_tokens: token ids that end a response.
        salt: requests with different salts share no cached keys.
        versions: versions by the names that vLLM has for them; weights with other names have none.
        progress: records the spans if vLLM doesn't; costs one output per step.
        urgent: whether it goes before all waiting requests.
        stops: end the sample; only for one sample. They are looked for here, since vLLM has no
            tokenizer, and it may have sampled a few more tokens, which are left out.
        adapter: vLLM's ``LoRARequest``; None = the model's own weights.
        before: the last tokens of the context, if they are part of the sample: a stop string may have
            begun there.
        seed: seeds the request's own generators; None = vLLM's common one draws.
        follow: see :class:`..engine.GroupRequest`; only for one sample.

    Raises:
        TandemError: vLLM failed the request, or doesn't end it.
    """
    import vllm
    from vllm.sampling_params import RequestOutputKind

    every_step = progress is not None or stops is not None or follow is not None
    kind = RequestOutputKind.CUMULATIVE if every_step else RequestOutputKind.FINAL_ONLY
    parameters = vllm.SamplingParams(
        n=count,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_new_tokens, room),
        min_tokens=max(0, min(least, sampling.max_new_tokens, room)),
        # Only the sampled token's log-prob.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        seed=seed,
        # Tandem decides what ends a response, not the model's files as vLLM reads them.
        ignore_eos=True,
        stop_token_ids=list(end_tokens),
        output_kind=kind,
    )
    ended = Progress(count, None) if progress is None else progress
    end, checked, told = None, 0, 0
    outputs = llm.generate(
        _prompt(context, salt),
        parameters,
        name,
        lora_request=adapter,
        priority=FIRST if urgent else 0,
    )
    try:
        async with asyncio.timeout(None) as limit, contextlib.aclosing(outputs):
            async for output in outputs:
                for one in output.outputs:
                    ended.latest[one.index] = one
                if end is not None:
                    continue
                if stops is not None:
                    tokens = [*before, *ended.latest[0].token_ids]
                    found = stops.first_end(tokens, len(before) + checked)
                    checked = len(tokens) - len(before)
                    if found is not None:
                        end = found - len(before)
                if follow is not None:
                    follow(list(ended.latest[0].token_ids[told:end]))
                    told = len(ended.latest[0].token_ids)
                if end is not None:
                    # Only a request's last output says which weights sampled what.
                    limit.reschedule(asyncio.get_running_loop().time() + ABORT_SECONDS)
                    await llm.abort([name])
    except TimeoutError:
        raise TandemError(
            f"vLLM hasn't ended request {name} {ABORT_SECONDS:g} s after it was aborted"
        ) from None
    lacking = ended.latest.count(None)
    if lacking:
        raise TandemError(f"vLLM ended request {name} without output for {lacking} samples")
    if progress is not None:
        return [
            _response(output, spans, end)
            for output, spans in zip(progress.latest, progress.spans(), strict=True)
        ]
    return [
        _response(
            output,
            tuple(
                (versions[span.version], span.start, span.end)
                for span in getattr(output, "weight_versions", None) or ()
                if span.version in versions
            ),
            end,
        )
        for output in ended.latest
    ]


async def score(
    llm: Any,
    name: str,
    row: Sequence[int],
    temperature: float,
    *,
    salt: str,
    adapter: Any = None,
) -> Float32Array:
    """``[S - 1]`` log-probs of a row's tokens except the first, from a separate prefill.

    vLLM reads no cached keys for prompts whose log-probs are requested, and gives the log-probs of
    temperature 1. Another temperature needs the sum of all tokens' ``p^(1/T)``, and so each position's
    whole distribution, which is expensive for a large vocabulary (``LARGE_VOCABULARY`` in :mod:`.vllm_engine`).

    Args:
        llm: vLLM's ``AsyncLLM``.
        name: the request's id.
        row: ``[S]`` token ids.
        temperature: above 0.
        salt: must be unique to this request.
        adapter: see :func:`sample`.
    """
    # The row's own tokens, or every token.
    count = 0 if temperature == 1.0 else -1
    starts, ends, distributions, _ = await _given(llm, name, row, count, salt, adapter)
    own = distributions[starts]
    if temperature == 1.0:
        return own.astype(np.float32)
    logprobs = []
    for start, end in zip(starts, ends, strict=True):
        # All tokens follow, among them the row's own token a second time.
        heated = distributions[start + 1 : end] / temperature
        most = heated.max()
        logprobs.append(
            distributions[start] / temperature - most - np.log(np.exp(heated - most).sum())
        )
    return np.array(logprobs, dtype=np.float32)


async def rank(
    llm: Any, name: str, row: Sequence[int], count: int, *, salt: str, adapter: Any = None
) -> Likeliest:
    """Log-probs of a row's tokens except the first, and of the ``count`` most likely ones; see :func:`score`."""
    starts, _, values, tokens = await _given(llm, name, row, count, salt, adapter)
    # The most likely ones follow the row's own token.
    places = starts[:, None] + np.arange(1, count + 1)
    return Likeliest(
        own=values[starts].astype(np.float32),
        tokens=tokens[places].astype(np.int32),
        logprobs=values[places].astype(np.float32),
    )


async def _given(
    llm: Any, name: str, row: Sequence[int], count: int, salt: str, adapter: Any
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """A prompt's log-probs by vLLM: where each position of the row but the first begins and ends in the two flat
    arrays that follow, of log-probs and of tokens. At each position the row's own token comes first."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    parameters = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=count,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    flat = None
    prompt = _prompt(list(row), salt)
    outputs = llm.generate(prompt, parameters, name, lora_request=adapter, priority=FIRST)
    async for output in outputs:
        flat = output.prompt_logprobs
    if flat is None or len(flat) != len(row):
        raise TandemError(
            f"vLLM gave log-probs of {0 if flat is None else len(flat)} of {len(row)} tokens"
        )
    # The first token has none.
    return (
        np.array(flat.start_indices[1:]),
        np.array(flat.end_indices[1:]),
        np.array(flat.logprobs, dtype=np.float64),
        np.array(flat.token_ids),
    )


def _prompt(context: list[int], salt: str) -> Any:
    """Token ids in the form that ``generate`` takes."""
    try:
        from vllm.inputs.engine import tokens_input
    except ImportError:  # Earlier versions take a plain mapping.
        return {"prompt_token_ids": context, "cache_salt": salt}
    return tokens_input(context, cache_salt=salt)


def _response(
    output: Any, spans: tuple[tuple[Version, int, int], ...], end: int | None = None
) -> Response:
    """A ``CompletionOutput`` as plain arrays; its first ``end`` tokens if a stop string has ended it."""
    reason = REASONS.get(output.finish_reason) if end is None else FinishReason.STOP
    if reason is None:
        raise TandemError(f"vLLM ended a sample with {output.finish_reason!r}")
    tokens = np.array(output.token_ids, dtype=np.int32)
    flat = output.logprobs
    logprobs = np.empty(0, dtype=np.float32)
    if flat is not None and len(flat):
        # At each position the sampled token comes first.
        logprobs = np.array(flat.logprobs, dtype=np.float32)[flat.start_indices]
    if len(logprobs) != len(tokens):
        raise TandemError(f"vLLM gave {len(logprobs)} log-probs for {len(tokens)} tokens")
    if end is not None:
        tokens, logprobs = tokens[:end], logprobs[:end]
        spans = tuple((v, first, min(last, end)) for v, first, last in spans if first < end)
    return Response(tokens, logprobs, spans, reason)
