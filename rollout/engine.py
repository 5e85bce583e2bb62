"""The interface of an inference engine: groups in, finished groups out, weights in between.

Two implementations hold the same contract (``tests/rollout/test_engine_contract.py``): torch
(:mod:`tandem.rollout.decoding.torch_engine`) and vLLM. This file imports no deep-learning library, so
whatever drives an engine can be tested without one.

The contract:

- The log-prob of a sampled token is that of the **sampling distribution**: after temperature,
  top-k and top-p, renormalised over the tokens kept. Greedy tokens (temperature 0) report the
  log-prob at temperature 1, since a distribution with a single outcome carries no information.
- A sample's tokens depend on the weights, the prompt, the prefix and the sampling parameters,
  and, if the engine has ``keyed_noise``, on ``(seed, group id, sample, position)``: never on
  what else is in the batch, on the worker or on time. A request's ``noise`` stands for its group's id
  there.
- Weights change **between token steps**. Samples keep their tokens, and their spans say which
  version sampled which tokens.
- Closing the iterator of :meth:`Engine.generate` aborts what is left of its groups.

An engine may have more attributes. ``weights_device``: the GPU through which new weights pass on
their way to host memory if NCCL carries them. ``processes``: those that it runs beside the worker's own, as
``psutil.Process``, whose memory is reported with the worker's. ``exhausted``: the error with which a token step, a
load or a score ran out of memory, or None; the worker ends with it. ``broken``: why it will never finish a group again, empty while it
works; the worker ends with that, too. ``context``: greatest number of tokens of prompt and response
together. If an engine is also a :class:`Scorer`, every version
that it loads is checked; both engines above are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..common.records import Float32Array, Int32Array, Sample, SamplingParams, Source, Version
from ..common.weights.manifest import SegmentPlace


def no_tokens() -> Int32Array:
    """``[0]`` An empty array of token ids."""
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """What an environment is given to play: the samples of such a request are episodes."""

    environment: str
    """Name in ``environments.use``."""
    row: Mapping[str, Any]
    """The data set's row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRequest:
    """Asks for ``count`` samples of one prompt."""

    group_id: str
    """Id of the group, which keys its noise; unique among the engine's running groups."""
    prompt_tokens: Int32Array
    """``[P]`` token ids, at least one."""
    count: int
    """Number of samples."""
    sampling: SamplingParams
    """The distribution and the length limit."""
    seed: int
    """The run's seed; keys the noise together with the group's id."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample: it ends with the first sampled token after which its text holds one. The
    prefix doesn't count."""
    prefix_tokens: Int32Array | tuple[Int32Array, ...] = field(default_factory=no_tokens)
    """``[L]`` token ids with which responses begin: one array for all samples, or one for each."""
    prefix_source: Source = Source.EXPERT
    """Who wrote the prefix."""
    prefix_logprobs: Float32Array | tuple[Float32Array | None, ...] | None = None
    """``[L]`` log-probs in nats that the prefix's writer gave its tokens: one array for all samples, or
    one for each; None if they weren't recorded."""
    longest: int | None = None
    """Greatest number of tokens in a response, including its prefix; None = its prefix plus
    ``sampling.max_new_tokens``."""
    shortest: int = 0
    """Number of sampled tokens before which no end token is drawn; a stop string may end a sample earlier."""
    noise: str | None = None
    """Keys the noise in place of the group's id, so that equal requests have equal samples. An engine without
    ``keyed_noise`` then seeds its own generators, or ignores it."""
    urgent: bool = False
    """Whether it begins before all waiting groups, even above the engine's limit of running samples.
    Meant for the few short samples of a check; an engine may ignore it."""
    prompt_text: str = ""
    """The prompt as text, for a server that takes no tokens; an engine ignores it."""
    follow: Callable[[Sequence[int]], None] | None = None
    """Called with the tokens that were sampled since the last call, from any thread, at token steps before the
    group is yielded. Only for a request of one sample; it may neither wait nor raise."""
    task: Task | None = None
    """What to play in an environment (:mod:`tandem.rollout.player`); an engine never gets such a request."""

    def prefix(self, index: int) -> Int32Array:
        """``[L]`` token ids of one sample's prefix."""
        if isinstance(self.prefix_tokens, tuple):
            return self.prefix_tokens[index]
        return self.prefix_tokens

    def recorded(self, index: int) -> Float32Array | None:
        """``[L]`` recorded log-probs of one sample's prefix, or None."""
        if isinstance(self.prefix_logprobs, tuple):
            return self.prefix_logprobs[index]
        return self.prefix_logprobs

    def room(self, prefix: int) -> int:
        """Greatest number of tokens that are sampled after a prefix of ``prefix`` tokens."""
        if self.longest is None:
            return self.sampling.max_new_tokens
        return min(self.sampling.max_new_tokens, self.longest - prefix)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedGroup:
    """All samples of one request, in order, or the reason why there are none."""

    group_id: str
    samples: tuple[Sample, ...]
    """``count`` ungraded samples; aborted ones hold the tokens sampled so far."""
    error: str | None = None
    """Why the engine could not generate; ``samples`` is then empty and the engine goes on."""
    refused: bool = False
    """Whether the request is to blame, which would fail again."""
    prompt_tokens: Int32Array | None = None
    """``[P]`` what all episodes of a group began with; None = the request's own prompt."""
    prompt_text: str | None = None
    """The same as text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Likeliest:
    """What a model gives the tokens of a row, except the first, and the most likely tokens in their places."""

    own: Float32Array
    """``[S - 1]`` nats: log-probs of the row's own tokens."""
    tokens: Int32Array
    """``[S - 1, K]`` the most likely tokens, the likeliest first."""
    logprobs: Float32Array
    """``[S - 1, K]`` nats: theirs. Where one is the row's own token, exactly its log-prob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter as the engine expects to receive it."""

    name: str
    """Name in the Hugging Face checkpoint; tied parameters appear once."""
    shape: tuple[int, ...]
    dtype: str
    """``float32``, ``bfloat16``, …: the engine's dtype, in which the parameter is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was started."""

    sampled_tokens: int = 0
    """Number of sampled tokens, including those of aborted samples."""
    prefill_tokens: int = 0
    """Number of tokens whose keys and values were computed without sampling them."""
    decode_steps: int = 0
    """Number of batched token steps."""
    busy_seconds: float = 0.0
    """Seconds in which at least one row was running."""
    loads: int = 0
    """Number of weight changes."""
    load_seconds: float = 0.0
    """Seconds in which no token was sampled because the weights were changed."""
    running_rows: int = 0
    """Number of samples that are being generated."""
    waiting_groups: int = 0
    """Number of groups that haven't started."""


