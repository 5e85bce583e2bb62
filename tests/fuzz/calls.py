"""Calls of the ledger's scripts: likely ones, what becomes of them when they are mutated, and which
answers and transitions are legal."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from worlds import World, row_text

Arg = str | int | float | bytes
Args = list[Arg]

HOLDERS = ("rollout-0@x", "rollout-1@x", "rollout-9@x", "")
NASTY: tuple[Arg, ...] = (
    "", " ", "0", "-0", "-1", "1", "00", "01", "+1", " 1", "1 ", "1.0", "1.5", "0.1", "1e0", "1e3",
    "0x10", "nan", "-nan", "NaN", "inf", "-inf", "infinity", "(1", "[1", "+inf", "9007199254740993",
    "9007199254740992", "99999999999999", "100000000000000", "4294967295", "4294967296", "1e308",
    "1e999", "-1e308", "1e-400", "2147483648", "-2147483649", "18446744073709551616", "9" * 400,
    "abc", "true", "nil", "null", "[]", "{}", "[", "{", '"', '""', "[[]]", "[1]", '["a"]', "[null]",
    '{"a":1}', '{"a":1,"a":2}', '{"1":"x"}', "[" * 2000, "[" * 500 + "]" * 500, '{"a":' * 999 + "1",
    '[1e999]', '["\\ud800"]', '["\\u0000"]', b"\x00", b"1\x00", b"\xff\xfe", b"\xc3\x28", b"\x80",
    "é", "字", "a\r\nb", "\r\n-ERR x", "%s%d%n", "%", "^", "%z", "*", "?", ":", "0-0", "1-1", "0-99",
    "99-1", "-1-0", "0-0-0", "0:1", "running", "finished", "rejected", "T:1:1", "../..", "x" * 300,
    "x" * 70000, "meta", "leased", "taken", "tandem:other:", "wait", "drop", "1" * 20,
)  # fmt: skip


def _serial(w: World, c: random.Random) -> int:
    return c.choice((c.randrange(0, w.cursor + 3), c.randrange(0, w.cursor + 3), w.cursor, 10**6))


def _step(w: World, c: random.Random) -> int:
    return max(0, w.journalled + c.choice((-4, -3, -2, -1, 0, 0, 0, 1, 1, 1, 1, 2, 5)))


def _term(w: World, c: random.Random) -> int:
    return w.term if c.random() < 0.85 else max(0, w.term + c.choice((-1, 1, 5)))


def _group_id(w: World, serial: int) -> str:
    return f"{serial // w.length}-{serial % w.length}"


def _lease(w: World, c: random.Random) -> tuple[int, int, str]:
    if w.leases and c.random() < 0.7:
        serial, attempt, holder = c.choice(w.leases)
        return serial, attempt + c.choice((0, 0, 0, 0, 1, -1)), holder
    return _serial(w, c), c.randrange(0, 4), c.choice(HOLDERS)


def _dead(w: World, c: random.Random) -> int:
    return c.choice(w.dead) if w.dead and c.random() < 0.6 else _serial(w, c)


def _payload(w: World, c: random.Random) -> tuple[int, int, str]:
    some = w.unclaimed + w.unclaimed + w.payloads
    if some and c.random() < 0.8:
        return c.choice(some)
    return _serial(w, c), c.randrange(0, 4), f"{c.getrandbits(64):016x}"


def _commit(w: World, c: random.Random) -> Args:
    return [one for _ in range(c.choice((1, 1, 2, 3))) for one in _committed(w, c)]


def _committed(w: World, c: random.Random) -> Args:
    serial, attempt, digest = _payload(w, c)
    samples = c.choice((0, 1, 2, 8))
    verdicts = c.choice((samples, samples, samples, min(samples, 1)))
    least = c.choice(("", "0.0", "-1.5", "1e-05", "1.0"))
    return [
        serial,
        attempt,
        digest,
        c.choice((700, 1, 0)),
        c.choice(("", 0, max(0, w.journalled - 1), w.journalled, w.journalled)),
        samples,
        least,
        least,
        c.choice(("", "0.0", "-3.0", "8.0")),
        c.choice(("[]", '["a/0#0"]', '["a/0#0", "b/1#1"]')),
        c.choice((0, 0, 0, min(1, verdicts), verdicts)),
        json.dumps(list(range(samples - verdicts, samples))),
        c.choice((b"", b"p")),
    ]


def _rows(w: World, c: random.Random) -> list[str]:
    """Rows as a journal may have them: Redis's own, and ones that follow."""
    rows = list(w.rows[c.randrange(0, len(w.rows)) :]) if w.rows and c.random() < 0.6 else []
    step, serial = w.journalled, max(0, w.cursor - c.randrange(0, 9))
    for _ in range(c.randrange(0, 3)):
        step += 1 if c.random() < 0.95 else 2
        groups = []
        for _ in range(w.size if c.random() < 0.9 else c.randrange(0, 5)):
            groups.append(_entry(w, serial, c))
            serial += c.choice((1, 1, 1, 2, 3, 0)) if c.random() < 0.9 else c.randrange(-5, 400)
        rows.append(row_text(step, groups, short=len(groups) < w.size))
    if c.random() < 0.3:
        rows = [_bent(row, c) for row in rows]
    return rows


