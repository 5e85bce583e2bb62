"""What comes out of a grader's pipe is one of the known messages, or is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, get_args

import msgpack
import pytest

from tandem.common.errors import WireError
from tandem.common.records import EPISODE_FAILURES, Verdict
from tandem.reward.graders import pipes, requests
from tandem.reward.graders.requests import Slot


def test_the_verdicts_are_those_of_the_records():
    others = {Verdict.JUDGE_FAILED, *EPISODE_FAILURES}
    assert set(get_args(pipes.RESULTS["compare"])) == {v.value for v in set(Verdict) - others}


@pytest.mark.parametrize(
    "message",
    [
        ["ready", None, 9],
        ["crash", "why", 0],
        ["raised", "why", 9],
        ["done", "wrong", 9],
        ["part", b"x", True],
    ],
)
def test_replies_of_a_grader_are_read(message: list[Any]):
    assert msgpack.unpackb(pipes.read_reply(msgpack.packb(message)).pack()) == message


@pytest.mark.parametrize(
    "message",
    [
        [],
        {},
        5,
        ["ready", 1, 9],
        ["ready"],
        ["done", "wrong", 1.0],
        ["splendid", "wrong", 100],
        ["done", "wrong", -1],
        ["done", "wrong"],
        ["crash", b"x", 0],
        ["raised", None, 0],
    ],
)
def test_whatever_else_a_grader_says_is_refused(message: Any):
    with pytest.raises(WireError, match="refused reply of a grader"):
        pipes.read_reply(msgpack.packb(message))


FUNCTION = [0, {"completions": ["a", "b"]}, "auto", [[{"role": "user", "content": "q"}]] * 2]
TOKENS = [0, {"completions": ["a"], "completion_ids": [[5, 6]]}, "text", []]
CODE = ["x = 1", [["assert", "x"]] * 3, 1.0, 5.0, 256, False]


@pytest.mark.parametrize(
    ("kind", "payload", "result"),
    [
        ("compare", ["4", "4"], "correct"),
        ("function", FUNCTION, [1.5, None]),
        ("code", CODE, [2, 3, 1]),
    ],
)
def test_results_are_of_the_kind_that_was_asked_for(kind: str, payload: list[Any], result: Any):
    assert list(pipes.read_payload(kind, msgpack.packb(payload))) == payload
    assert list(pipes.checked_result(kind, payload, result)) == list(result)


@pytest.mark.parametrize(
    ("kind", "payload", "result"),
    [
        ("compare", ["4", "4"], "splendid"),
        ("compare", ["4", "4"], 1),
        ("function", FUNCTION, [1.5]),
        ("function", FUNCTION, [1.5, "2"]),
        ("function", FUNCTION, [1.5, float("nan")]),
        ("function", FUNCTION, [1.5, True]),
        ("function", TOKENS, [[1e308, 1e308]]),
        ("code", CODE, [4, 3, 0]),
        ("code", CODE, [2, 2, 0]),
        ("code", CODE, "all"),
    ],
)
def test_results_that_cannot_be_are_refused(kind: str, payload: list[Any], result: Any):
    with pytest.raises(WireError, match=f"refused result of a request to {kind}"):
        pipes.checked_result(kind, payload, result)


@pytest.mark.parametrize(
    "payload", [["4"], ["4", 4], ["4", "4", "4"], {"answer": "4"}, [0, {"completions": []}]]
)
def test_a_payload_of_another_shape_is_refused(payload: Any):
    with pytest.raises(WireError, match="refused payload of a request to compare"):
        pipes.read_payload("compare", msgpack.packb(payload))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 2000])
def test_bytes_that_are_no_message_are_refused(data: bytes):
    for read in (pipes.read_reply, pipes.read_request, pipes.read_control):
        with pytest.raises(WireError, match=r"^refused .*message.*: "):
            read(data)


def test_a_word_of_the_zygote_comes_with_what_belongs_to_it():
    told = pipes.read_control(msgpack.packb(["exited", 3, 77, -9]))
    assert told == pipes.Exited(slot=3, pid=77, status=-9)
    with pytest.raises(WireError):
        pipes.read_control(msgpack.packb(["exited", 3, 77]))


@pytest.fixture
def heard() -> Iterator[tuple[socket.socket, Slot]]:
    """A grader's end of its socket, and the slot that listens at the other."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs, ours:
        yield theirs, Slot(0, ours)


def test_a_reply_in_parts_is_heard_when_all_of_it_is_there(heard: tuple[socket.socket, Slot]):
    theirs, slot = heard
    data = pipes.Done([0.5] * 100, 9).pack()
    theirs.send(pipes.Part(data[:70], False).pack())
    assert slot.hear() is None
    theirs.send(pipes.Part(data[70:], True).pack())
    assert slot.hear() == pipes.Done([0.5] * 100, 9)
    theirs.send(pipes.Done("wrong", 9).pack())
    assert slot.hear() == pipes.Done("wrong", 9)
    theirs.close()
    with pytest.raises(EOFError):
        slot.hear()


def test_parts_without_an_end_and_parts_of_parts_are_refused(
    heard: tuple[socket.socket, Slot], monkeypatch: pytest.MonkeyPatch
):
    theirs, slot = heard
    monkeypatch.setattr(requests, "MAX_REPLY", 100)
    theirs.send(pipes.Part(pipes.Part(b"x", True).pack(), True).pack())
    with pytest.raises(WireError, match="its parts are a part"):
        slot.hear()
    for _ in range(2):
        theirs.send(pipes.Part(b"x" * 60, False).pack())
    with pytest.raises(WireError, match="longer than 100 bytes; pay single tokens of fewer"):
        slot.hear()