@runtime_checkable
class StagedWeights(Protocol):
    """A complete set of verified weights, from which an engine may copy until ``load`` returns."""

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Name and tensor of every parameter, in the engine's dtypes."""
        ...

    @property
    def place(self) -> SegmentPlace | None:
        """Where other processes of the host can map them; None if they can't."""
        ...


class NamedWeights:
    """Staged weights as a mapping, with the shared memory that may hold them."""

    def __init__(self, tensors: Mapping[str, Any], place: SegmentPlace | None = None) -> None:
        self._tensors = dict(tensors)
        self.place = place

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Name and tensor of every parameter."""
        return self._tensors.items()


@runtime_checkable
class Engine(Protocol):
    """What a rollout worker and an evaluation need from an inference engine."""

    keyed_noise: bool
    """Whether noise is keyed by (seed, group id, sample, position)."""

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

        Unknown ids are ignored, since a group may just have finished.
        """
        ...

    async def pause(self) -> None:
        """Returns when no token step runs; rows keep their state until :meth:`resume`."""
        ...

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""
        ...

    async def load(self, state: StagedWeights, version: Version) -> None:
        """Changes the weights between two token steps and adopts the new version's name.

        Running samples go on under the new weights; their keys and values are recomputed if
        the engine is configured to do so.

        Raises:
            WeightsError: names, shapes or dtypes aren't the engine's; nothing was changed.
        """
        ...

    async def restamp(self, version: Version) -> None:
        """Renames the weights in use, for a step that was published as a version but changed nothing."""
        ...

    def parameter_specs(self) -> list[ParameterSpec]:
        """Every parameter that :meth:`load` expects, in the model's order."""
        ...

    def stats(self) -> EngineStats:
        """Counters; cheap, and callable from any thread."""
        ...

    async def close(self) -> None:
        """Aborts everything and frees the engine."""
        ...


@runtime_checkable
class Holder(Protocol):
    """What an engine needs in addition so that new weights can wait for the running samples."""

    async def hold(self, seconds: float) -> None:
        """Lets no group begin until the next :meth:`Engine.load`, except urgent ones.

        Returns when no sample runs, or after ``seconds``.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """The additional method that an engine needs for its weights to be checked."""

    async def score(
        self, rows: Sequence[Int32Array], temperature: float = 1.0
    ) -> list[Float32Array]:
        """Log-probs that the weights in use give to the tokens of some rows.

        They are computed from the tokens alone, not from any stored keys and values, over the whole
        vocabulary and at the given temperature, whatever the samples' own may be. Generation goes on
        before and afterwards.

        Args:
            rows: ``[S]`` token ids each, at least two and fewer than the model's context.
            temperature: above 0.

        Returns:
            For each row ``[S - 1]`` nats, for every token but the first, given those before it.

        Raises:
            TandemError: the engine can't score them.
        """
        ...


@runtime_checkable
class Ranker(Protocol):
    """The additional method that an engine needs to tell clients the log-probs of prompts."""

    async def rank(self, rows: Sequence[Int32Array], count: int) -> list[Likeliest]:
        """Log-probs, at temperature 1 over the whole vocabulary, of the tokens of some rows and of the most
        likely tokens in their places, computed as in :meth:`Scorer.score`.

        Args:
            rows: ``[S]`` token ids each, at least two and fewer than the model's context.
            count: K, from 1 to 20.

        Raises:
            TandemError: the engine can't score them.
        """
        ...
