"""What all engines have in common: checks of requests and weights, and how groups become samples.

Each engine samples in its own way; these parts of the contract in :mod:`.engine` are shared. No
deep-learning library is imported here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..common import prompts
from ..common.errors import WeightsError
from ..common.records import (
    FinishReason,
    Float32Array,
    Int32Array,
    Sample,
    Source,
    Version,
    VersionSpan,
)
from .engine import FinishedGroup, GroupRequest, ParameterSpec, no_tokens
from .model_facts import ModelFacts
from .stops import StopStrings, stop_strings

log = logging.getLogger("tandem.rollout")

NAMED = 3
"""Number of parameters of each kind that an error names."""


@dataclass(frozen=True, slots=True)
class Response:
    """What an engine sampled for one sample, not including its prefix."""

    tokens: Int32Array
    """``[L]`` token ids."""
    logprobs: Float32Array
    """``[L]`` log-probs in nats."""
    spans: tuple[tuple[Version, int, int], ...]
    """Version, start, end, counted in the sampled tokens."""
    reason: FinishReason
    """Why it ended."""


NOTHING = Response(no_tokens(), np.empty(0, dtype=np.float32), (), FinishReason.ABORT)
"""The response of a sample that was aborted before it began."""


@dataclass(slots=True, eq=False)
class Running:
    """A group that an engine is generating."""

    request: GroupRequest
    deliver: Callable[[Any], None]
    """Hands the group to its caller; called once, from any thread."""
    finished: dict[int, Response] = field(default_factory=dict)
    """Responses of ended samples, by index."""
    error: str | None = None
    """Why the group failed."""
    refused: bool = False
    """Whether its request can't be generated at all."""
    stops: StopStrings | None = None
    """Finds its stop strings; None if it has none."""


RunningT = TypeVar("RunningT", bound=Running)


async def stream(
    kind: type[RunningT],
    requests: Sequence[GroupRequest],
    submit: Callable[[list[RunningT]], Awaitable[None]],
    leave: Callable[[set[RunningT]], None],
    tokenizer: Any,
) -> AsyncIterator[FinishedGroup]:
    """Yields each group as it finishes; samples are built in the caller's thread.

    Args:
        kind: the engine's record of a running group.
        requests: requests for the groups.
        submit: gives them to the engine, which later calls each one's ``deliver``.
        leave: called with unfinished groups when the caller leaves; the engine may never have taken them in.
        tokenizer: decodes samples.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[RunningT] = asyncio.Queue()

    def deliver(group: RunningT) -> None:
        try:
            loop.call_soon_threadsafe(arrived.put_nowait, group)
        except RuntimeError:
            # The caller's loop is closed: nobody waits for this group any more.
            log.debug("group %s finished after its caller left", group.request.group_id)

    groups = [kind(request, deliver) for request in requests]
    for group in groups:
        if group.request.stop:
            group.stops = stop_strings(tokenizer, group.request.stop)
    left = set(groups)
    try:
        # Whoever is cancelled here doesn't know whether the engine has the groups already.
        await submit(groups)
        while left:
            group = await arrived.get()
            left.discard(group)
            yield finished_group(group, tokenizer)
    finally:
        if left:
            leave(left)


def enter(groups: Sequence[RunningT], running: dict[str, RunningT]) -> None:
    """Records groups as running.

    Raises:
        ValueError: an id is running already, or comes twice; none was recorded.
    """
    ids = [group.request.group_id for group in groups]
    clash = [i for i in ids if i in running]
    if clash or len(set(ids)) < len(ids):
        raise ValueError(f"group ids that run already, or twice in one call: {clash or ids}")
    running.update(zip(ids, groups, strict=True))


def ids_of(groups: Iterable[RunningT], running: Mapping[str, RunningT]) -> set[str]:
    """The ids of those groups that run. Others may run under the ids of groups that were refused for that."""
    return {
        group.request.group_id for group in groups if running.get(group.request.group_id) is group
    }


def refusal(request: GroupRequest, facts: ModelFacts) -> str | None:
    """Why a request can't be generated with a model; None if it can."""
    if len(request.prompt_tokens) == 0:
        return "the prompt has no tokens"
    if isinstance(request.prefix_tokens, tuple) and len(request.prefix_tokens) != request.count:
        return f"{len(request.prefix_tokens)} prefixes for {request.count} samples"
    known = request.prefix_logprobs
    if isinstance(known, tuple) and len(known) != request.count:
        return f"log-probs of {len(known)} prefixes for {request.count} samples"
    if request.sampling.max_new_tokens < 1:
        return "max_new_tokens is under 1"
    for index in range(request.count):
        prefix = request.prefix(index)
        for part in (request.prompt_tokens, prefix):
            if len(part) and not 0 <= int(part.min()) <= int(part.max()) < facts.vocabulary:
                return f"a token id is outside the model's {facts.vocabulary}"
        recorded = request.recorded(index)
        if recorded is not None and len(recorded) != len(prefix):
            return f"{len(recorded)} recorded log-probs for a prefix of {len(prefix)} tokens"
        if len(prefix) and int(prefix[-1]) in facts.end_tokens:
            return "the prefix ends with the end token: nothing is left to sample"
        if request.room(len(prefix)) < 1:
            return f"a prefix of {len(prefix)} tokens, and a response has {request.longest}"
        if len(request.prompt_tokens) + len(prefix) >= facts.context:
            return (
                f"prompt and prefix have {len(request.prompt_tokens)} + {len(prefix)} tokens, and "
                f"the engine's context has {facts.context} (the model's own, or "
                f"rollout.vllm.max_model_len)"
            )
        if not (isinstance(request.prefix_tokens, tuple) or isinstance(known, tuple)):
            break
    return None


