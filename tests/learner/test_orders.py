"""What rank 0 says is read as it was said, or refused by name."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tandem.common.errors import WireError
from tandem.learner.orders import (
    Compare,
    Export,
    Idle,
    Load,
    Order,
    Parameters,
    Save,
    Score,
    Stop,
    Train,
    read_order,
)

ORDERS = [
    Train(step=3, lr=1e-6, critic_lr=2e-6, settled=True),
    Compare(step=3),
    Save(folder="x"),
    Load(folder="x"),
    Export(),
    Parameters(),
    Score(rows=[[1, 2], [3]], dtype="bfloat16"),
    Idle(),
    Stop(),
]


def test_every_order_is_tried() -> None:
    assert {type(order) for order in ORDERS} == set(Order.__subclasses__())


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_is_read_as_it_was_said(order: Order) -> None:
    assert read_order(order.pack()) == order


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], "Expected `object`, got `array`"),
        ({}, "missing required field `do`"),
        ({"do": "dance"}, "message.do: Invalid value 'dance'"),
        ({"do": "save"}, "missing required field `folder`"),
        ({"do": "save", "folder": b"x"}, "message.folder: Expected `str`, got `bytes`"),
        ({"do": "stop", "folder": "x"}, "unknown field `folder`"),
        ({"do": "score", "rows": [[1.5]], "dtype": "float32"}, "Expected `int`, got `float`"),
        ({"do": "score", "rows": [], "dtype": "load"}, "message.dtype: Invalid enum value 'load'"),
    ],
)
def test_whatever_else_is_refused(said: Any, why: str) -> None:
    with pytest.raises(WireError, match=f"refused order of rank 0: .*{why}"):
        read_order(msgpack.packb(said))
