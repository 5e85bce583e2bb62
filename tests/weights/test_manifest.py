"""Manifest, checksums, states and addresses, as pure rules."""

from __future__ import annotations

import json
import socket
from typing import Any

import msgspec
import pytest
import torch

from tandem.common.errors import ConfigError, WeightsError, WireError
from tandem.common.plain import read_record
from tandem.common.records import Version
from tandem.common.sockets import local_address
from tandem.common.weights.gloo import cut
from tandem.common.weights.manifest import (
    ALIGNMENT,
    WeightManifest,
    first_difference,
    plan,
    read_layout,
)
from tandem.common.weights.protocol import (
    Offer,
    Pair,
    Withdraw,
    newest_learner,
    pack,
    refusal,
    unpack,
)
from tandem.common.weights.shared_memory import checksum, stage
from tandem.common.weights.staging import StagingSlot, StagingSlots
from tandem.common.weights.ways import possible_ways

SPECS = [("a", (3, 5), "float32"), ("b", (), "bfloat16"), ("c d", (70,), "torch.int64")]
V1 = Version(term=1, step=1)


def manifest(**changes: Any) -> WeightManifest:
    layout = plan(SPECS, 512)
    whole = WeightManifest(
        run_id="run",
        version=V1,
        layout=layout,
        checksums=tuple(range(layout.bucket_count)),
        base="",
        scored=None,
    )
    return msgspec.structs.replace(whole, **changes)


def test_tensors_are_aligned_and_buckets_cover_the_buffer() -> None:
    layout = plan(SPECS, 512)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    sizes = [bucket.stop - bucket.start for bucket in layout.buckets]
    assert len(sizes) == layout.bucket_count
    assert sum(sizes) == layout.total_bytes
    assert max(sizes) <= 512


def test_views_share_the_buffer_and_have_the_shapes() -> None:
    layout = plan(SPECS, 512)
    staged = stage(layout, ())
    named = dict(staged.tensors())
    assert [(n, tuple(t.shape), t.dtype) for n, t in named.items()] == [
        ("a", (3, 5), torch.float32),
        ("b", (), torch.bfloat16),
        ("c d", (70,), torch.int64),
    ]
    named["c d"].fill_(-1)
    assert int((staged.buffer == 255).sum()) == 70 * 8


def test_a_layout_survives_its_text() -> None:
    layout = plan(SPECS, 512)
    assert read_layout(layout.text) == layout


def test_a_manifest_survives_the_wire() -> None:
    sent = Offer(round="1.1/1", manifest=manifest(), way="gloo", place="")
    received = unpack(pack(sent))
    assert received == sent
    assert received.manifest.content == sent.manifest.content


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(WireError, match="refused weight message"):
        unpack([b"Group", pack(Withdraw(round="r", reason="x"))[1]])


@pytest.mark.parametrize(
    "change",
    [
        {"checksums": (1, 0, 2)},
        {"layout": plan(SPECS[::-1], 512)},
        {"base": "digest"},
    ],
)
def test_other_weights_are_another_content(change: dict[str, Any]) -> None:
    assert manifest(**change).content != manifest().content


@pytest.mark.parametrize("sums", [(), (0, 1), (0, 1, 2, 3)])
def test_a_manifest_needs_a_checksum_of_every_bucket(sums: tuple[int, ...]) -> None:
    assert manifest().layout.bucket_count == len(manifest().checksums) == 3
    complaint = f"1.1 has {len(sums)} checksums for 3 buckets"
    with pytest.raises(ValueError, match=complaint):
        manifest(checksums=sums)
    # From another process, too.
    fields = msgspec.to_builtins(manifest()) | {"checksums": sums}
    with pytest.raises(WeightsError, match=complaint):
        read_record(WeightManifest, fields, "a manifest", WeightsError)


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


def test_a_restamp_keeps_the_content() -> None:
    assert manifest(version=Version(term=1, step=2)).content == manifest().content


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
    slot = StagingSlot(layout, shared=False)
    for _ in range(2):
        slot.reset()
        for index, (_, tensor) in enumerate(tensors):
            slot.put(index, tensor)
        for (_, view), (_, tensor) in zip(slot.tensors, tensors, strict=True):
            assert torch.equal(view, tensor.to(view.dtype))
        assert slot.checksums() == tuple(checksum(piece) for piece in cut(slot.staged))


def test_a_slow_workers_buffers_are_given_up_once_nobody_reads_them() -> None:
    slots, layout = StagingSlots("run"), plan(SPECS, 512)

    def publish(step: int) -> None:
        slot = slots.take(layout, shared=False, pin=False)
        slots.publish(slot, Version(term=1, step=step), None)

    publish(1)
    slow = slots.pin()
    publish(2)
    silent = slots.pin()
    publish(3)
    assert slow is not None
    assert silent is not None
    assert len(slots) == 3
    slots.release(silent.slot, retire=True)
    publish(4)
    # What a silent worker may still read is never written again.
    assert slots._newest is not None
    assert slots._newest.slot is not silent.slot
    assert len(slots) == 2
    assert slots.nbytes == 2 * layout.total_bytes
    slots.release(slow.slot)
    publish(5)
    assert slots._newest.slot is slow.slot
    assert len(slots) == 2


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
        manifest(run_id=run_id, version=Version(term=offered[0], step=offered[1])),
        run_id="run",
        term=term,
        held=Version(term=held[0], step=held[1]) if held else None,
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
    learner: str = "cpu",
    *,
    worker: str = "cpu",
    same_memory: bool = False,
) -> tuple[str, ...]:
    pair = Pair(learner=learner, worker=worker, same_memory=same_memory)
    return possible_ways(setting, pair)


def test_auto_takes_the_fastest_that_the_pair_can_do_and_has_the_others_in_reserve() -> None:
    assert possible() == ("gloo", "snapshot")
    assert possible(same_memory=True) == ("shared_memory", "gloo", "snapshot")
    assert possible(learner="cuda:a", worker="cuda:b", same_memory=True) == (
        "nccl",
        "shared_memory",
        "gloo",
        "snapshot",
    )
    assert possible(learner="cuda:a", worker="cuda:b") == ("nccl", "gloo", "snapshot")
    assert possible(learner="cuda:a", worker="cuda:a") == ("gloo", "snapshot")
    # A worker with a GPU whose torch has no NCCL says that it has none.
    assert possible(learner="cuda:a") == ("gloo", "snapshot")


def test_a_way_is_asked_for_only_where_it_can_work() -> None:
    with pytest.raises(WeightsError, match="not the same one"):
        possible("nccl", "cuda:a", worker="cuda:a")
    with pytest.raises(WeightsError, match="needs a GPU on each side"):
        possible("nccl", "cuda:a")
    with pytest.raises(WeightsError, match="the same /dev/shm"):
        possible("shared_memory")
    assert possible("shared_memory", same_memory=True) == ("shared_memory",)
