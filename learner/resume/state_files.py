"""Parameters and optimizer states on disk, by the parameters' names: the same for every number of ranks and ZeRO stage.

Each rank writes what it holds: for each parameter one contiguous piece, as flat tensors of safetensors files
named ``NAME:KIND``, where the kind is ``parameter`` (the float32 master) or a state of the optimizer's
(``exp_avg``, …). A file's metadata says where each piece begins. The pieces of all files make whole tensors, of
which any reader takes any part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...common.errors import DataError
from ...common.plain import Count, Record, one_line, read_object, read_record

POLICY, CRITIC = "policy", "critic"
"""Folders of a checkpoint."""
PARAMETER = "parameter"
"""Kind of the parameters themselves."""
PIECES = "pieces"
"""Key of a file's metadata."""
FILE_BYTES = 1 << 30
"""Size from which on a rank begins another file: what a GPU's rank holds in host memory while it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one parameter, with its optimizer states, that one rank holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element of the flat parameter that is in the piece."""
    count: int
    """Number of elements."""
    step: float | None
    """The optimizer's number of steps; None before its first one."""
    tensors: dict[str, Tensor]
    """By kind, flat: views of the rank's own memory."""


def write_pieces(folder: Path, rank: int, pieces: Iterable[Piece]) -> None:
    """Writes a rank's pieces into a folder, which is made if it doesn't exist."""
    folder.mkdir(exist_ok=True)
    held: list[Piece] = []
    number = size = 0
    for piece in pieces:
        nbytes = sum(tensor.nbytes for tensor in piece.tensors.values())
        if held and size + nbytes > FILE_BYTES:
            _write_file(folder / _file_name(rank, number), held)
            held, size, number = [], 0, number + 1
        held.append(piece)
        size += nbytes
    _write_file(folder / _file_name(rank, number), held)


def _file_name(rank: int, number: int) -> str:
    return f"rank-{rank:05d}-{number:05d}.safetensors"


def _write_file(path: Path, pieces: list[Piece]) -> None:
    described = {
        piece.name: {"shape": piece.shape, "start": piece.start, "step": piece.step}
        for piece in pieces
    }
    tensors = {
        f"{piece.name}:{kind}": tensor.contiguous()
        for piece in pieces
        for kind, tensor in piece.tensors.items()
    }
    save_file(tensors, path, metadata={PIECES: json.dumps(described)})


class Described(Record, frozen=True, kw_only=True):
    """What a file's metadata say of a piece; see :class:`Piece`."""

    shape: list[Count]
    start: Count
    step: float | None


def read_pieces(text: str | bytes, what: str) -> dict[str, Described]:
    """The pieces in a file, by the parameters' names.

    Raises:
        DataError: the text isn't that of a file's metadata.
    """
    found = read_object(text, what, DataError)
    return {name: read_record(Described, one, what, DataError) for name, one in found.items()}


@dataclass(slots=True, kw_only=True)
class _Stored:
    """One parameter as the files have it."""

    shape: tuple[int, ...]
    step: float | None
    kinds: set[str]
    pieces: list[tuple[int, int, Any]] = field(default_factory=list)
    """First element, number of elements and open file of each piece."""


class StateFiles:
    """Reads what all ranks have written into a folder; opened once, its files may be removed meanwhile.

    Nothing is in memory but what a call returns.

    Raises:
        DataError: files are missing, can't be read, or don't make whole parameters.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored: dict[str, _Stored] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                self._open(path)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from None
        if not self._stored:
            raise DataError(f"{folder} holds no parameters")
        for name, stored in self._stored.items():
            stored.pieces.sort(key=lambda piece: piece[0])
            end = 0
            for start, count, _ in stored.pieces:
                if start != end:
                    break
                end += count
            if end != math.prod(stored.shape):
                raise DataError(f"{folder} lacks a part of {name}, which begins at element {end:,}")

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return self._stored[name].shape

    def kinds(self, name: str) -> set[str]:
        """What there is of a parameter: ``parameter`` and the states of the optimizer."""
        return self._stored[name].kinds

    def step(self, name: str) -> float | None:
        """The optimizer's number of steps for a parameter; None before its first one."""
        return self._stored[name].step

    def whole(self, name: str) -> Tensor:
        """A parameter in its shape, float32, on the CPU."""
        shape = self.shape(name)
        return self.read(name, PARAMETER, 0, math.prod(shape)).view(shape)

    def read(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """``[count]`` elements of a parameter or one of its states, from ``start`` on, on the CPU.

        Raises:
            DataError: a file can't be read.
        """
        found = []
        try:
            for first, length, file in self._stored[name].pieces:
                low, high = max(start, first), min(start + count, first + length)
                if low < high:
                    part = file.get_slice(f"{name}:{kind}")
                    found.append(part[low - first : high - first])
        except (OSError, SafetensorError) as error:
            raise self._unreadable(error) from None
        return found[0] if len(found) == 1 else torch.cat(found)

    def _open(self, path: Path) -> None:
        file = safe_open(path, framework="pt")
        kinds: dict[str, set[str]] = {}
        for key in file.keys():  # noqa: SIM118 - not a dict
            name, _, kind = key.rpartition(":")
            kinds.setdefault(name, set()).add(kind)
        for name, piece in read_pieces(file.metadata()[PIECES], str(path)).items():
            shape, step = tuple(piece.shape), piece.step
            stored = self._stored.setdefault(
                name, _Stored(shape=shape, step=step, kinds=kinds[name])
            )
            if (stored.shape, stored.step, stored.kinds) != (shape, step, kinds[name]):
                raise ValueError(f"the pieces of {name} don't belong together")
            (count,) = file.get_slice(f"{name}:{PARAMETER}").get_shape()
            stored.pieces.append((piece.start, count, file))

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self._folder} can't be read: {one_line(error, 300)}")
