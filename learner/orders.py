"""Orders of the learner's rank 0 to the other ranks: one declared record each, as MessagePack."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..common.plain import Record, read_message


class Order(Record, frozen=True, kw_only=True, tag_field="do", tag=str.lower):
    """A map: ``do`` is the class's name in lower case, the rest are its fields."""

    def pack(self) -> bytes:
        """The order as it is broadcast."""
        return msgspec.msgpack.encode(self)


class Train(Order, frozen=True, kw_only=True):
    """Take part in a step."""

    step: int
    lr: float
    critic_lr: float
    settled: bool


class Compare(Order, frozen=True, kw_only=True):
    """Take part in measuring the objective on held-out pairs."""

    step: int


class Frozen(Order, frozen=True, kw_only=True):
    """Compare the models beside the policy on your host with those of rank 0, if you are your host's first rank."""

    digests: dict[str, str]


class Save(Order, frozen=True, kw_only=True):
    """Write your part of a checkpoint."""

    folder: str


class Load(Order, frozen=True, kw_only=True):
    """Read your part of a checkpoint."""

    folder: str


class Export(Order, frozen=True, kw_only=True):
    """Take part in gathering what the Hugging Face folder has."""


class Parameters(Order, frozen=True, kw_only=True):
    """Take part in gathering every parameter."""


class Score(Order, frozen=True, kw_only=True):
    """Take part in scoring these rows of tokens."""

    rows: list[list[int]]
    dtype: Literal["float64", "float32", "float16", "bfloat16"]


class Idle(Order, frozen=True, kw_only=True):
    """Do nothing: rank 0 is alive."""


class Stop(Order, frozen=True, kw_only=True):
    """End."""


def read_order(data: bytes) -> Order:
    """Reads an order of rank 0.

    Raises:
        WireError: it isn't one of the orders.
    """
    kinds = Train | Compare | Frozen | Save | Load | Export | Parameters | Score | Idle | Stop
    order: Order = read_message(kinds, data, "order of rank 0")
    return order
