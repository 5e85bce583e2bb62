"""The torch engine's batch: rows of tokens that are sampled together, one token per step.

A row has a place, which is its index in all arrays and in the key-value cache::

    join -> [a place] -> step, step, … -> ended (end token, length, abort) -> place is free

Rows that join take free places first. Before a step the last rows move into the remaining free places,
so that only running rows are computed. Only rows that join or move are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...common.records import FinishReason, Int32Array, SamplingParams, Version
from ..contract import Response, Running
from ..model_facts import ModelFacts
from .decoder import Decoder, KeyValues
from .sampling import Noise, draw

PREFILL_TOKENS = 16_384
"""Padded tokens of one prefill pass at most, which bounds its memory."""
GROWTH = 64
"""Least number of slots by which the cache grows."""
NOT_FINITE = (
    "the model's logits aren't finite numbers for one of its samples: look whether the weights are, and set "
    "rollout.dtype=bfloat16 or float32 if it is float16, whose numbers end at 65,504"
)


@dataclass(slots=True, eq=False)
class Row:
    """One sample in progress; its tokens are in the batch's arrays."""

    group: Running
    index: int
    """Place of the sample in its group."""
    context: Int32Array
    """``[P + L]`` token ids of prompt and prefix."""
    spans: list[tuple[Version, int, int]] = field(default_factory=list)
    """Closed spans: version, start, end, counted in the sampled tokens."""
    since: int = 0
    """Number of sampled tokens when the version in use took over."""


def rows_of(group: Running) -> list[Row]:
    """Makes a row for each sample of a group."""
    request = group.request
    rows = []
    for index in range(request.count):
        prefix, context = request.prefix(index), request.prompt_tokens
        if len(prefix):
            context = np.concatenate([context, prefix])
        rows.append(Row(group, index, context))
    return rows


