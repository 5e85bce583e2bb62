"""What comes out of a grader's pipe is one of the known messages, or is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tandem.common.errors import WireError
from tandem.common.records import Verdict
from tandem.reward import pipes


def test_the_verdicts_are_those_of_the_records():
    assert set(pipes.VERDICTS) == {verdict.value for verdict in Verdict}


@pytest.mark.parametrize(
    "message",
    [["ready", None, 9], ["crash", "why", 9], ["done", "wrong", 100], ["raised", "why", 9]],
)
def test_replies_of_a_grader_are_read(message: list[Any]):
    assert pipes.read_reply(msgpack.packb(message)) == tuple(message)


@pytest.mark.parametrize(
    "message",
    [
        [],
        {},
        5,
        ["ready"],
        ["ready", "now", 9],
        ["splendid", None, 100],
        ["done", "wrong", -1],
        ["done", "wrong", 1.0],
        ["done", "wrong"],
        ["crash", b"x", 9],
    ],
)
def test_whatever_else_a_grader_says_is_refused(message: Any):
    with pytest.raises(WireError, match="refused reply of a grader"):
        pipes.read_reply(msgpack.packb(message))


@pytest.mark.parametrize(
    ("kind", "payload", "result"),
    [
        ("compare", ["4", "4"], "splendid"),
        ("compare", ["4", "4"], ["correct"]),
        ("function", [0, {"completions": ["a", "b"]}], [1.0]),
        ("function", [0, {"completions": ["a"]}], [float("nan")]),
        ("code", ["p", [["io", "", ""]], 1.0, 1.0, 1, True], [2, 1, 0]),
    ],
)
def test_a_result_that_can_not_be_is_refused(kind: str, payload: list[Any], result: Any):
    with pytest.raises(WireError, match=f"refused result of a request to {kind}"):
        pipes.checked_result(kind, payload, result)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 2000])
def test_bytes_that_are_no_message_are_refused(data: bytes):
    for read in (pipes.read_reply, pipes.read_request, pipes.read_control):
        with pytest.raises(WireError, match="isn't valid MessagePack"):
            read(data)


def test_a_word_of_the_zygote_comes_with_what_belongs_to_it():
    assert pipes.read_control(msgpack.packb(["exited", 3, 77, -9])) == ["exited", 3, 77, -9]
    with pytest.raises(WireError):
        pipes.read_control(msgpack.packb(["exited", 3, 77]))
