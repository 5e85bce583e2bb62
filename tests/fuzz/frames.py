"""Mutates frames: as bytes, as the data in them, and between the two as headers that lie."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from calls import ODD, bent

LIES = (
    b"\xdd\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdc\xff\xff",
    b"\xde\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01",
    b"\xdd\x00\x01\x00\x00", b"\xc1", b"\xd4\xff\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x00\x05",
    b"\xa3\xff\xfe\xfd", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8, b"\x80",
    b"\xd3\x80" + b"\x00" * 7, b"\x91" * 600, b"\x81\xa1a" * 600, b"\xdc\x00\x60" * 33, b"\xc0",
)  # fmt: skip
"""Pieces of MessagePack that claim what isn't there, or are of odd types."""
ODD_PACKED: tuple[Any, ...] = (
    *ODD[:9], 2**63 - 1, 2**64 - 1, -(2**63), *ODD[10:24], b"", b"\x00", b"\x00" * 3, b"\xff" * 8,
    msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2), [0] * 300, {"x": {"y": [None]}},
    [[[[[[[[[[[[1]]]]]]]]]]]], b"\x07" * 400, "own", "correct", "stop",
)  # fmt: skip
ODD_JSON = (
    b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b"-", b"1e999", b"NaN", b"-Infinity", b'"\\ud800"',
    b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"\x00", b'{"step":1,"step":2}', b"null", b"[]", b"{}",
    b"true", b'""', b"0x10", b"'a'", b"{,}", b"\xc3\x28", b'"\xff"', b"", b"\r", b"\r\n", b"\x0b",
)  # fmt: skip


def flipped(data: bytes, c: random.Random) -> bytes:
    """Bits turned, bytes put in and taken out, pieces repeated or cut off."""
    raw = bytearray(data)
    for _ in range(c.choice((1, 1, 1, 2, 4, 16))):
        what = c.random()
        at = c.randrange(len(raw) + 1)
        if what < 0.35 and raw:
            raw[at % len(raw)] ^= 1 << c.randrange(8)
        elif what < 0.5 and raw:
            raw[at % len(raw)] = c.choice((0, 0x7F, 0x80, 0xFF, c.randrange(256)))
        elif what < 0.6:
            raw[at:at] = bytes(c.randrange(256) for _ in range(c.randrange(1, 9)))
        elif what < 0.72:
            del raw[at : at + c.choice((1, 1, 2, 8, 64))]
        elif what < 0.82:
            del raw[at:]
        elif what < 0.9:
            raw[at:at] = raw[at : at + c.randrange(1, 65)]
        else:
            lie = c.choice(LIES)
            raw[at : at + (len(lie) if c.random() < 0.5 else 0)] = lie
    return bytes(raw)


def spliced(one: bytes, other: bytes, c: random.Random) -> bytes:
    """The head of one frame and the tail of another."""
    return one[: c.randrange(len(one) + 1)] + other[c.randrange(len(other) + 1) :]


def mutated_msgpack(body: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A MessagePack body with something wrong in it, more often deep inside than at its edge."""
    what = c.random()
    if what < 0.35:
        return flipped(body, c)
    if what < 0.42:
        return spliced(body, c.choice(corpus), c)
    content = msgpack.unpackb(body, raw=False, strict_map_key=False)
    for _ in range(c.choice((1, 1, 1, 2, 3))):
        content = bent(content, c, ODD_PACKED)
    try:
        packed: bytes = msgpack.packb(content, use_bin_type=True)
    except (ValueError, OverflowError, TypeError):
        return flipped(body, c)
    return flipped(packed, c) if c.random() < 0.1 else packed


def mutated_json(body: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """JSON with something wrong in it."""
    what = c.random()
    if what < 0.3:
        return flipped(body, c)
    if what < 0.36:
        return spliced(body, c.choice(corpus), c)
    if what < 0.42:
        return c.choice(ODD_JSON)
    try:
        content = copy.deepcopy(json.loads(body))
    except (ValueError, RecursionError):
        return flipped(body, c)
    for _ in range(c.choice((1, 1, 1, 2, 3))):
        content = bent(content, c)
    text = json.dumps(content).encode()
    if c.random() < 0.05 and text[-1:] == b"}":
        text = text[:-1] + b',"step":' + c.choice(ODD_JSON[2:8]) + b"}"  # a key that comes twice
    return text


def mutated_lines(body: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A file of JSON lines with lines torn, changed, doubled, lost or in another order."""
    lines = body.split(b"\n")
    for _ in range(c.choice((1, 1, 2, 3))):
        at = c.randrange(len(lines))
        what = c.random()
        if what < 0.5:
            lines[at] = mutated_json(lines[at], lines, c)
        elif what < 0.6:
            del lines[at]
        elif what < 0.7:
            lines.insert(c.randrange(len(lines) + 1), lines[at])
        elif what < 0.8:
            c.shuffle(lines)
        elif what < 0.9:
            lines[at] = lines[at][: c.randrange(len(lines[at]) + 1)]
        else:
            return flipped(b"\n".join(lines), c)
        if not lines:
            return b""
    return b"\n".join(lines)


def mutated_yaml(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A config with lines changed, moved and cut."""
    if c.random() < 0.3:
        return flipped(data, c)
    lines = data.split(b"\n")
    at = c.randrange(len(lines))
    odd = (b"[" * 400, b"&a [*a]", b"!!python/object:os.system {}", b"- 1", b"? x", b"{a: b", b"%",
           b"2001-99-99", b"1e999", b"\xff", b"\x00", b".nan", b"-1", b"[]", b"{}", b"'", b"1:60:60")  # fmt: skip
    key = lines[at].partition(b":")[0]
    lines[at] = c.choice((key + b": " + c.choice(odd), c.choice(odd), b"  " + lines[at], b""))
    return b"\n".join(lines)


Mutator = Callable[[bytes, Sequence[bytes], random.Random], bytes]