def _entry(w: World, serial: int, c: random.Random) -> dict[str, Any]:
    known = [p for p in w.payloads if p[0] == serial]
    attempt, digest = known[0][1:] if known and c.random() < 0.8 else (1, f"{c.getrandbits(64):x}")
    return {
        "id": _group_id(w, max(0, serial)),
        "attempt": attempt,
        "digest": digest,
        "bytes": 700,
        "traces": [],
        **({"replaced": [0, 2]} if c.random() < 0.2 else {}),
    }


ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 2**53 + 1, "", "x", "1",
    [], {}, [None], [1], ["a"], {"a": 1}, "0-99", "é", "\x00", "x" * 400, [[]], 10**25,
)  # fmt: skip


def _bent(text: str, c: random.Random) -> str:
    """JSON with one value changed, anywhere in it."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(bent(content, c))


def bent(content: Any, c: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """Plain data with a value, a key or a length changed somewhere."""

    def strange() -> Any:
        return copy.deepcopy(c.choice(odd))  # it may be bent in its turn

    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items: Any = ()
        if isinstance(node, dict):
            items = list(node.items())
        elif isinstance(node, list):
            items = list(enumerate(node))
        for at, value in items:
            places.append((node, at))
            walk(value)

    walk(content)
    if not places:
        return strange()
    node, at = c.choice(places)
    what = c.random()
    if what < 0.6:
        node[at] = strange()
    elif what < 0.75:
        del node[at]
    elif isinstance(node, dict):
        if what < 0.9:
            node[c.choice(("extra", "", "1", "step", "id"))] = strange()
        else:
            node[str(at) + "x"] = node.pop(at)
    else:
        node.insert(c.randrange(len(node) + 1), node[at] if what < 0.9 else strange())
    return content


def _create(w: World, c: random.Random) -> Args:
    changeable = dict(w.changeable)
    if c.random() < 0.3:
        changeable["steps" if changeable["steps"] != "0" else "lease_ms"] = str(c.randrange(1, 40))
    frozen = json.dumps(w.frozen)
    if c.random() < 0.3:
        frozen = _bent(frozen, c)
    other = json.dumps(changeable)
    return [frozen, _bent(other, c) if c.random() < 0.3 else other]


def _object(w: World, c: random.Random) -> str:
    return json.dumps({"role": "rollout", "info": {"term": w.term, "x": c.random()}})


EVALUATIONS = tuple(f"heldout@{n}" for n in range(6))
MEMBERS = ("learner", "rollout-0", "rollout-1", "rollout-9")

LIKELY: dict[str, Callable[[World, random.Random], Args]] = {
    "append": lambda w, c: [c.choice(("restarts", "things")), _object(w, c), c.choice((1, 3, 10000))],
    "beat": lambda w, c: [c.choice(MEMBERS), _object(w, c)],
    "claim_evaluation": lambda w, c: [c.choice(MEMBERS), _step(w, c), c.choice((0, 1, 120000))],
    "commit": _commit,
    "confirm": lambda w, c: [_step(w, c), _term(w, c)],
    "create": _create,
    "durable": lambda w, c: [_step(w, c), _term(w, c), c.choice((1, 2, 2000))],
    "end": lambda w, c: [c.choice(("done", "", "é")), _term(w, c)],
    "finish_evaluation": lambda w, c: [c.choice(EVALUATIONS), _object(w, c)],
    "give_back": lambda w, c: [
        *(lambda found: (found[2], found[0], found[1]))(_lease(w, c)),
        c.choice(("drained", "broke: é")),
        c.choice((0, 1)),
    ],
    "give_back_evaluation": lambda w, c: [
        c.choice(EVALUATIONS), c.choice(MEMBERS[1:3]), c.choice(("drained", "broke: é")),
        c.choice((0, 1)), c.choice((1, 2, 5)), c.choice((0, 2000)),
    ],
    "lease": lambda w, c: [
        c.choice(MEMBERS),
        c.choice(HOLDERS[:3]),
        _term(w, c),
        _step(w, c),
        c.choice((0, 1, 2, 5, 50)),
        c.choice((0, 100, 1000)),
        c.choice((0, 0, 0, 1000)),
    ],
    "leave": lambda w, c: [c.choice(MEMBERS)],
    "live": lambda w, c: [c.choice((0, 1000, 10000))],
    "new_term": lambda w, c: [_term(w, c)],
    "put": lambda w, c: c.choice((
        ["reports", _object(w, c), c.choice(MEMBERS)], ["config", "run: {}", ""], ["meeting", _object(w, c), ""],
        ["callback_served", str(_step(w, c)), ""],
    )),
    "quarantine": lambda w, c: [
        _step(w, c), _term(w, c), c.choice(("loss isn't finite", "é", "")), _step(w, c),
    ],
    "reassert": lambda w, c: [_term(w, c), *_rows(w, c)],
    "reclaim": lambda w, c: [c.choice(MEMBERS), c.choice((*HOLDERS, _lease(w, c)[2]))],
    "renew": lambda w, c: [_lease(w, c)[2], *(_lease(w, c)[0] for _ in range(c.randrange(5)))],
    "renew_evaluation": lambda w, c: [
        c.choice(EVALUATIONS), c.choice(MEMBERS[1:3]), c.choice((0, 1000, 120000)),
    ],
    "request_evaluation": lambda w, c: [c.choice(EVALUATIONS), _step(w, c), _object(w, c), _term(w, c)],
    "retry": lambda w, c: [_dead(w, c) for _ in range(c.randrange(1, 4))],
    "server_started": lambda w, c: [],
    "set_state": lambda w, c: [c.choice(("running", "running", "draining", "finished", "failed"))],
    "take": lambda w, c: [
        w.journalled + c.choice((1, 1, 2, 2)) if c.random() < 0.7 else _step(w, c),
        _term(w, c),
    ],
    "waiting": lambda w, c: [],
}  # fmt: skip
"""A call's arguments after the request number, such as a process might send, of each script."""


