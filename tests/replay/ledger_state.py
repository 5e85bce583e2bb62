"""What the model is compared with: the state in Redis, a clock that tests set, calls overheard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
from ledger_model import LedgerModel, Live

from tandem.replay import connection
from tandem.replay.connection import Command, Store
from tandem.replay.ledger import REJECTIONS

CLOCK = """local t = redis.call('time')
  return t[1] * 1000 + math.floor(t[2] / 1000)"""


@contextmanager
def with_clock(change: Callable[[str, str], str] | None = None) -> Iterator[None]:
    """The scripts read the key ``clock`` for the time; ``change(name, text)`` changes them more."""
    real = connection.script_source

    def changed(name: str) -> str:
        text = real(name)
        assert text.count(CLOCK) == 1, "prelude.lua tells the time in another way than it did"
        text = text.replace(CLOCK, "return tonumber(redis.call('get', key('clock')))")
        return text if change is None else change(name, text)

    connection.script_source = changed  # type: ignore[assignment]
    connection.script_digest.cache_clear()
    try:
        yield
    finally:
        connection.script_source = real
        connection.script_digest.cache_clear()


class Recording(Store):
    """A store that tells of each call of a script, of a batch the last, with its answer."""

    def __init__(self, tell: Callable[[str, Command, Any], None], *args: Any) -> None:
        super().__init__(*args)
        self._tell = tell
        self._made: list[tuple[str, Command]] = []

    def command(self, name: str, *args: Any) -> Command:
        made = super().command(name, *args)
        self._made.append((name, made))
        return made

    def script(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._made.clear()
        answer = super().script(name, *args, **kwargs)
        self._tell(*self._made[-1], answer)
        return answer

    def batch(self, commands: Any, **kwargs: Any) -> list[Any]:
        answers = super().batch(commands, **kwargs)
        if commands and self._made and self._made[-1][1] is commands[-1]:
            self._tell(*self._made[-1], answers[-1])
        self._made.clear()
        return answers


STATE = """
local found = {}
for _, name in ipairs(redis.call('keys', KEYS[1] .. '*')) do
  local kind, short = redis.call('type', name).ok, string.sub(name, #KEYS[1] + 1)
  if string.sub(short, 1, 8) == 'payload:' then
    found[short] = redis.call('ttl', name)
  elseif kind == 'string' then
    found[short] = redis.call('get', name)
  elseif kind == 'zset' then
    found[short] = redis.call('zrange', name, 0, -1, 'withscores')
  elseif string.sub(short, 1, 8) ~= 'answers:' then
    found[short] = redis.call('hgetall', name)
  end
end
return cmsgpack.pack(found)
"""


def observe(store: Store) -> dict[str, Any]:
    """The whole state in Redis, in the model's terms."""
    raw = msgpack.unpackb(store.redis.execute_command("EVAL", STATE, 1, store.key("")), raw=True)
    found = {name.decode(): value for name, value in raw.items()}

    def pairs(name: str) -> dict[str, str]:
        value = [part.decode() for part in found.get(name, ())]
        return dict(zip(value[::2], value[1::2], strict=True))

    def of(kind: str) -> dict[str, str]:
        """Names of keys of one kind, and what follows the kind."""
        return {name: name[len(kind) :] for name in found if name.startswith(kind)}

    def scored(name: str) -> dict[int, float]:
        return {int(member): float(score) for member, score in pairs(name).items()}

    meta = pairs("meta")
    bitmaps = ("trained", *(f"rejected:{reason}" for reason in REJECTIONS))
    return {
        "meta": {name: meta.get(name, "") for name in ("state", "ended")}
        | {name: int(meta[name]) for name in ("term", "journalled", "cursor", "trimmed")}
        | {"left_out": int(meta.get("left_out", 0))},
        "leased": scored("leased"),
        "deadlines": scored("deadlines"),
        "returned": scored("returned"),
        "graded": scored("graded"),
        "ages": scored("ages"),
        "taken": scored("taken"),
        "groups": {int(serial): _group(pairs(name)) for name, serial in of("group:").items()},
        "final": {
            int(bucket) * 256 + int(place): _final(text)
            for name, bucket in of("final:").items()
            for place, text in pairs(name).items()
        },
        "bits": {name: _bits(found.get(name)) for name in bitmaps},
        "rows": {int(step): json.loads(text) for step, text in pairs("rows").items()},
        "quarantined": {int(step): text for step, text in pairs("quarantined").items()},
        "dead": {int(serial): _letter(json.loads(text)) for serial, text in pairs("dead").items()},
        "payloads": {_payload(rest): found[name] == -1 for name, rest in of("payload:").items()},
        "heard": int(found["heard"]) if "heard" in found else None,
    }


def _bits(value: bytes | None) -> set[int]:
    return {
        8 * i + bit
        for i, byte in enumerate(value or b"")
        for bit in range(8)
        if byte >> 7 - bit & 1
    }


def _group(fields: dict[str, str]) -> tuple[Any, ...]:
    names = ("attempt", "failures", "step", "leased_ms", "cap", "moved")
    numbers = (int(fields.get(n, 0)) for n in names)
    texts = (fields.get(n, "") for n in ("state", "worker", "holder", "released", "digest"))
    lists = (json.loads(fields.get(name, "[]")) for name in ("traces", "own_rows"))
    return (*numbers, *texts, *(int(fields.get(n, 0)) for n in ("bytes", "correct")), *lists)


def _final(text: str) -> tuple[str, int, int, str]:
    letter, step, attempt, *reason = text.split(":")
    return letter, int(step), int(attempt), "".join(reason)


def _letter(letter: dict[str, Any]) -> tuple[int, int, str]:
    return letter["attempt"], letter["failures"], letter["reason"]


def _payload(name: str) -> tuple[str, int, str]:
    group_id, attempt, digest = name.split(":")
    return group_id, int(attempt), digest


def expected(model: LedgerModel) -> dict[str, Any]:
    """What :func:`observe` should see."""

    def group(live: Live) -> tuple[Any, ...]:
        numbers = (
            live.attempt or 0,
            live.failures,
            live.held,
            live.leased_ms,
            live.cap,
            live.moved,
        )
        texts = (live.state, live.worker, live.holder, live.released, live.digest)
        lists = (list(live.traces), list(live.own_rows))
        return (*numbers, *texts, live.nbytes, live.correct, *lists)

    def places(groups: dict[int, Live]) -> dict[int, float]:
        return {serial: group.place for serial, group in groups.items()}

    graded = model.of("graded")
    ended = {reason: set[int]() for reason in REJECTIONS}
    for serial, (letter, _, _, reason) in model.final.items():
        if letter == "R":
            ended[reason].add(serial)
    return {
        "meta": {
            "state": model.state,
            "ended": model.ended or "",
            "term": model.term,
            "journalled": model.journalled,
            "cursor": model.cursor,
            "trimmed": model.trimmed,
            "left_out": model.left_out,
        },
        "leased": places(model.of("leased")),
        "deadlines": {s: g.deadline for s, g in model.of("leased").items()},
        "returned": places(model.of("admitted")),
        "graded": places(graded),
        "ages": {s: g.oldest for s, g in graded.items() if g.oldest is not None},
        "taken": dict(model.taken),
        "groups": {s: group(g) for s, g in model.live.items()},
        "final": dict(model.final),
        "bits": {
            "trained": {s for s, (letter, *_) in model.final.items() if letter == "D"},
            **{f"rejected:{reason}": serials for reason, serials in ended.items()},
        },
        "rows": dict(model.rows),
        "quarantined": dict(model.quarantined),
        "dead": dict(model.dead),
        "payloads": dict(model.payloads),
        "heard": model.heard,
    }
