"""Decoders of what comes over ZeroMQ, through pipes and from another rank."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import xxhash
from decoder import Decoder, packed, same, text
from examples import (
    MESSAGES,
    RECORDS,
    a_manifest,
)
from frames import (
    flipped,
    mutated_json,
    mutated_msgpack,
    spliced,
)

from tandem.common import plain, wire
from tandem.common.errors import WireError
from tandem.common.records import (
    ExpertTrace,
    Group,
    GroupSubmission,
    Sample,
    Version,
)
from tandem.common.weights import manifest, protocol
from tandem.learner import orders
from tandem.replay.members import Member
from tandem.reward.graders import pipes
from tandem.reward.sandbox.code_runner import same_result, same_value
from tandem.reward.sandbox.expected import expected
from tandem.rollout.environments import pipes as episode_pipes
from tandem.rollout.environments import requests
from tandem.rollout.environments import wire as environments
from tandem.rollout.environments.client import address_of
from tandem.rollout.environments.process import (
    read_said,
)


def framed(body: bytes) -> bytes:
    """A body in a frame whose checksum is right."""
    head = wire.HEADER.pack(wire.MAGIC, wire.SCHEMA_VERSION, xxhash.xxh3_64_intdigest(body))
    return head + body


def mutated_frame(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A frame of the wire: seldom its checksum is wrong, for that alone is soon found."""
    if c.random() < 0.15:
        return flipped(data, c) if c.random() < 0.7 else spliced(data, c.choice(corpus), c)
    bodies = [one[wire.HEADER.size :] for one in corpus]
    return framed(mutated_msgpack(data[wire.HEADER.size :], bodies, c))


def of_wire(record: Any) -> Decoder:
    """One kind of record."""
    kind = type(record)
    others = [wire.encode(one) for one in RECORDS + MESSAGES]

    def check(found: Any) -> str:
        again = wire.decode(wire.encode(found), kind)
        if not same(found, again):
            return f"it isn't the same when it is encoded and decoded again: {found!r:.300}"
        return unsound(found)

    return Decoder(
        name=f"wire.{kind.__name__}",
        corpus=[wire.encode(record)],
        decode=lambda data: wire.decode(data, kind),
        mutate=lambda data, _, c: mutated_frame(data, others, c),
        check=check,
    )


def unsound(record: Any) -> str:
    """Why a record can't be, by its own invariants; empty where it can."""
    found = ""
    if isinstance(record, GroupSubmission):
        return unsound(record.group)
    if isinstance(record, Group):
        found = next(filter(None, map(unsound, record.samples)), "")
    if isinstance(record, Sample):
        n = len(record.tokens)
        if not (len(record.source) == len(record.logprobs) == n):
            found = "its arrays differ in length"
        elif n and int(max(record.source)) > 2:
            found = "it has a token of an unknown source"
        elif any(not 0 <= s.start <= s.end <= n for s in record.spans):
            found = "it has a span outside its tokens"
    if isinstance(record, ExpertTrace) and record.logprobs is not None:
        found = "" if len(record.logprobs) == len(record.tokens) else "its arrays differ in length"
    if isinstance(record, Version) and min(record.term, record.step) < 0:
        found = "it is a negative version"
    return found


