"""The reference policy, and its log-probs of stored rows: computed once, kept on disk, found again.

Stored rows come back in every pass and after every resume, and the reference never changes. Each row is scored
alone, so that its log-probs don't depend on the rows that happen to be beside it: found or computed, they are
the same bits.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ...common.agreement import Probe
from ...common.config import Config
from ...common.models import load_model
from ..engine.deepspeed_engine import DeepSpeedEngine
from ..forward.policy import Policy
from ..forward.verification import longest_row
from ..rows.microbatch import LayoutName, MicroBatch, dummy, laid_out, micro_batch
from ..rows.rows import Rows

log = logging.getLogger("tandem.learner")

KEY_BYTES = 16
_HEAD = struct.Struct(f"<{KEY_BYTES}sI")
_CHECK = struct.Struct("<Q")


def frozen_policy(
    config: Config,
    device: torch.device,
    key: str = "model.path",
    whose: str = "the reference model's",
) -> Policy:
    """A model that isn't trained. Every rank holds all of it.

    Args:
        config: the run's config.
        device: this rank's device.
        key: the setting that names the model: ``model.path`` for the base model as it was before the run, which
            is π_ref; or ``learner.teacher``.
        whose: names it in the log and in errors.

    Raises:
        ConfigError: its log-probs aren't the model's own.
    """
    path = config.learner.teacher if key == "learner.teacher" else config.model.path
    assert path is not None
    model = load_model(
        path,
        dtype=config.model.dtype,
        attention=config.model.attention,
        device=device,
        key=key,
    )
    probe = Probe.of(model, longest_row(config))
    policy = Policy(model)
    policy.choose_kernels(probe, config.model.kernels, whose=whose)
    policy.choose_layout(probe, config.model.attention, whose=whose)
    policy.require_own(probe, whose=whose)
    return policy.eval().requires_grad_(False)


class LogprobStore:
    """Log-probs of rows by key, in a file that is only appended to.

    A record is the row's key, its number of tokens, their float32 log-probs and an xxh3 of all of that. What
    follows the first record that is cut off or damaged is given up, and computed again.

    Args:
        path: the file; made with its folder by the first :meth:`put`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[bytes, int] = {}
        self._end = 0
        if path.exists():
            self._read()

    def _read(self) -> None:
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            while self._end < size:
                record = _next(file)
                if record is None:
                    log.warning(
                        f"{self.path} is damaged after {len(self._places):,} rows: the log-probs of "
                        f"those after them are computed again"
                    )
                    break
                self._places[record[0]] = self._end
                self._end = file.tell()
        if self._end < size:
            os.truncate(self.path, self._end)

    def get(self, keys: Sequence[bytes]) -> list[NDArray[np.float32] | None]:
        """The log-probs of each key; None for those that aren't there, or no longer whole."""
        if not any(key in self._places for key in keys):
            return [None] * len(keys)
        found: list[NDArray[np.float32] | None] = []
        with open(self.path, "rb") as file:
            for key in keys:
                record = None
                if key in self._places:
                    file.seek(self._places[key])
                    record = _next(file)
                found.append(record[1] if record is not None and record[0] == key else None)
        return found

    def put(self, values: Mapping[bytes, NDArray[np.float32]]) -> None:
        """Appends log-probs. Where they can't be written, a later run computes them again."""
        records, places = [], {}
        end = self._end
        for key, logprobs in values.items():
            record = _HEAD.pack(key, len(logprobs)) + logprobs.astype("<f4").tobytes()
            records.append(record + _CHECK.pack(xxhash.xxh3_64_intdigest(record)))
            places[key] = end
            end += len(records[-1])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "r+b" if self.path.exists() else "w+b") as file:
                # A write that failed before may have left a part of a record here.
                file.seek(self._end)
                file.truncate()
                file.write(b"".join(records))
        except OSError as error:
            log.warning(f"{self.path} can't be written: {error.strerror}")
            return
        self._places |= places
        self._end = end


