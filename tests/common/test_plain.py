"""JSON of another process is what it should be, or is refused by name."""

from __future__ import annotations

import pytest

from tandem.common.errors import DataError
from tandem.common.plain import Record, read_object, read_record


class Place(Record, frozen=True, kw_only=True):
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
        (b'{"host": "a"}', "can't be read: Place: Object missing required field `port`"),
        (b'{"host": "a", "port": "1"}', "can't be read: Place.port: Expected `int`, got `str`"),
        (b'{"host": "a", "port": true}', "can't be read: Place.port: Expected `int`, got `bool`"),
        (b'{"host": "a", "port": 1.0}', "can't be read: Place.port: Expected `int`, got `float`"),
        (b'{"host": null, "port": 1}', "can't be read: Place.host: Expected `str`, got `null`"),
        (
            b'{"host": "a", "port": 1, "user": 5}',
            r"can't be read: Place.user: Expected `str \| null`, got `int`",
        ),
        (
            b'{"host": "a", "port": 1, "x": 5}',
            "can't be read: Place: Object contains unknown field `x`",
        ),
    ],
)
def test_what_is_no_such_record_is_refused_with_its_reason(data: bytes, said: str):
    with pytest.raises(DataError, match=f"^the place is damaged: it {said}.*; try again$"):
        read_record(Place, data, "the place", DataError, "try again")


def test_an_object_may_hold_anything():
    assert read_object(b'{"a": [1, null]}', "x", DataError) == {"a": [1, None]}
