"""What rank 0 says is read as it was said, or refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from tandem.common.adapters import base_digest
from tandem.common.errors import DataError, WireError
from tandem.learner import ranks
from tandem.learner.orders import (
    Compare,
    Export,
    Frozen,
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
    Frozen(digests={"base": "1"}),
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


def test_the_first_rank_of_another_host_compares_its_own_copy_of_the_frozen_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    updates: Any = SimpleNamespace(frozen_paths=[str(tmp_path)])

    def heard(digest: str, *, first_of_host: bool) -> None:
        said = iter([Frozen(digests={str(tmp_path): digest}).pack(), Stop().pack()])
        monkeypatch.setattr(ranks, "broadcast_bytes", lambda _: next(said))
        nothing: Any = None
        ranks.follow(nothing, updates, first_of_host=first_of_host)

    heard(base_digest(tmp_path), first_of_host=True)
    heard("other", first_of_host=False)  # It reads the same files as the first.
    with pytest.raises(DataError, match=r"are others on .* copy them from there"):
        heard("other", first_of_host=True)
