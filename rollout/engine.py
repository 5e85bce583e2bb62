"""The interface of an inference engine: groups in, finished groups out, weights in between.

Two implementations hold the same contract (``tests/rollout/test_engine_contract.py``): torch
(:mod:`tandem.rollout.torch_engine`) and vLLM. This file imports no deep-learning library, so
whatever drives an engine can be tested without one.

The contract:

- The log-prob of a sampled token is that of the **sampling distribution**: after temperature,
  top-k and top-p, renormalised over the tokens kept. Greedy tokens (temperature 0) report the
  log-prob at temperature 1, since a distribution with one outcome has nothing to tell.
- A sample's tokens depend on the weights, the prompt, the prefix and the sampling parameters,
  and, where the engine says ``keyed_noise``, on ``(seed, group id, sample, position)``: never on
  what else is in the batch, on the worker or on time.
- Weights change **between token steps**. Samples keep their tokens, and their spans say which
  version sampled which.
- Closing the iterator of :meth:`Engine.generate` aborts what is left of its groups.

An engine may have one more attribute, ``weights_device``: the GPU through which new weights pass on
their way to the host's memory where NCCL carries them. One that is a :class:`Scorer` too has every
version checked that it takes up; both of the above are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..common.records import Float32Array, Int32Array, Sample, SamplingParams, Source, Version
from ..common.weights.manifest import SegmentPlace


def no_tokens() -> Int32Array:
    """``[0]`` An empty array of token ids."""
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRequest:
    """Asks for ``count`` samples of one prompt."""

    group_id: str
    """Names the group within the engine and keys its noise; unique among those running."""
    prompt_tokens: Int32Array
    """``[P]`` token ids, at least one."""
    count: int
    """Samples wanted."""
    sampling: SamplingParams
    """The distribution and the length limit."""
    seed: int
    """Of the run; keys the noise together with the group's id."""
    prefix_tokens: Int32Array | tuple[Int32Array, ...] = field(default_factory=no_tokens)
    """``[L]`` how each response begins: one array for all samples, or one for each."""
    prefix_source: Source = Source.EXPERT
    """Who wrote the prefix."""
    prefix_logprobs: Float32Array | tuple[Float32Array | None, ...] | None = None
    """``[L]`` nats; what its writer gave to each token of the prefix: one array for all samples, or
    one for each; None where that wasn't recorded."""
    longest: int | None = None
    """Most tokens of a response, its prefix counted; None = as many as its prefix and
    ``sampling.max_new_tokens`` make."""
    urgent: bool = False
    """Begins before all that wait, and beyond the engine's greatest number of samples if need be.
    For the few short samples of a check; an engine may take no notice."""

    def prefix(self, index: int) -> Int32Array:
        """``[L]`` The prefix of one sample."""
        if isinstance(self.prefix_tokens, tuple):
            return self.prefix_tokens[index]
        return self.prefix_tokens

    def recorded(self, index: int) -> Float32Array | None:
        """``[L]`` The recorded log-probs of one sample's prefix, or None."""
        if isinstance(self.prefix_logprobs, tuple):
            return self.prefix_logprobs[index]
        return self.prefix_logprobs

    def room(self, prefix: int) -> int:
        """Most tokens that are sampled after a prefix of so many."""
        if self.longest is None:
            return self.sampling.max_new_tokens
        return min(self.sampling.max_new_tokens, self.longest - prefix)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedGroup:
    """All samples of one request, in order, or the reason why there are none."""

    group_id: str
    """Of the request."""
    samples: tuple[Sample, ...]
    """``count`` ungraded samples; those that were aborted hold the tokens they had."""
    error: str | None = None
    """Why the engine could not generate; ``samples`` is then empty and the engine goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter as the engine wants to receive it."""

    name: str
    """As in the Hugging Face checkpoint; tied parameters appear once."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """``float32``, ``bfloat16``, …: the engine's, hence the wire's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was started."""

    sampled_tokens: int = 0
    """Tokens sampled, aborted ones included."""
    prefill_tokens: int = 0
    """Tokens whose keys and values were computed other than by sampling them."""
    decode_steps: int = 0
    """Batched token steps."""
    busy_seconds: float = 0.0
    """Seconds in which at least one row was running."""
    loads: int = 0
    """Weight changes."""
    load_seconds: float = 0.0
    """Seconds in which no token was sampled because the weights were changed."""
    running_rows: int = 0
    """Samples being generated now."""
    waiting_groups: int = 0
    """Groups not yet started."""


@runtime_checkable
class StagedWeights(Protocol):
    """A whole set of verified weights that an engine may copy from until ``load`` returns."""

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Name and tensor of every parameter, in the engine's dtypes."""
        ...

    @property
    def place(self) -> SegmentPlace | None:
        """Where other processes of the host can map them; None where they can't."""
        ...


class NamedWeights:
    """Staged weights that are a mapping, and the shared memory in which they may lie."""

    def __init__(self, tensors: Mapping[str, Any], place: SegmentPlace | None = None) -> None:
        self._tensors = dict(tensors)
        self.place = place

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Name and tensor of every parameter."""
        return self._tensors.items()


@runtime_checkable
class Engine(Protocol):
    """What a rollout worker and an evaluation need of an inference engine."""

    keyed_noise: bool
    """True where noise is keyed by (seed, group id, sample, position)."""

    @property
    def version(self) -> Version | None:
        """Version of the weights in use; None before the first :meth:`load`."""
        ...

    async def start(self) -> None:
        """Makes the engine ready. Called once."""
        ...

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group once, as it finishes.

        May be called while other calls are running; an engine batches across calls.

        Raises:
            ValueError: a request's ``group_id`` is already running.
        """
        ...

    async def abort(self, group_ids: Iterable[str]) -> None:
        """Ends groups at the next token step; they are yielded with their partial samples.

        Unknown ids are ignored: a group may have finished meanwhile.
        """
        ...

    async def pause(self) -> None:
        """Returns once no token step runs; rows keep their state until :meth:`resume`."""
        ...

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""
        ...

    async def load(self, state: StagedWeights, version: Version) -> None:
        """Changes the weights between two token steps and takes the new version's name.

        Running samples go on under the new weights; their keys and values are recomputed where
        the engine is set to do so.

        Raises:
            WeightsError: names, shapes or dtypes aren't the engine's; nothing was changed.
        """
        ...

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use: a step that changed nothing was published as a version."""
        ...

    def parameter_specs(self) -> list[ParameterSpec]:
        """Every parameter that :meth:`load` expects, in the model's order."""
        ...

    def stats(self) -> EngineStats:
        """Counters; cheap, from any thread."""
        ...

    async def close(self) -> None:
        """Aborts what runs and frees the engine."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """What an engine has besides, so that its weights can be checked."""

    async def score(
        self, rows: Sequence[Int32Array], temperature: float = 1.0
    ) -> list[Float32Array]:
        """Log-probs that the weights in use give to the tokens of some rows.

        Computed from the tokens alone, not from any stored keys and values, over the whole
        vocabulary, at the temperature asked for, whatever the samples' own may be. Generation
        goes on before and after it.

        Args:
            rows: ``[S]`` token ids each, at least two and fewer than the model's context.
            temperature: above 0.

        Returns:
            Of each row ``[S - 1]`` nats: of every token but the first, given those before it.

        Raises:
            TandemError: the engine can't.
        """
        ...
