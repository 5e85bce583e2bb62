"""JSON of another process is what it should be, or is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tandem.common.errors import DataError
from tandem.common.plain import read_object, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An example."""

    host: str
    port: int
    load: float = 0.0
    user: str | None = None


def test_a_record_is_read_with_its_defaults():
    assert read_record(Place, b'{"host": "a", "port": 1, "load": 2}', "x", DataError) == Place(
        host="a", port=1, load=2
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "isn't JSON"),
        (b"\xff", "isn't JSON"),
        (b"[" * 100_000, "isn't JSON: maximum recursion"),
        (b"1" * 5000, "isn't JSON"),
        (b"[]", "is a list, not an object"),
        (b"null", "is null, not an object"),
        (b'{"host": "a"}', "lacks the field 'port'"),
        (b'{"host": "a", "port": "1"}', "has port='1', not a whole number"),
        (b'{"host": "a", "port": true}', "has port=True, not a whole number"),
        (b'{"host": "a", "port": 1.0}', "has port=1.0, not a whole number"),
        (b'{"host": null, "port": 1}', "has host=None, not text"),
        (b'{"host": "a", "port": 1, "user": 5}', "has user=5, not text or null"),
        (b'{"host": "a", "port": 1, "x": 5}', "has the unknown field 'x'"),
    ],
)
def test_what_is_no_such_record_is_refused_with_its_reason(data: bytes, said: str):
    with pytest.raises(DataError, match=f"^the place is damaged: it {said}.*; try again$"):
        read_record(Place, data, "the place", DataError, "try again")


def test_an_object_may_hold_anything():
    assert read_object(b'{"a": [1, null]}', "x", DataError) == {"a": [1, None]}
