"""Messages between the pool, the zygote and the graders: MessagePack lists of known shapes.

A grader reads what a policy wrote, so what it says is taken as what anybody may have said.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack

from ...common.errors import WireError

VERDICTS = ("correct", "wrong", "unparsable", "gold_unparsable", "timeout", "crashed", "memory")
"""Those of :class:`~tandem.common.records.Verdict`, named here since graders import no NumPy."""
_PAYLOADS: dict[str, tuple[type, ...]] = {
    "compare": (str, str),
    "function": (int, dict),
    "code": (str, list, float, float, int, bool),
}
_SHAPES: dict[str, tuple[type, ...]] = {
    "spawn": (int,),
    "kill": (int,),
    "ready": (int, list),
    "spawned": (int, int),
    "exited": (int, int, int),
    "failed": (str,),
    "refused": (str,),
}


def read_request(data: bytes) -> tuple[str, float, bytes | None]:
    """Pool to grader: the kind, seconds, and the payload's bytes (None: in a memory file).

    Raises:
        WireError: it isn't that.
    """
    message = _unpacked(data, "request to a grader")
    known = _has(message, str, float, bytes) or (
        _has(message, str, float, type(None)) and message[2] is None
    )
    if not known or message[0] not in _PAYLOADS or not 0.0 < message[1] < 1e6:
        raise _refused("request to a grader", message)
    return message[0], float(message[1]), message[2]


def read_payload(kind: str, data: bytes) -> list[Any]:
    """The payload of a request of that kind.

    Raises:
        WireError: it isn't one.
    """
    what = f"payload of a request to {kind}"
    payload = _unpacked(data, what)
    if not _has(payload, *_PAYLOADS[kind]):
        raise _refused(what, payload)
    return payload


def read_reply(data: bytes) -> tuple[str, Any, int]:
    """Grader to pool: ``ready``, ``done``, ``raised`` or ``crash``, what it says, resident KiB.

    Raises:
        WireError: it is none of them.
    """
    message = _unpacked(data, "reply of a grader")
    known = (
        len(message) == 3
        and message[0] in ("ready", "done", "raised", "crash")
        and type(message[2]) is int
        and message[2] >= 0
        and (message[0] == "done" or type(message[1]) is (type(None), str)[message[0] != "ready"])
    )
    if not known:
        raise _refused("reply of a grader", message)
    return message[0], message[1], message[2]


def checked_result(kind: str, payload: list[Any], result: Any) -> Any:
    """What a grader found, for a request of that kind with that payload.

    Raises:
        WireError: it can't be.
    """
    if kind == "compare":
        known = result in VERDICTS
    elif kind == "function":
        wanted = len(payload[1]["completions"])
        known = isinstance(result, list) and len(result) == wanted
        known = known and all(v is None or _is_finite(v) for v in result)
    else:
        known = isinstance(result, list) and _has(result, int, int, int)
        known = known and 0 <= result[0] <= result[1] == len(payload[1]) and result[2] >= 0
    if not known:
        raise _refused(f"result of a request to {kind}", result)
    return result


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def read_control(data: bytes) -> list[Any]:
    """Between pool and zygote: a word and what belongs to it.

    Raises:
        WireError: an unknown word, or something else beside it.
    """
    message = _unpacked(data, "message of the zygote's socket")
    word = message[0] if message and isinstance(message[0], str) else ""
    if word not in _SHAPES or not _has(message[1:], *_SHAPES[word]):
        raise _refused("message of the zygote's socket", message)
    if word == "ready" and not all(isinstance(limit, str) for limit in message[2]):
        raise _refused("message of the zygote's socket", message)
    return message


def _unpacked(data: bytes, what: str) -> list[Any]:
    try:
        # Skipped first: a header that claims a long list makes none.
        unpacker = msgpack.Unpacker(None, max_buffer_size=max(1, len(data)))
        unpacker.feed(data)
        unpacker.skip()
        message = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, MemoryError) as error:
        why = str(error)[:200] or type(error).__name__
        raise WireError(f"refused {what}: it isn't valid MessagePack: {why}") from None
    if not isinstance(message, list):
        raise _refused(what, message)
    return message


def _has(message: list[Any], *kinds: type) -> bool:
    return len(message) == len(kinds) and all(
        type(value) is kind or (kind is float and type(value) is int)
        for value, kind in zip(message, kinds, strict=True)
    )


def _refused(what: str, message: Any) -> WireError:
    return WireError(f"refused {what}: {str(message)[:120]!r} is none that is known")