def mutated(args: Args, c: random.Random) -> Args:
    """The same call with something wrong in it."""
    args = list(args)
    for _ in range(c.choice((1, 1, 1, 2, 3))):
        what = c.random()
        if what < 0.08 and args:
            del args[c.randrange(len(args))]
        elif what < 0.16:
            args.insert(c.randrange(len(args) + 1), c.choice(NASTY))
        elif what < 0.2 and len(args) > 1:
            one, two = c.sample(range(len(args)), 2)
            args[one], args[two] = args[two], args[one]
        elif what < 0.24 and args:
            args = args * 2
        elif args:
            at = c.randrange(len(args))
            args[at] = _mutated_value(args[at], c)
    return args


def _mutated_value(value: Arg, c: random.Random) -> Arg:
    what = c.random()
    if what < 0.5:
        return c.choice(NASTY)
    text = value if isinstance(value, bytes) else str(value).encode()
    if what < 0.6 and text[:1] in (b"{", b"["):
        return _bent(text.decode("utf-8", "replace"), c)
    if what < 0.7 and isinstance(value, int):
        return value + c.choice((-1, 1, 2, 10, 256, 2**16, 2**31, 2**32, 2**53, -(2**31)))
    if what < 0.75:
        return text * c.choice((0, 2, 3))
    raw = bytearray(text)
    for _ in range(c.randrange(1, 4)):
        if raw and c.random() < 0.6:
            raw[c.randrange(len(raw))] ^= 1 << c.randrange(8)
        elif raw and c.random() < 0.5:
            del raw[c.randrange(len(raw))]
        else:
            raw.insert(c.randrange(len(raw) + 1), c.randrange(256))
    return bytes(raw)


