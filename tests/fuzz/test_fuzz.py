"""A short portion of the fuzz; ``python tests/fuzz/run.py`` has the long one. And breaches that are
planted, for a search that can't find anything is no search."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import decoding
import msgspec
import pytest
from decoders import all_decoders
from decoding import fuzz_decoder
from examples import RECORDS
from file_decoders import Files
from msgspec import structs
from scripts import ScriptFuzz
from socket_decoders import of_wire

from tandem.common.errors import WireError
from tandem.common.records import Sample
from tandem.common.run_folder import JoinInfo
from tandem.replay.connection import connect, script_names, script_source

SEED = 1
FRAMES = 100
CALLS = 150


@pytest.fixture(scope="module")
def files() -> Iterator[Files]:
    """Where decoders of files find what they read."""
    with Files() as made:
        yield made


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory, servers: Any) -> Iterator[ScriptFuzz]:
    """A server with the worlds in it."""
    with servers.running(tmp_path_factory.mktemp("fuzz"), appendonly="no") as server:
        join: JoinInfo = server.join("fuzz")
        store = connect(join, name="fuzz")
        yield ScriptFuzz(store, SEED)
        store.close()


def test_every_decoder_refuses_mutated_frames_by_name(files: Files):
    tallies = [fuzz_decoder(decoder, FRAMES, SEED) for decoder in all_decoders(files)]
    assert [line for tally in tallies for line in tally.breaches] == []
    assert all(tally.cases == FRAMES for tally in tallies)


@pytest.mark.parametrize("script", script_names())
def test_a_mutated_call_is_refused_by_name_or_is_a_legal_transition(fuzz: ScriptFuzz, script: str):
    tally = fuzz.run(script, CALLS)
    assert tally.breaches == []
    assert tally.cases == CALLS
    assert tally.fine > 0, "its likely calls are no longer what the script takes"


def test_worlds_have_every_state(fuzz: ScriptFuzz):
    fuzz.builder.put("strict")
    redis = fuzz.store.redis
    look = redis.evalsha(fuzz.look, 1, fuzz.store.key(""), "again")
    assert look[0] == b""
    assert set(look[1].decode()) == set("LBGTDR")


# -- planted in scripts ---------------------------------------------------------------------------

PLANTED: list[tuple[str, str, str, str]] = [
    (
        "commit",
        "  if wrong then return wrong end\n  local samples",
        "  local samples",
        "an error without a name",
    ),
    ("take", "if wrong then return wrong end", "", "an error without a name"),
    ("commit", "redis.call('persist', payload)", "", "will expire"),
    ("commit", "many(serials, 'zrem', key('leased'))", "", "is in"),
    ("confirm", "redis.call('setbit', key('trained'), serial, 1)", "", "is not in trained"),
    (
        "give_back",
        "return 1",
        "return redis.error_reply('REFUSED for no reason')",
        "was refused and",
    ),
    ("lease", "steps_before - held > m.max_staleness", "false", "steps old"),
    ("lease", "'attempt', 1)", "'attempt', 'x')", "something was written"),
    ("new_term", "math.max(m.term, tonumber(ARGV[3])) + 1", "tonumber(ARGV[3])", "term sank"),
    ("quarantine", "'R:' .. step", "'D:' .. step", "moved group"),
    ("take", "redis.call('hset', key('meta'), 'journalled', step)", "", "is past J"),
    ("durable", "== 0 then", "== 0 or true then", "has no row"),
    ("waiting", "return cjson.encode(waited)", "return 'soon'", "no answer of this script"),
    ("beat", "even_when_full()", "redis.call('set', key('beaten'), 1)", "stray key"),
]


@pytest.mark.parametrize(("script", "old", "new", "said"), PLANTED)
def test_a_breach_that_is_planted_in_a_script_is_found(
    fuzz: ScriptFuzz, script: str, old: str, new: str, said: str
):
    prelude, name, body = script_source(script).partition(f"-- {script}:")
    assert old in body
    tally = fuzz.run(script, 6000, changed=prelude + name + body.replace(old, new))
    assert any(said in line for line in tally.breaches), tally


# -- planted in decoders --------------------------------------------------------------------------


def sample_decoder(decode: Any) -> Any:
    return dataclasses.replace(of_wire(RECORDS[3]), decode=decode)


def test_an_invariant_that_is_not_checked_is_found():
    unchecked = msgspec.defstruct(
        "Sample", [], bases=(Sample,), namespace={"__post_init__": lambda self: None}, eq=False
    )
    tally = fuzz_decoder(of_wire(unchecked(**structs.asdict(RECORDS[3]))), 20_000, SEED)
    assert any("differ in length" in line for line in tally.breaches)


def test_an_error_of_another_kind_is_found():
    def decode(data: bytes) -> Any:
        raise KeyError("tokens")

    tally = fuzz_decoder(sample_decoder(decode), 10, SEED)
    assert any("KeyError" in line for line in tally.breaches)


def test_a_decoder_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "CALL_SECONDS", 0.1)
    tally = fuzz_decoder(sample_decoder(lambda data: time.sleep(60)), 10, SEED)
    assert any("took longer" in line for line in tally.breaches)


def test_memory_that_a_small_frame_takes_is_found():
    def decode(data: bytes) -> Any:
        bytearray(30 << 20)
        raise WireError("refused all the same")

    tally = fuzz_decoder(sample_decoder(decode), 50, SEED)
    assert any("bytes of memory" in line for line in tally.breaches)


def test_a_process_that_dies_is_found():
    def decode(data: bytes) -> Any:
        raise SystemExit(3)

    tally = fuzz_decoder(sample_decoder(decode), 10, SEED)
    assert any("its process ended" in line for line in tally.breaches)
