"""Manifest, checksums, states and addresses, as pure rules."""

from __future__ import annotations

import json
import socket

import msgspec
import pytest
import torch

from tandem.common.errors import ConfigError, WeightsError, WireError
from tandem.common.records import Version
from tandem.common.sockets import local_address
from tandem.common.weights.channel import Pair, cut
from tandem.common.weights.manifest import (
    ALIGNMENT,
    WeightManifest,
    check_manifest,
    first_difference,
    make_manifest,
    plan,
    read_layout,
)
from tandem.common.weights.protocol import (
    Offer,
    Withdraw,
    newest_learner,
    pack,
    refusal,
    unpack,
)
from tandem.common.weights.staging import StagingSlot, checksum, views
from tandem.common.weights.ways import possible_ways

SPECS = [("a", (3, 5), "float32"), ("b", (), "bfloat16"), ("c d", (70,), "torch.int64")]
V1 = Version(term=1, step=1)


def manifest() -> WeightManifest:
    layout = plan(SPECS, 512)
    return make_manifest("run", V1, layout, list(range(layout.bucket_count)))


def test_tensors_are_aligned_and_buckets_cover_the_buffer() -> None:
    layout = plan(SPECS, 512)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    sizes = [bucket.stop - bucket.start for bucket in layout.buckets]
    assert len(sizes) == layout.bucket_count
    assert sum(sizes) == layout.total_bytes
    assert max(sizes) <= 512


def test_views_share_the_buffer_and_have_the_shapes() -> None:
    layout = plan(SPECS, 512)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    named = dict(views(buffer, layout))
    assert [(n, tuple(t.shape), t.dtype) for n, t in named.items()] == [
        ("a", (3, 5), torch.float32),
        ("b", (), torch.bfloat16),
        ("c d", (70,), torch.int64),
    ]
    named["c d"].fill_(-1)
    assert int((buffer == 255).sum()) == 70 * 8


def test_a_layout_survives_its_text() -> None:
    layout = plan(SPECS, 512)
    assert read_layout(layout.text) == layout


def test_a_manifest_survives_the_wire() -> None:
    sent = Offer(round="1.1/1", manifest=manifest(), way="gloo", place="")
    received = unpack(pack(sent))
    assert received == sent
    check_manifest(received.manifest)


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(WireError, match="refused weight message"):
        unpack([b"Group", pack(Withdraw(round="r", reason="x"))[1]])


@pytest.mark.parametrize(
    "change",
    [
        {"version": Version(term=1, step=2)},
        {"run_id": "other"},
        {"digest": "0" * 64},
        {"checksums": (1, 0, 2)},
        {"checksums": (0, 1)},
        {"layout": plan(SPECS, 1024)},
        {"layout": plan(SPECS[::-1], 512)},
    ],
)
def test_a_changed_manifest_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(WeightsError):
        check_manifest(msgspec.structs.replace(manifest(), **change))


def test_the_base_is_part_of_the_content() -> None:
    plain = manifest()
    adapted = make_manifest(
        plain.run_id, plain.version, plain.layout, plain.checksums, base="digest"
    )
    check_manifest(adapted)
    assert adapted.content != plain.content
    assert adapted.digest != plain.digest
    with pytest.raises(WeightsError):
        check_manifest(msgspec.structs.replace(adapted, base="other"))


@pytest.mark.parametrize("sums", [(), (0, 1), (0, 1, 2, 3)])
def test_a_manifest_needs_a_checksum_of_every_bucket(sums: tuple[int, ...]) -> None:
    whole = manifest()
    assert whole.layout.bucket_count == len(whole.checksums) == 3
    # Its digest is that of what it says.
    other = make_manifest(whole.run_id, whole.version, whole.layout, sums)
    with pytest.raises(WeightsError, match=f"has {len(sums)} checksums for 3 buckets"):
        check_manifest(other)


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        ({"tensors": [["a", [3], "float31"]], "bucket_bytes": 512}, "a has dtype float31"),
        ({"tensors": [["a", [-3], "int8"]], "bucket_bytes": 512}, "Expected `int` >= 0"),
        ({"tensors": [["a", [1] * 9, "int8"]], "bucket_bytes": 512}, "length <= 8"),
        ({"tensors": [["a", [3], "int8"]] * 2, "bucket_bytes": 512}, "a comes twice"),
        ({"tensors": [["a", [3], "int8"]], "bucket_bytes": 100}, "can't have 100 bytes"),
        ({"tensors": [], "bucket_bytes": 512}, "no parameters"),
        ({"tensors": [["a", [3]]], "bucket_bytes": 512}, "length 3"),
    ],
)
def test_a_layout_that_no_buffer_can_have_is_refused(
    layout: dict[str, object], complaint: str
) -> None:
    with pytest.raises(WeightsError, match=complaint):
        read_layout(json.dumps(layout))


def test_a_restamp_keeps_the_content_and_changes_the_digest() -> None:
    before = manifest()
    newer = Version(term=1, step=2)
    after = make_manifest(before.run_id, newer, before.layout, before.checksums)
    check_manifest(after)
    assert after.content == before.content
    assert after.digest != before.digest


@pytest.mark.parametrize(
    ("expected", "complaint"),
    [
        (SPECS[::-1], None),
        ([*SPECS, ("z", (1,), "float32")], "z is missing"),
        (SPECS[:2], "c d is unknown to the engine"),
        ([("a", (5, 3), "float32"), *SPECS[1:]], r"a has shape [5, 3] in the engine and [3, 5]"),
        ([("a", (3, 5), "float16"), *SPECS[1:]], "a has dtype float16 in the engine and float32"),
    ],
)
def test_the_first_difference_is_named(
    expected: list[tuple[str, tuple[int, ...], str]], complaint: str | None
) -> None:
    found = first_difference(expected, manifest().layout.tensors)
    assert (found is None) if complaint is None else (found is not None and complaint in found)