def finished_group(group: Running, tokenizer: Any) -> FinishedGroup:
    """The result of a group that has ended, for its caller: its samples in order, or its error."""
    request = group.request
    if group.error is not None:
        return FinishedGroup(
            group_id=request.group_id, samples=(), error=group.error, refused=group.refused
        )
    prefixes = [request.prefix(i) for i in range(request.count)]
    recorded = [request.recorded(i) for i in range(request.count)]
    responses = [group.finished[i] for i in range(request.count)]
    rows = [
        np.concatenate([prefix, response.tokens]).astype(np.int32)
        if len(prefix)
        else response.tokens
        for prefix, response in zip(prefixes, responses, strict=True)
    ]
    samples = []
    texts = prompts.decode(tokenizer, rows)
    for prefix, known, response, tokens, text in zip(
        prefixes, recorded, responses, rows, texts, strict=True
    ):
        start = len(prefix)
        source = np.full(len(tokens), Source.OWN, dtype=np.uint8)
        source[:start] = request.prefix_source
        logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
        if known is not None:
            # The prefix's own behaviour policy, by which its ratio, or weight, is divided.
            logprobs[:start] = known
        logprobs[start:] = response.logprobs
        samples.append(
            Sample(
                tokens=tokens,
                source=source,
                logprobs=logprobs,
                spans=tuple(
                    VersionSpan(term=v.term, step=v.step, start=start + first, end=start + last)
                    for v, first, last in response.spans
                    if last > first
                ),
                finish_reason=response.reason,
                sampling=request.sampling,
                text=text,
                reward=None,
                verdict=None,
                components={},
                extracted=None,
                grader=None,
            )
        )
    return FinishedGroup(group_id=request.group_id, samples=tuple(samples))


def fitting(
    tensors: Iterable[tuple[str, Any]], specs: Iterable[ParameterSpec], version: Version
) -> dict[str, Any]:
    """New weights in the order of an engine's parameters.

    Args:
        tensors: name and tensor of every parameter, in any order.
        specs: the parameters that the engine expects.
        version: version of the new weights, for errors.

    Raises:
        WeightsError: a parameter is missing, unknown, or of another shape or dtype.
    """
    new: Mapping[str, Any] = dict(tensors)
    expected = {spec.name: spec for spec in specs}
    missing, unknown = sorted(expected.keys() - new.keys()), sorted(new.keys() - expected.keys())
    if missing or unknown:
        counts = [
            f"{len(names)} {what} ({', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''})"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise WeightsError(
            f"weights {version} don't fit the engine: {' and '.join(counts)} of its "
            f"{len(expected)} parameters; is it the same model?"
        )
    for name, spec in expected.items():
        shape, dtype = tuple(new[name].shape), str(new[name].dtype).removeprefix("torch.")
        if (shape, dtype) != (spec.shape, spec.dtype):
            raise WeightsError(
                f"weights {version} don't fit the engine: {name} is {dtype} {shape}, not "
                f"{spec.dtype} {spec.shape}"
            )
    return {name: new[name] for name in expected}