def mutated_message(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """Both frames of a message, packed as a list so that they are one piece here."""
    frames = msgpack.unpackb(data)
    what = c.random()
    if what < 0.1:
        frames = frames[: c.randrange(2)]
    elif what < 0.2:
        frames[0] = flipped(frames[0], c)
    elif what < 0.25:
        frames.append(frames[0])
    elif what < 0.3:
        frames[0] = c.choice((b"", b"Ask", b"Offer", b"\xff", frames[1][:50]))
    else:
        others = [msgpack.unpackb(one)[1] for one in corpus]
        frames[1] = mutated_frame(frames[1], others, c)
    return msgpack.packb(frames)


def mutated_manifest(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A manifest that says something else in one or two places."""
    found = wire.decode(data, manifest.WeightManifest)
    kind, fields = msgpack.unpackb(data[wire.HEADER.size :], strict_map_key=False)
    layout, sums, total = fields["layout"], fields["checksums"], found.layout.total_bytes
    numbers = (0, 1, 255, 256, 257, 512, 2**31, 2**40, 2**63, total, total + 256, total - 256)
    for _ in range(c.choice((1, 1, 2))):
        what = c.random()
        if what < 0.55:
            tensors = layout["tensors"]
            at = c.randrange(len(tensors))
            tensors[at][c.randrange(len(tensors[at]))] = c.choice(
                ("", "-", "model.b", "float99", "int8", "name\n", [], [0], [-1], [1, 2], [2**47] * 8,
                 [2**48], [1] * 9, [1.5], ["1"], 4, -1, None, {"x": 1}, True)
            )  # fmt: skip
            if c.random() < 0.2:
                c.choice((tensors.pop, tensors[at].pop))()
        elif what < 0.7:
            sums[c.randrange(len(sums))] = c.choice((*numbers, -1, 2**64 - 1, 0.5, "1"))
            if c.random() < 0.3:
                c.choice((sums.pop, lambda: sums.append(5)))()
        elif what < 0.9:
            layout["bucket_bytes"] = c.choice((*numbers, -256, 2**48 - 256, 256.0))
        else:
            scored = c.choice(
                (
                    None,
                    ([], []),
                    ([[1]], [[]]),
                    ([[1, 2]], [[0.5, 0.5]]),
                    ([[-1, 2]], [[0.0]]),
                    ([[1, 1 << 40]], [[0.0]]),
                    ([[1, 2]], [[float("nan")]]),
                    ([[1] * 70_000], [[0.0] * 69_999]),
                )
            )
            fields["scored"] = scored and dict(zip(("rows", "logprobs"), scored, strict=True))
        if not (sums and layout["tensors"]):
            break
    encoded = framed(msgpack.packb([kind, fields]))
    return mutated_frame(encoded, corpus, c) if c.random() < 0.1 else encoded


def read_manifest(data: bytes) -> manifest.WeightManifest:
    """As a receiver does: decoded, checked, compared with its engine."""
    found = wire.decode(data, manifest.WeightManifest)
    manifest.first_difference([("model.a", (3, 5), "float32")], found.layout.tensors)
    manifest.read_layout(found.layout.text)
    return found


def check_manifest(found: manifest.WeightManifest) -> str:
    """Buckets and tensors lie side by side in the buffer, and need all of it."""
    layout = found.layout
    ends = [bucket.stop for bucket in layout.buckets]
    if [bucket.start for bucket in layout.buckets] != [0, *ends][:-1] or len(ends) != len(
        found.checksums
    ):
        return "its buckets don't cover the buffer"
    if (ends or [0])[-1] != layout.total_bytes:
        return f"its buckets end at {ends[-1:]} of {layout.total_bytes} bytes"
    need = sum(-(-t.nbytes // manifest.ALIGNMENT) * manifest.ALIGNMENT for t in layout.tensors)
    if need != layout.total_bytes:
        return f"its tensors need {need} bytes of {layout.total_bytes}"
    if (scored := found.scored) is not None and not all(
        len(row) == len(some) + 1 >= 2 and all(map(math.isfinite, some))
        for row, some in zip(scored.rows, scored.logprobs, strict=True)
    ):
        return f"rows and log-probs that don't fit: {scored}"
    return ""


def from_sockets() -> Iterable[Decoder]:
    """What comes over ZeroMQ, pipes and between ranks."""
    yield from map(of_wire, RECORDS + MESSAGES)
    frames = [msgpack.packb(protocol.pack(message)) for message in MESSAGES]
    yield (
        Decoder(
            name="weights.unpack",
            corpus=frames,
            decode=lambda data: protocol.unpack(msgpack.unpackb(data)),
            mutate=mutated_message,
            check=lambda r: (
                "" if same(r, protocol.unpack(protocol.pack(r))) else "not the same again"
            ),
        )
    )
    yield (
        Decoder(
            name="weights.manifest",
            corpus=[wire.encode(a_manifest())],
            decode=read_manifest,
            mutate=mutated_manifest,
            check=check_manifest,
        )
    )
    train = {"do": "train", "step": 3, "lr": 1e-6, "critic_lr": 1e-5, "settled": True}
    score = {"do": "score", "rows": [[1, 2], [3]], "dtype": "bfloat16"}
    for name, corpus, decode in (
        (
            "graders.request",
            packed(["compare", 2.5, b"x"], ["function", 3, None]),
            pipes.read_request,
        ),
        (
            "graders.payload",
            packed(["4", "4"], ["x+1", "\\frac{1}{2}"]),
            functools.partial(pipes.read_payload, "compare"),
        ),
        (
            "graders.reply",
            packed(
                ["ready", None, 9], ["done", "wrong", 9], ["crash", "x", 0], ["part", b"x", True]
            ),
            pipes.read_reply,
        ),
        (
            "graders.control",
            packed(
                ["spawn", 1], ["ready", 5, ["no network"]], ["exited", 1, 5, -9], ["failed", "x"]
            ),
            pipes.read_control,
        ),
        (
            "ranks.order",
            packed(train, score, {"do": "stop"}, {"do": "save", "folder": "x"}),
            orders.read_order,
        ),
    ):
        yield Decoder(name=name, corpus=corpus, decode=decode, mutate=mutated_msgpack)
    yield from from_environments()
    yield from from_sandboxes()


def from_environments() -> Iterable[Decoder]:
    """What environment servers, their clients and the processes of episodes say."""
    run = {
        "task_data": {"environment": "e", "row": {"prompt": [{"role": "user"}], "n": [1, None]}},
        "client": {"type": "train", "base_url": "http://h:1/sessions/k/v1", "api_key": "k"},
        "model": "tandem",
        "limits": {"turns": 2, "calls": 3, "observation_tokens": 100},
        "sampling": {"temperature": 1.0},
    }
    opened = {"trace": "t", "open": {"id": "t"}, "nodes": [{"token_ids": [1]}], "calls": [{}]}
    said = {
        "rewards": {"r": {"score": 0.5, "weight": 2.0}, "none": None},
        "metrics": {"m": 1.0, "n": None},
        "info": {"turn_rewards": [None, 0.5]},
        "ok": True,
        "stop_condition": "done",
        "is_timeout": False,
        "timing": {"agent": {"start": 1.0, "end": 2.0, "model": {"duration": 0.5}}},
    }
    end = {"trace": "t", "errors": [], "set": said}
    error = {"type": "env_reset", "message": "x"}
    head = {"id": "e", "ok": True, "is_timeout": False, "errors": []}
    reply = {"success": True, "error": None, "head": head}
    counted = {**reply, "traces": [{"id": "t", "nodes": 1, "calls": 1}]}
    failed = {**counted, "head": {**head, "ok": False, "errors": [error]}}

    def read_episode(data: bytes) -> environments.Played:
        try:
            maps = msgpack.unpackb(data, strict_map_key=False)
            deltas, last = maps[:-1], maps[-1]
            packed_again = [msgpack.packb(one) for one in deltas]
            final = msgpack.packb(last)
        except Exception as unreadable:
            # It was never three maps: a frame that no reader gets to see.
            raise WireError("refused frames of an episode: they are no maps") from unreadable
        return environments.result_of(packed_again, final)

    def check_episode(found: environments.Played) -> str:
        numbers = [found.reward, *found.turn_rewards, *found.metrics.values(), found.seconds]
        if not all(math.isfinite(one) for one in numbers if one is not None):
            return f"it has a number that isn't finite: {found!r:.300}"
        if found.failure is not None and found.reward is not None:
            return "it has failed, and has a reward"
        return "" if len(found.detail) <= 500 else "its words are too long"

    def check_said(found: Any) -> str:
        if not isinstance(found, episode_pipes.Done):
            return ""
        numbers = [found.reward, *found.turn_rewards, *found.metrics.values()]
        fine = all(math.isfinite(one) for one in numbers if one is not None)
        return "" if fine else f"it has a number that isn't finite: {found!r:.300}"

    yield Decoder(
        name="environments.request",
        corpus=packed(run, {**run, "sampling": {}}),
        decode=lambda data: requests.read_request([b"1", b"run", data]),
        mutate=mutated_msgpack,
    )
    yield Decoder(
        name="environments.id",
        corpus=[b"0123456789abcdef0123456789abcdef"],
        decode=requests.read_id,
        mutate=lambda data, _, c: flipped(data, c) if c.random() < 0.8 else data * c.randrange(4),
        check=lambda found: "" if 0 < len(found) <= 64 else f"it is {found!r}",
    )
    yield Decoder(
        name="environments.episode",
        corpus=packed([opened, end, counted], [opened, end, failed], [reply]),
        decode=read_episode,
        mutate=mutated_msgpack,
        check=check_episode,
    )
    yield Decoder(
        name="environments.delta",
        corpus=packed(opened, end, {"trace": "t", "discard": True}),
        decode=environments.read_delta,
        mutate=mutated_msgpack,
    )
    yield Decoder(
        name="environments.process",
        corpus=packed(
            ["ready", "not every user may read /root/.env"],
            ["doing", "model"],
            ["done", 1.0, [None, 0.5], {"m": 1.0}, "done"],
            ["raised", "ValueError: x"],
        ),
        decode=read_said,
        mutate=mutated_msgpack,
        check=check_said,
    )
    yield Decoder(
        name="environments.member",
        corpus=text(
            {
                "endpoint": "tcp://127.0.0.1:5000",
                "public_key": "E" * 40,
                "environments": ["a"],
                "slots": 4,
                "busy": 1,
            }
        ),
        decode=lambda data: address_of(
            Member(
                member="environments-0",
                role="environments",
                info=plain.read_object(data, "an entry", WireError),
                age=0.0,
            )
        ),
        mutate=mutated_json,
    )


def from_sandboxes() -> Iterable[Decoder]:
    """What a program reports, which may be anything: it is the wanted value or it isn't."""
    wanted = {1: (2.5, None), b"a": [True, 1j], "x": {3}}
    asked = expected(f"assert f() == {wanted!r}")
    assert asked is not None
    items = [
        [1, ["tuple", ["float", "2.5"], None]],
        [["bytes", "61"], ["list", True, ["complex", "0.0", "1.0"]]],
        ["x", ["set", 3]],
    ]
    fractions = [["fraction", 1, 2], ["dict", [["tuple", 1], ["list"]]]]
    for name, corpus, decode in (
        ("sandbox.result", text([1, {"a": None}], 4, True), lambda d: same_result(d, "[4]")),
        ("sandbox.value", text(["dict", *items], *fractions), lambda d: same_value(d, asked)),
    ):
        yield Decoder(
            name=name,
            corpus=corpus,
            decode=decode,
            mutate=mutated_json,
            check=lambda found: "" if isinstance(found, bool) else f"it is {found!r}",
        )
