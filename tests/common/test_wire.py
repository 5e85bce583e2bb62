"""The wire format: what goes in comes out, and whatever else is refused with its reason."""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tandem.common import records, wire
from tandem.common.errors import WireError
from tandem.common.plain import Record
from tandem.common.records import (
    CommitResult,
    Episode,
    ExpertTrace,
    FinishReason,
    Group,
    GroupReceipt,
    GroupSubmission,
    Problem,
    Sample,
    SamplingParams,
    Turn,
    Verdict,
    Version,
    VersionSpan,
)


def a_sample(length: int = 5, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32) - 2,
        "source": np.ones(length, np.uint8),
        "logprobs": np.full(length, np.nan, np.float32),
        "spans": (VersionSpan(term=1, step=2, start=0, end=length),),
        "finish_reason": FinishReason.LENGTH,
        "sampling": SamplingParams(temperature=0.6, top_p=1.0, top_k=0, max_new_tokens=1024),
        "text": "été ∑ 字",
        "reward": 0.25,
        "verdict": Verdict.WRONG,
        "components": {"accuracy": 0.0, "format": None},
        "extracted": None,
        "grader": "boxed@1",
    }
    return Sample(**{**values, **changes})


def a_group(*samples: Sample, **changes: Any) -> Group:
    values: dict[str, Any] = {
        "group_id": "0-1",
        "attempt": 2,
        "worker": "rollout-0",
        "problem_id": "a/1",
        "prompt_tokens": np.arange(3, dtype=np.int32),
        "prompt_text": "p",
        "gold": "4",
        "data_source": "d",
        "samples": samples,
        "trace_ids": ("a/1#0",),
        "extra": {"index": 3, "nested": {"list": [1, "x", None, True, 0.5]}},
    }
    return Group(**{**values, **changes})


def an_episode() -> Episode:
    return Episode(
        environment="calculator",
        reward=1.5,
        failure=Verdict.ENV_TIMEOUT,
        detail="a step took longer than 60 s",
        turns=(
            Turn(start=0, end=2, reward=None, malformed=False),
            Turn(start=3, end=4, reward=-1.0, malformed=True),
        ),
        metrics={"tool_calls": 2.0},
    )


def a_trace(**changes: Any) -> ExpertTrace:
    values: dict[str, Any] = {
        "trace_id": "a/1#0",
        "problem_id": "a/1",
        "tokens": np.arange(3, dtype=np.int32),
        "logprobs": np.zeros(3, np.float32),
        "text": "t",
        "tokenizer_digest": "x",
        "reward": None,
        "verdict": Verdict.CORRECT,
        "components": {},
        "grader": None,
    }
    return ExpertTrace(**{**values, **changes})


RECORDS: list[Any] = [
    Version(term=3, step=70),
    VersionSpan(term=1, step=2, start=3, end=4),
    SamplingParams(temperature=0.6, top_k=5, max_new_tokens=7, top_p=1.0),
    a_sample(),
    a_sample(0, spans=(), reward=None, verdict=None, components={}),
    *(a_sample(finish_reason=reason) for reason in FinishReason),
    Problem(
        problem_id="a/1",
        prompt_text="p",
        prompt_tokens=np.arange(3, dtype=np.int32),
        gold="4",
        data_source="d",
        trace_ids=("a/1#0", "a/1#1"),
        ability="math",
        extra={},
    ),
    a_trace(),
    a_trace(source=np.array([1, 2, 1], np.uint8)),
    Turn(start=1, end=3, reward=0.5, malformed=True),
    an_episode(),
    a_sample(4, episode=an_episode()),
    a_group(a_sample(), a_sample(2)),
    GroupSubmission(request_id=9, group=a_group(a_sample())),
    GroupReceipt(
        request_id=9, group_id="0-1", attempt=1, result=CommitResult.SUPERSEDED, detail=""
    ),
]