# -- what may come back ---------------------------------------------------------------------------


def _count(reply: Any) -> bool:
    return type(reply) is int and reply >= 0


def _bit(reply: Any) -> bool:
    return reply in (0, 1)


def _serials(reply: Any) -> bool:
    return isinstance(reply, list) and all(one.isdigit() for one in reply)


def _json_with(*names: str) -> Callable[[Any], bool]:
    def fits(reply: Any) -> bool:
        if not isinstance(reply, bytes):
            return False
        content = json.loads(reply)
        return isinstance(content, dict) and any(name in content for name in names)

    return fits


def _words(reply: Any) -> bool:
    legal = {"committed", "duplicate", "superseded", "rejected", "resend"}
    words = json.loads(reply)["words"] if _json_with("words")(reply) else []
    return bool(words) and {word.split(" ")[0] for word in words} <= legal


def _live(reply: Any) -> bool:
    return isinstance(reply, list) and len(reply) % 3 == 0


LEGAL: dict[str, Callable[[Any], bool]] = {
    "append": lambda r: r == 1,
    "beat": lambda r: r == 1,
    "claim_evaluation": lambda r: r is None or isinstance(json.loads(r), dict),
    "commit": _words,
    "confirm": _count,
    "create": _json_with("created"),
    "durable": _count,
    "end": _count,
    "finish_evaluation": _bit,
    "give_back": _bit,
    "give_back_evaluation": lambda r: r in (0, 1, 2),
    "lease": _json_with("leases"),
    "leave": lambda r: r == 1,
    "live": _live,
    "new_term": lambda r: _count(r) and r > 0,
    "put": lambda r: r == 1,
    "quarantine": _count,
    "reassert": _count,
    "reclaim": _serials,
    "renew": _serials,
    "renew_evaluation": _bit,
    "request_evaluation": _bit,
    "retry": _json_with("back", "over"),
    "server_started": _bit,
    "set_state": lambda r: r == 1,
    "take": _json_with("row", "waiting", "ended"),
    "waiting": _json_with("group_id"),
}
"""Whether an answer is one that the script gives."""

RELEASED = {"LB", "LR"}
MOVES: dict[str, set[str]] = {
    "lease": {"BL", "?L", *RELEASED},
    "commit": {"LG", "BG", "LR", "BR"},
    "take": {"GT", "GR", *RELEASED},
    "confirm": {"TD"},
    "quarantine": {"TR", "DR"},
    "end": {"LR", "BR", "GR"},
    "give_back": RELEASED,
    "reclaim": RELEASED,
    "renew": RELEASED,
    "retry": {"RB"},
    "reassert": {"LT", "BT", "GT", "RT", "?T", "?B"},
}
"""Moves of a group that each script may make, by the letters of ``invariants.lua``; ``?``: beyond
the cursor."""