class Batch:
    """The running rows, with everything that is kept of them between two steps."""

    def __init__(
        self,
        decoder: Decoder,
        facts: ModelFacts,
        device: torch.device,
        *,
        max_rows: int,
        version: Version | None,
    ) -> None:
        """Makes an empty batch.

        Args:
            decoder: the model's decoder.
            facts: the model's facts.
            device: the model's device.
            max_rows: number of places; more are made only for rows that join at the same time.
            version: version of the weights in use.
        """
        self._decoder = decoder
        self._context = facts.context
        # A tokenizer may have ids for which the model has no logit.
        ends = sorted(token for token in facts.end_tokens if token < facts.vocabulary)
        self._stop = np.array(ends, dtype=np.int64)
        self._device = device
        self._max_rows = max_rows
        self.version = version
        """Version of the weights in use; changed by :meth:`restamp`."""
        self.sampled = 0
        """Number of sampled tokens."""
        self.prefilled = 0
        """Number of tokens whose keys and values were computed other than by sampling them."""
        self.steps = 0
        """Number of token steps."""
        self.clear()

    def clear(self) -> None:
        """Drops all rows and frees the memory of their keys and values."""
        self._rows: list[Row | None] = []
        self._live = 0
        self._cache: KeyValues | None = None
        self._seen: KeyValues | None = None
        self._noise = Noise()
        # Indexed by place; there may be more places than rows, and more slots than tokens.
        self._tokens = np.zeros((0, 0), dtype=np.int64)
        self._logprobs = np.zeros((0, 0), dtype=np.float32)
        self._length = np.zeros(0, dtype=np.int64)
        self._limit = np.zeros(0, dtype=np.int64)
        # Lengths under which a row draws no end token.
        self._least = np.zeros(0, dtype=np.int64)
        self._kind = np.zeros(0, dtype=np.int64)
        # Sampling parameters that rows share, whatever their length limits are.
        self._kinds: list[SamplingParams] = []
        self._next: torch.Tensor | None = None
        # Whether a row has stop strings, and whether somebody follows one.
        self._stops = self._followed = False
        # Whether a row has a least length.
        self._bounded = False

    def __len__(self) -> int:
        """Number of running rows."""
        return self._live

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rows' keys and values."""
        return 0 if self._cache is None else sum(layer.nbytes for layer in self._cache.layers)

    def groups(self) -> list[Running]:
        """The groups of the rows, each once."""
        return list({id(row.group): row.group for row in self._rows if row is not None}.values())

    # Rows come and go.

    def join(self, rows: Sequence[Row]) -> None:
        """Adds rows; if it raises, none was added."""
        lengths = np.array([len(row.context) for row in rows], dtype=np.int64)
        requests = [row.group.request for row in rows]
        begun = [len(r.prefix(row.index)) for r, row in zip(requests, rows, strict=True)]
        budget = np.array([r.room(size) for r, size in zip(requests, begun, strict=True)])
        limit = np.minimum(lengths + budget, self._context)
        free = [place for place, row in enumerate(self._rows) if row is None][: len(rows)]
        places = free + list(range(len(self._rows), len(self._rows) + len(rows) - len(free)))
        self._resize(max(places) + 1, min(int(lengths.max()) + GROWTH, int(limit.max())))
        at = np.array(places)
        self._fill(at, [row.context[:-1] for row in rows])

        for place, row in zip(places, rows, strict=True):
            self._tokens[place, : len(row.context)] = row.context
            self._kind[place] = self._kind_of(row.group.request.sampling)
        self._logprobs[at] = np.nan
        self._length[at], self._limit[at] = lengths, limit
        self._least[at] = lengths + [request.shortest for request in requests]
        self._bounded |= any(request.shortest for request in requests)
        keys = []
        for row in rows:
            request = row.group.request
            first = len(row.context) - len(request.prompt_tokens)
            keys.append((request.seed, request.noise or request.group_id, row.index, first))
        self._noise.put(places, keys)
        self._rows += [None] * (len(rows) - len(free))
        for place, row in zip(places, rows, strict=True):
            self._rows[place] = row
        self._live += len(rows)
        self._stops |= any(row.group.stops is not None for row in rows)
        self._followed |= any(request.follow is not None for request in requests)
        self._next = self._seen = None

    def _kind_of(self, sampling: SamplingParams) -> int:
        for number, kind in enumerate(self._kinds):
            if (kind.temperature, kind.top_k, kind.top_p) == (
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
            ):
                return number
        self._kinds.append(sampling)
        return len(self._kinds) - 1

    def abort(self, wanted: Callable[[Row], bool]) -> list[tuple[Row, Response]]:
        """Takes rows out as they are, without sampling further."""
        return self._take(
            (place, FinishReason.ABORT)
            for place, row in enumerate(self._rows)
            if row is not None and wanted(row)
        )

    def _take(self, ended: Iterable[tuple[int, FinishReason]]) -> list[tuple[Row, Response]]:
        taken = []
        for place, reason in list(ended):
            row = self._rows[place]
            if row is None:
                continue
            start, end = len(row.context), int(self._length[place])
            self._end_span(row, end - start)
            response = Response(
                tokens=self._tokens[place, start:end].astype(np.int32),
                logprobs=self._logprobs[place, start:end].copy(),
                spans=tuple(row.spans),
                reason=reason,
            )
            taken.append((row, response))
            self._rows[place] = None
            self._live -= 1
        if not self._live:
            self.clear()
        return taken

    def _close_ranks(self) -> None:
        """Moves the last rows into free places."""
        if self._live == len(self._rows):
            return
        self._next = self._seen = None
        holes = np.array([p for p in range(self._live) if self._rows[p] is None], dtype=np.int64)
        last = np.array(
            [p for p in range(self._live, len(self._rows)) if self._rows[p] is not None],
            dtype=np.int64,
        )
        if len(holes) and self._cache is not None:
            for array in (
                *(self._tokens, self._logprobs),
                *(self._length, self._limit, self._least, self._kind),
            ):
                array[holes] = array[last]
            self._noise.move(holes, last)
            self._cache.move(self._on_device(holes), self._on_device(last))
            for hole, place in zip(holes.tolist(), last.tolist(), strict=True):
                self._rows[hole] = self._rows[place]
        del self._rows[self._live :]

    # Memory.

    def _resize(self, places: int, capacity: int) -> None:
        """Makes room for at least ``places`` places and ``capacity`` slots."""
        had = len(self._length)
        more = max(places - had, 0)
        if more and had:
            # Grows geometrically, so that copying stays a fraction of the work.
            more = max(more, min(had // 2, self._max_rows - had))
        wider = max(capacity - self._tokens.shape[1], 0)
        if not (more or wider):
            return
        self._tokens = np.pad(self._tokens, ((0, more), (0, wider)))
        self._logprobs = np.pad(
            self._logprobs, ((0, more), (0, wider)), constant_values=np.float32(np.nan)
        )
        self._length = np.pad(self._length, (0, more))
        self._limit = np.pad(self._limit, (0, more))
        self._least = np.pad(self._least, (0, more))
        self._kind = np.pad(self._kind, (0, more))
        if self._cache is not None:
            self._cache.resize(*self._tokens.shape)
            self._seen = None

    def _fill(self, places: np.ndarray, contexts: Sequence[np.ndarray]) -> None:
        """Computes keys and values of token lists, each distinct one once, and stores them at the places.

        Each pass has token lists of similar lengths and is bounded in size.
        """
        distinct: dict[bytes, int] = {}
        which = np.array(
            [distinct.setdefault(context.tobytes(), len(distinct)) for context in contexts]
        )
        _, firsts = np.unique(which, return_index=True)
        lists = [contexts[first] for first in firsts]
        lengths = np.array([len(tokens) for tokens in lists])
        order = np.argsort(-lengths, kind="stable")
        start = 0
        while start < len(order):
            # At least one token, so that the cache has a shape.
            longest = max(int(lengths[order[start]]), 1)
            chosen = order[start : start + max(1, PREFILL_TOKENS // longest)]
            padded = np.zeros((len(chosen), longest), dtype=np.int64)
            for b, i in enumerate(chosen):
                padded[b, : lengths[i]] = lists[i]
            part = self._decoder.prefill(
                self._on_device(padded), self._on_device(np.maximum(lengths[chosen], 1))
            )
            self.prefilled += int(lengths[chosen].sum())
            if self._cache is None:
                self._cache = KeyValues([layer[:, :0] for layer in part.layers])
            self._cache.resize(*self._tokens.shape)
            # Rows of this pass, and which of its token lists each one has.
            where = {int(i): b for b, i in enumerate(chosen)}
            members = [n for n, i in enumerate(which.tolist()) if i in where]
            source = np.array([where[int(which[n])] for n in members])
            self._cache.write(self._on_device(places[members]), part, self._on_device(source))
            start += len(chosen)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    # One token.

    def step(self) -> list[tuple[Row, Response]]:
        """Samples one token for every row; takes out the rows that it ended, and the groups that it failed."""
        self._close_ranks()
        count = self._live
        longest = int(self._length[:count].max())
        if longest >= self._tokens.shape[1]:
            # Grows geometrically, so that copying stays a fraction of the work, but no further than needed.
            capacity = max(longest + GROWTH, longest * 3 // 2)
            limit = int(self._limit[:count].max())
            self._resize(count, max(longest + 1, min(capacity, limit)))
        if self._cache is None:
            raise RuntimeError("rows without a cache")
        every, length = np.arange(count), self._length[:count]
        if self._next is None:
            self._next = self._on_device(self._tokens[every, length - 1])
        if self._seen is None:
            self._seen = self._cache.first(count)
        logits = self._decoder.step(self._next, length - 1, self._seen)
        if self._bounded and len(early := np.flatnonzero(length < self._least[:count])):
            logits = logits.clone()
            ends = self._on_device(self._stop)
            logits[self._on_device(early)[:, None], ends] = float("-inf")
        tokens, logprobs = self._draw(logits, count)
        self._next = tokens
        host = tokens.cpu().numpy()
        self._tokens[every, length] = host
        self._logprobs[every, length] = logprobs.cpu().numpy()
        failed = self._find_not_finite(np.flatnonzero(np.isnan(self._logprobs[every, length])))
        length += 1
        self.steps += 1
        self.sampled += count

        stopped = host == self._stop[0] if len(self._stop) == 1 else np.isin(host, self._stop)
        if self._stops:
            self._find_stops(stopped)
        if self._followed:
            for row, token in zip(self._rows[:count], host.tolist(), strict=True):
                if row is None or row.group in failed:
                    continue
                if row.group.request.follow is not None:
                    row.group.request.follow([token])
        ended = [
            (place, FinishReason.STOP if stopped[place] else FinishReason.LENGTH)
            for place in np.flatnonzero(stopped | (length >= self._limit[:count])).tolist()
        ]
        if failed:
            ended += [
                (place, FinishReason.ABORT)
                for place, row in enumerate(self._rows[:count])
                if row is not None and row.group in failed
            ]
        return self._take(ended) if ended else []

    def _find_not_finite(self, places: np.ndarray) -> set[Running]:
        """Marks the groups of rows whose logits were infinite, or no numbers, as failed."""
        failed = {row.group for place in places if (row := self._rows[place]) is not None}
        for group in failed:
            group.error = NOT_FINITE
        return failed

    def _find_stops(self, stopped: np.ndarray) -> None:
        """Marks the rows whose text holds one of their group's stop strings now."""
        for place, row in enumerate(self._rows[: self._live]):
            if row is None or row.group.stops is None or stopped[place]:
                continue
            sampled = self._tokens[place, len(row.context) : self._length[place]]
            stopped[place] = row.group.stops.ends(sampled)

    def _draw(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        uniforms = self._on_device(self._noise.next(count))
        kind = self._kind[:count]
        if len(self._kinds) == 1 or (kind == kind[0]).all():
            return draw(logits, self._kinds[kind[0]], uniforms)
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        logprobs = torch.empty(count, dtype=torch.float32, device=self._device)
        for number in np.unique(kind).tolist():
            index = self._on_device(np.flatnonzero(kind == number))
            tokens[index], logprobs[index] = draw(
                logits[index], self._kinds[number], uniforms[index]
            )
        return tokens, logprobs

    # New weights.

    def restamp(self, version: Version) -> None:
        """Renames the weights in use; the rows begin a new span."""
        for place, row in enumerate(self._rows):
            if row is not None:
                self._end_span(row, int(self._length[place]) - len(row.context))
        self.version = version

    def _end_span(self, row: Row, end: int) -> None:
        if self.version is not None and end > row.since:
            row.spans.append((self.version, row.since, end))
        row.since = end

    def recompute(self) -> None:
        """Computes the keys and values of all rows again, under the weights in use."""
        self._close_ranks()
        if self._live:
            contexts = [
                self._tokens[b, : length - 1].astype(np.int32)
                for b, length in enumerate(self._length[: self._live])
            ]
            self._fill(np.arange(self._live), contexts)