KINDS = {
    kind.__name__: kind for kind in Record.__subclasses__() if kind.__module__ == records.__name__
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and same(structs.asdict(one), structs.asdict(other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind == "f"
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_every_record_comes_out_as_it_went_in(record: Any):
    assert same(record, wire.decode(wire.encode(record), type(record)))


def test_every_kind_is_tried():
    assert {type(record) for record in RECORDS} == set(KINDS.values())


def test_the_same_record_has_the_same_bytes():
    group = next(record for record in RECORDS if isinstance(record, Group))
    assert wire.encode(group) == wire.encode(wire.decode(wire.encode(group), Group))


def test_a_memoryview_is_read():
    data = memoryview(wire.encode(Version(term=1, step=2)))
    assert wire.decode(data, Version) == Version(term=1, step=2)


def test_arrays_come_out_read_only_in_little_endian_of_their_dtype():
    sample = wire.decode(wire.encode(a_sample()), Sample)
    assert sample.tokens.dtype == np.dtype("<i4")
    assert not sample.tokens.flags.writeable


def test_wide_and_strided_integers_travel_as_their_declared_dtype():
    tokens = np.arange(10, dtype=np.int64)[::2]
    sample = wire.decode(wire.encode(a_sample(5, tokens=tokens)), Sample)
    assert sample.tokens.tolist() == [0, 2, 4, 6, 8]


def framed(content: Any) -> bytes:
    """Any content in a frame whose checksum is right."""
    return framed_body(msgpack.packb(content, use_bin_type=True))


def framed_body(body: bytes) -> bytes:
    return wire.HEADER.pack(b"TDM", 1, xxhash.xxh3_64_intdigest(body)) + body


def fields_of(record: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(wire.encode(record)[wire.HEADER.size :])[1]
    return fields


REFUSED: list[tuple[str, bytes, str]] = [
    ("empty", b"", "truncated"),
    ("half a header", b"TDM\x01", "truncated"),
    ("another magic", b"XXX" + wire.encode(Version(term=1, step=1))[3:], "begins with b'XXX'"),
    ("another version", b"TDM\x07" + bytes(20), "schema version 7; this side speaks 1"),
    ("cut", wire.encode(Version(term=1, step=1))[:-1], "damaged or truncated"),
    ("longer", wire.encode(Version(term=1, step=1)) + b"x", "damaged or truncated"),
    ("no MessagePack", wire.HEADER.pack(b"TDM", 1, xxhash.xxh3_64_intdigest(b"\xc1")) + b"\xc1",
     "MessagePack data is malformed"),
    ("no pair", framed([1, 2, 3]), "Expected `array` of length 2, got 3"),
    ("an unknown kind", framed(["Malware", {}]), "it is a 'Malware', not the expected Version"),
    ("another kind", wire.encode(SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024)), "it is a 'SamplingParams', not the expected Version"),
    ("an unknown field", framed(["Version", {"term": 1, "step": 2, "x": 3}]), "Version: Object contains unknown field `x`"),
    ("a missing field", framed(["Version", {"term": 1}]), "Version: Object missing required field `step`"),
    ("a wrong type", framed(["Version", {"term": "1", "step": 2}]), "Version.term: Expected `int`, got `str`"),
    ("a bool for a number", framed(["Version", {"term": True, "step": 2}]), "Version.term: Expected `int`, got `bool`"),
    ("no fields", framed(["Version", [1, 2]]), "Version: Expected `object`, got `array`"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_is_not_exactly_one_record_is_refused_with_its_reason(data: bytes, reason: str):
    with pytest.raises(WireError, match=reason):
        wire.decode(data, Version)


SAMPLE_DAMAGE: list[tuple[str, Any, str]] = [
    ("tokens", b"\x00\x00\x00", "3 bytes aren't a multiple of 4"),
    ("tokens", [1, 2], "Expected the bytes of `int32`, got `list`"),
    ("source", b"\x00", "differ in length"),
    ("finish_reason", "tired", "Invalid enum value 'tired'"),
    ("verdict", "splendid", "Invalid enum value 'splendid'"),
    ("components", {"a": "b"}, "Expected `float | null`, got `str`"),
    ("components", [1], "Expected `object`, got `array`"),
    ("spans", {"a": 1}, "Expected `array`, got `object`"),
    ("spans", [{"term": 1}], r"\[0\]: Object missing required field `step`"),
    ("reward", "1.0", "Expected `float | null`, got `str`"),
    ("text", b"bytes", "Expected `str`, got `bytes`"),
]


@pytest.mark.parametrize(("field", "value", "reason"), SAMPLE_DAMAGE)
def test_a_field_of_a_wrong_kind_is_named(field: str, value: Any, reason: str):
    fields = {**fields_of(a_sample()), field: value}
    whole = "differ" in reason
    named = "Sample: " if whole else rf"Sample\.{field}.*"
    with pytest.raises(WireError, match=f"refused message: {named}.*{reason.replace('|', '.')}"):
        wire.decode(framed(["Sample", fields]), Sample)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_flipped_bit_passes(data: Any):
    message = bytearray(wire.encode(RECORDS[7]))
    position = data.draw(st.integers(0, 8 * len(message) - 1))
    message[position // 8] ^= 1 << position % 8
    with pytest.raises(WireError):
        wire.decode(bytes(message), Group)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_no_random_bytes_pass_or_raise_anything_else(data: bytes):
    with pytest.raises(WireError):
        wire.decode(data, Group)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["Group", "Sample", "Version"]), json_like)
def test_no_well_framed_nonsense_passes_or_raises_anything_else(kind: str, content: Any):
    try:
        data = framed([kind, content])
    except OverflowError:
        return
    with pytest.raises(WireError):
        wire.decode(data, KINDS[kind])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    st.text(),
    st.dictionaries(st.text(), st.none() | st.floats(allow_nan=False), max_size=4),
)
def test_any_sample_comes_out_as_it_went_in(tokens: list[int], text: str, components: Any):
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    sample = a_sample(
        len(tokens), tokens=np.array(tokens, np.int32), text=text, components=components
    )
    assert same(sample, wire.decode(wire.encode(sample), Sample))


def test_what_is_no_record_does_not_travel():
    with pytest.raises(WireError, match="a dict isn't a record"):
        wire.encode({"term": 1})


@pytest.mark.parametrize("value", [{1: "x"}, {"x": {1: 2}}, {"x": object()}, {"x": b"y"}, [1]])
def test_free_form_data_is_plain(value: Any):
    with pytest.raises(WireError, match=r"Group\.extra"):
        wire.encode(a_group(extra=value))


def test_free_form_data_is_not_nested_for_ever():
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    with pytest.raises(WireError, match=r"Group\.extra.*got `array`"):
        wire.encode(a_group(extra={"x": deep}))
    fields = {**fields_of(a_group()), "extra": {"x": deep}}
    with pytest.raises(WireError, match=r"Group\.extra.*got `array`"):
        wire.decode(framed(["Group", fields]), Group)


def test_a_number_too_large_for_the_format_is_refused():
    with pytest.raises(WireError, match=r"can't travel: Group\.extra"):
        wire.encode(a_group(extra={"x": 2**80}))


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(WireError, match=r"can't travel: Group\.gold"):
        wire.encode(a_group(gold="\ud800"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("gold", None), ("attempt", 1.5), ("trace_ids", (1,)), ("samples", (None,))],
)
def test_what_could_not_be_read_is_not_written(field: str, value: Any):
    with pytest.raises(WireError, match=rf"can't travel: Group\.{field}.*Expected"):
        wire.encode(a_group(**{field: value}))


def test_numpys_scalars_travel_as_numbers():
    sample = a_sample(reward=np.float32(0.5), components={"a": np.int64(2)})
    found = wire.decode(wire.encode(sample), Sample)
    assert (found.reward, found.components) == (0.5, {"a": 2.0})


def test_text_that_is_no_utf8_is_refused():
    data = wire.encode(a_group(gold="abcd"))[wire.HEADER.size :].replace(b"abcd", b"ab\xff\xfe")
    with pytest.raises(WireError, match="refused message: Group: 'utf-8' codec can't decode"):
        wire.decode(framed_body(data), Group)


def test_lists_in_lists_end_in_a_refusal():
    whole = framed(["Group", {"extra": 0}])[wire.HEADER.size :]
    with pytest.raises(WireError, match="refused message: Group"):
        wire.decode(framed_body(whole[:-1] + b"\x91" * 100_000 + b"\x01"), Group)


def test_a_message_over_the_limit_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    data = wire.encode(a_group(a_sample(2000)))
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(WireError, match="over the limit of 1,000: send fewer"):
        wire.encode(a_group(a_sample(2000)))
    with pytest.raises(WireError, match="over the limit of 1,000"):
        wire.decode(data, Group)


def test_the_frame_is_what_the_module_says():
    data = wire.encode(Version(term=1, step=2))
    magic, version, checksum = struct.unpack_from("<3sBQ", data)
    assert (magic, version) == (b"TDM", 1)
    assert checksum == xxhash.xxh3_64_intdigest(data[12:])
    assert msgpack.unpackb(data[12:]) == ["Version", {"term": 1, "step": 2}]


def test_a_group_that_an_earlier_release_stored_is_read_and_written_as_it_was():
    data = base64.b85decode(STORED)
    group = wire.decode(data, Group)
    assert same(
        group,
        a_group(
            a_sample(
                2,
                tokens=np.array([11, -1], np.int32),
                source=np.array([1, 0], np.uint8),
                logprobs=np.array([np.nan, -0.5], np.float32),
                spans=(VersionSpan(term=1, step=7, start=1, end=2),),
                finish_reason=FinishReason.STOP,
                sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
                text="été",
                reward=1.0,
                verdict=Verdict.CORRECT,
                components={"accuracy": 1.0, "format": None},
            ),
            worker="w",
            prompt_tokens=np.array([5, 70000], np.int32),
            extra={"index": 300},
        ),
    )
    assert wire.encode(group) == data


def test_a_trace_that_an_earlier_release_stored_is_read_and_written_as_it_was():
    data = bytes.fromhex(STORED_TRACE)
    assert same(wire.decode(data, ExpertTrace), a_trace())
    assert wire.encode(a_trace()) == data


STORED_TRACE = (
    "54444d017f116bbbc5208afd92ab45787065727454726163658aa874726163655f6964a5612f312330aa70726f626c65"
    "6d5f6964a3612f31a6746f6b656e73c40c000000000100000002000000a86c6f6770726f6273c40c0000000000000000"
    "00000000a474657874a174b0746f6b656e697a65725f646967657374a178a6726577617264c0a776657264696374a763"
    "6f7272656374aa636f6d706f6e656e747380a6677261646572c0"
)
"""A trace from before its tokens had sources."""
STORED = (
    b"R76byqz4$Ett^<klBGv-Z*_2ssAqC-b#Py4WTP-GF{fd4bY*RDbONS#Z*ps8a-nysaB^>AY-Md<X=I~eFEOofa&K"
    b"*LbYFCDYh`Y8#0Uid003|i0RXFTa&K*LbYFC3cyys~q-SqzWT7;xWMOn+UvqDDa${woWT$gsZE$R5bCHaubZ={AZ"
    b"ga#43jhEB|NsC0rgLv~a${x00s#Q1Y;R|9a&KaD#0UTYz<&S$0KcVkaA9t9k%XjlWpZr+q;qs-a0jJxbYXII0i$J"
    b"ZWCE>bX>MtAXkT(=VRLV8q;qs{aHw-(ZE$R9ZfAt6bY*RDWpZJ3b#i6PKkxtm00000rF3s_UvSGm@Bjb+0001`bZ"
    b">B9YXGioVR&C|Wp`h6Z);_4bIk+*q;zF?bfv?obi=8pa%Fd6a%9Ut@Bjb+0001|c4cy8X=8M!V{dYDWn*-zV{dJ6"
    b"Z*FC7baR5JVPj);a$#e6%Rle{000000H$Vda&2LBz^P?;baG*1bY*0~re|_tWMy)vVsCh5WI!>gbaG*1WnXDzbCI"
    b"QCFEJx9rDb?@a$$j`X>Md?c+CMU"
)
"""A group as the hand-made codec of schema version 1 wrote it, in base 85."""