def test_a_checksum_sees_a_flipped_bit_and_swapped_words() -> None:
    data = torch.arange(2_100_000 // 8 * 8, dtype=torch.int64).to(torch.uint8)
    before = checksum(data)
    assert 0 <= before < 1 << 64
    flipped = data.clone()
    flipped[2_000_003] ^= 64
    assert checksum(flipped) != before
    swapped = data.clone()
    swapped[0:8], swapped[8:16] = data[8:16], data[0:8]
    assert checksum(swapped) != before
    assert checksum(data.clone()) == before


def test_a_copy_has_every_bit_and_the_checksums_of_its_buckets() -> None:
    tensors = [
        ("turned", torch.arange(600_000, dtype=torch.float32).view(600, 1000).t()),
        ("one", torch.tensor(3.5)),
        ("half", torch.linspace(-3, 3, 700_001)),
        ("none", torch.empty(0, 4)),
    ]
    dtypes = ["float32", "float32", "bfloat16", "float32"]
    layout = plan([(n, t.shape, d) for (n, t), d in zip(tensors, dtypes, strict=True)], 1 << 20)
    slot = StagingSlot("run", layout, shared=False)
    for _ in range(2):
        slot.reset()
        for index, (_, tensor) in enumerate(tensors):
            slot.put(index, tensor)
        for (_, view), (_, tensor) in zip(slot.tensors, tensors, strict=True):
            assert torch.equal(view, tensor.to(view.dtype))
        found = slot.parcel(V1).manifest
        check_manifest(found)
        assert list(found.checksums) == [checksum(piece) for piece in cut(slot.buffer, layout)]


@pytest.mark.parametrize(
    ("term", "held", "run_id", "offered", "complaint"),
    [
        (1, None, "run", (1, 0), None),
        (1, (1, 3), "run", (1, 4), None),
        (2, (1, 50), "run", (2, 40), None),
        (1, (1, 3), "run", (1, 3), "not newer than 1.3"),
        (1, (1, 3), "run", (1, 2), "not newer than 1.3"),
        (2, None, "run", (1, 9), "term 2 has begun"),
        (1, None, "other", (1, 0), "belongs to run other"),
    ],
)
def test_which_versions_are_taken_up(
    term: int,
    held: tuple[int, int] | None,
    run_id: str,
    offered: tuple[int, int],
    complaint: str | None,
) -> None:
    found = refusal(
        run_id="run",
        term=term,
        held=Version(term=held[0], step=held[1]) if held else None,
        offered_run=run_id,
        offered=Version(term=offered[0], step=offered[1]),
    )
    assert (found is None) if complaint is None else (found is not None and complaint in found)


def test_the_newest_term_is_the_learner() -> None:
    class Entry:
        def __init__(self, member: str, term: int) -> None:
            self.member = member
            self.info = {"endpoint": "tcp://x", "public_key": "k", "term": term}

    class NotYet:
        member = "learner-2"
        info: dict[str, object] = {}  # noqa: RUF012

    found = newest_learner([Entry("old", 3), Entry("new", 4), NotYet()])
    assert found is not None
    assert (found.member, found.term) == ("new", 4)


def test_a_damaged_entry_hides_no_learner_and_is_an_error_alone() -> None:
    class Entry:
        def __init__(self, member: str, term: object) -> None:
            self.member = member
            self.info = {"endpoint": "tcp://x", "public_key": "k", "term": term}

    found = newest_learner([Entry("damaged", "four"), Entry("whole", 3)])
    assert found is not None
    assert found.member == "whole"
    with pytest.raises(WeightsError, match="the address of damaged in the registry"):
        newest_learner([Entry("damaged", "four")])


def test_the_weight_channel_never_listens_everywhere() -> None:
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="no credentials of its own"):
            local_address(everywhere)


def test_an_interface_is_named_by_address_or_name() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert local_address(loopback) == "127.0.0.1"
    with pytest.raises(ConfigError, match="neither an address nor an interface"):
        local_address("no-such-interface")


def possible(
    setting: str = "auto",
    sender: str = "cpu",
    *,
    receiver: str = "cpu",
    same_memory: bool = False,
) -> tuple[str, ...]:
    pair = Pair(sender=sender, receiver=receiver, same_memory=same_memory)
    return possible_ways(setting, pair)


def test_auto_takes_the_fastest_that_the_pair_can_do_and_has_the_others_in_reserve() -> None:
    assert possible() == ("gloo", "snapshot")
    assert possible(same_memory=True) == ("shared_memory", "gloo", "snapshot")
    assert possible(sender="cuda:a", receiver="cuda:b", same_memory=True) == (
        "nccl",
        "shared_memory",
        "gloo",
        "snapshot",
    )
    assert possible(sender="cuda:a", receiver="cuda:b") == ("nccl", "gloo", "snapshot")
    assert possible(sender="cuda:a", receiver="cuda:a") == ("gloo", "snapshot")
    # A worker with a GPU whose torch has no NCCL says that it has none.
    assert possible(sender="cuda:a") == ("gloo", "snapshot")


def test_a_way_is_asked_for_only_where_it_can_work() -> None:
    with pytest.raises(WeightsError, match="not the same one"):
        possible("nccl", "cuda:a", receiver="cuda:a")
    with pytest.raises(WeightsError, match="needs a GPU on each side"):
        possible("nccl", "cuda:a")
    with pytest.raises(WeightsError, match="the same /dev/shm"):
        possible("shared_memory")
    assert possible("shared_memory", same_memory=True) == ("shared_memory",)