def _next(file: IO[bytes]) -> tuple[bytes, NDArray[np.float32]] | None:
    """Key and log-probs of the record at the file's position; None if it isn't whole."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    key, count = _HEAD.unpack(head)
    body, check = file.read(4 * count), file.read(_CHECK.size)
    if len(check) < _CHECK.size or _CHECK.unpack(check)[0] != xxhash.xxh3_64_intdigest(head + body):
        return None
    return key, np.frombuffer(body, "<f4").astype(np.float32)


class Reference:
    """π_ref on every rank: a model of its own, or where adapters are trained, the learner's without them.

    Args:
        config: the run's config.
        engine: this rank's engine.
        folder: where log-probs of stored rows are kept; None = they are computed each time.
    """

    def __init__(self, config: Config, engine: DeepSpeedEngine, folder: Path | None = None) -> None:
        self._engine = engine
        self._policy: Policy | None = None
        if engine.adapters is None:
            self._policy = frozen_policy(config, engine.device)
            engine.memory.add_frozen(self._policy)
        self._ranks, self._rank = dist.get_world_size(), dist.get_rank()
        self._store: LogprobStore | None = None
        if folder is not None:
            # All ranks, since with ZeRO-3 it takes all of them to read the engine's base.
            digest = digest_of(
                engine.base_tensors() if self._policy is None else weights_of(self._policy)
            )
            if self._rank == 0:
                name = f"{digest}-{config.model.attention}.logprobs"
                self._store = LogprobStore(folder / name)

    @property
    def policy(self) -> Policy:
        """What it is computed with: its own model, or the learner's."""
        return self._policy or self._engine.policy

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """``[N]`` log-probs of each micro-batch's tokens.

        Every rank scores as many micro-batches: with adapters and ZeRO-3 it is collective.
        """
        if self._policy is None:
            scored = self._engine.score(micro_batches, base=True)
        else:
            layout = self._policy.layout
            scored = [self._policy.score(laid_out(micro, layout)) for micro in micro_batches]
        return [logprobs for logprobs, _ in scored]

    @torch.no_grad()
    def fill(self, rows: Rows) -> tuple[Rows, dict[str, float]]:
        """All of a step's rows with their reference log-probs, and how many were computed and found.

        Every rank calls it with the same rows, computes a part of those that aren't found, and gets all.
        """
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.lengths.cumsum(0)]).tolist()
        values = torch.zeros(len(rows.row), dtype=torch.float32)
        # A row that comes twice in a step is scored once.
        firsts: dict[bytes, int] = {}
        twins = [firsts.setdefault(key, row) for row, key in enumerate(keys_of(rows))]
        keys = {row: key for key, row in firsts.items()}
        missing = torch.ones(rows.count, dtype=torch.bool)
        if self._store is not None:
            for row, found in zip(keys, self._store.get(list(keys.values())), strict=True):
                if found is not None:
                    values[starts[row] : starts[row + 1]] = torch.from_numpy(found)
                    missing[row] = False
        if self._ranks > 1:
            dist.broadcast(missing, 0)
        wanted = [row for row in keys if missing[row]]
        mine = wanted[self._rank :: self._ranks]
        layout: LayoutName = "packed" if self.policy.layout == "packed" else "padded"
        micro_batches = [micro_batch(rows.select(torch.tensor([row])), layout) for row in mine]
        if len(mine) < len(wanted[:: self._ranks]):
            # The ranks before this one have one more.
            micro_batches.append(dummy(rows))
        for row, scored in zip(mine, self.score(micro_batches), strict=False):
            values[starts[row] : starts[row + 1]] = scored.float().cpu()
        if self._ranks > 1:
            # Each place is filled by one rank, and 0 on all others.
            dist.all_reduce(values)
        for row, first in enumerate(twins):
            values[starts[row] : starts[row + 1]] = values[starts[first] : starts[first + 1]]
        if self._store is not None and wanted:
            flat = values.numpy()
            self._store.put({keys[row]: flat[starts[row] : starts[row + 1]] for row in wanted})
        figures = {
            "reference_computed": float(len(wanted)),
            "reference_found": float(rows.count - len(wanted)),
        }
        return rows.with_columns(reference=values), figures


def keys_of(rows: Rows) -> list[bytes]:
    """Key of each row: its prompt, its response, which tokens of it are scored, and at what temperature."""
    ids, position, heat = (one.numpy() for one in (rows.ids, rows.position, rows.temperature))
    keys = []
    start = first = 0
    sizes = (rows.prompt_lengths + rows.response_lengths).tolist()
    for prompt, size, scored in zip(
        rows.prompt_lengths.tolist(), sizes, rows.lengths.tolist(), strict=True
    ):
        digest = blake2b(struct.pack("<3q", prompt, size, scored), digest_size=KEY_BYTES)
        digest.update(ids[start : start + size].tobytes())
        digest.update(position[first : first + scored].tobytes())
        digest.update(heat[first : first + scored].tobytes())
        keys.append(digest.digest())
        start, first = start + size, first + scored
    return keys


def weights_of(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """All entries of a policy's state dict, as its model names them, by name."""
    yield from sorted(policy.model.state_dict().items())


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of a model's weights in the order of their names: names, dtypes, shapes and bytes."""
    digest = xxhash.xxh3_128()
    for name, tensor in weights:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
