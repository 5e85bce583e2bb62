"""What rank 0 of a learner tells the others to do, as MessagePack."""

from __future__ import annotations

from typing import Any

import msgpack

from ..common.errors import WireError
from ..common.plain import fits

_ORDERS: dict[str, dict[str, type]] = {
    "train": {"step": int, "lr": float, "settled": bool},
    "save": {"folder": str},
    "load": {"folder": str},
    "export": {"folder": str},
    "parameters": {},
    "idle": {},
    "stop": {},
}


def pack_order(do: str, **details: Any) -> bytes:
    """An order with what belongs to it."""
    data: bytes = msgpack.packb({"do": do, **details}, use_bin_type=True)
    return data


def read_order(data: bytes) -> dict[str, Any]:
    """What rank 0 says: ``do``, and what belongs to it.

    Raises:
        WireError: it is none of its orders.
    """
    try:
        unpacker = msgpack.Unpacker(None, raw=False, max_buffer_size=max(1, len(data)))
        unpacker.feed(data)
        unpacker.skip()  # makes no objects of a header that claims more than there is
        said = msgpack.unpackb(data, raw=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, MemoryError) as error:
        raise WireError(f"refused an order of rank 0: it isn't MessagePack: {error}") from None
    do = said.get("do") if isinstance(said, dict) else None
    fields = _ORDERS.get(do) if isinstance(do, str) else None
    if fields is None or said.keys() - {"do"} != fields.keys():
        raise WireError(f"refused an order of rank 0: {str(said)[:120]!r}")
    if not all(fits(said[name], kind) for name, kind in fields.items()):
        raise WireError(f"refused the order {do} of rank 0: a field has another type")
    return said
