"""Messages between the pool, the zygote and the graders: MessagePack lists of known shapes.

A grader reads what a policy wrote, so what it says is taken as what anybody may have said.
"""

from __future__ import annotations

from typing import Any

import msgpack

from ..common.errors import WireError

VERDICTS = ("correct", "wrong", "unparsable", "gold_unparsable", "timeout", "crashed", "memory")
"""Those of :class:`~tandem.common.records.Verdict`, named here since graders import no NumPy."""
_SHAPES: dict[str, tuple[type, ...]] = {
    "spawn": (int,),
    "kill": (int,),
    "ready": (int, list),
    "spawned": (int, int),
    "exited": (int, int, int),
    "failed": (str,),
}


def read_request(data: bytes) -> tuple[str, str, float]:
    """Pool to grader: answer, gold and CPU seconds.

    Raises:
        WireError: it isn't that.
    """
    message = _unpacked(data, "request to a grader")
    if not _has(message, str, str, float) or not 0.0 < message[2] < 1e6:
        raise _refused("request to a grader", message)
    return message[0], message[1], float(message[2])


def read_reply(data: bytes) -> list[Any]:
    """Grader to pool: ``["ready"]``, ``["crash", traceback]``, or verdict, seconds and resident KiB.

    Raises:
        WireError: it is none of them.
    """
    message = _unpacked(data, "reply of a grader")
    known = (
        message == ["ready"]
        or (_has(message, str, str) and message[0] == "crash")
        or (
            _has(message, str, float, int)
            and message[0] in VERDICTS
            and message[1] >= 0.0
            and message[2] >= 0
        )
    )
    if not known:
        raise _refused("reply of a grader", message)
    return message


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
