"""Sends mutated calls to the ledger's scripts and looks at the whole ledger after each."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import calls
import redis
from tally import MOST_BREACHES, Tally
from worlds import OTHERS, SETTINGS, Builder, World

from tandem.replay.connection import Store, script_digest, script_names, script_source

INVARIANTS = Path(__file__).with_name("invariants.lua").read_text(encoding="utf-8")
EPISODE = 48
"""Calls on one ledger before it is put back."""
NAMED = ("REFUSED", "FENCED")


class Watch:
    """What the last look at the ledger said, and what the next one may."""

    def __init__(self) -> None:
        self.last: list[Any] | None = None

    def judge(self, script: str | None, before_reply: Any, look: Any) -> list[str]:
        """Breaches of one call: its reply and the look after it."""
        if isinstance(look, Exception):
            return [f"the look failed: {look}"]
        refused = isinstance(before_reply, Exception)
        if look == 0:
            return []
        found = [look[0].decode("utf-8", "replace")] if look[0] else []
        if refused:
            found.append("the call was refused and something was written")
        last, self.last = self.last, look
        if last is None or script is None or not last[1] + last[6] + look[1] + look[6]:
            return found
        for at, name in ((2, "term"), (3, "J"), (4, "trimmed"), (5, "cursor")):
            if look[at] < last[at]:
                found.append(f"{name} sank from {last[at]} to {look[at]}")
        old, new = last[1].decode(), look[1].decode()
        allowed = calls.MOVES.get(script, set())
        for serial, letter in enumerate(new):
            was = old[serial] if serial < len(old) else "?"
            if was != letter and was + letter not in allowed:
                found.append(f"{script} moved group {serial} from {was} to {letter}")
        was_rows, rows = _rows(last[6]), _rows(look[6])
        for step in was_rows.keys() & rows.keys():
            if was_rows[step] != rows[step]:
                found.append(f"row {step.decode()} was written anew")
        if rows.keys() - was_rows.keys() and script not in ("take", "reassert"):
            found.append(f"{script} wrote a row")
        return found


def _rows(text: bytes) -> dict[bytes, bytes]:
    return {step: row for step, _, row in (line.partition(b" ") for line in text.split(b"\n"))}


class ScriptFuzz:
    """One server, its worlds, and a stream of calls from one seed."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.seed = seed
        self.builder = Builder(store, seed)
        self.builder.build()
        self.look = store.redis.script_load(INVARIANTS)
        self.full = list(SETTINGS)
        for name in script_names():
            store.redis.execute_command("EVAL", script_source(name), 0)

    def run(self, script: str, count: int, changed: str | None = None) -> Tally:
        """So many calls of a script.

        Args:
            script: its name.
            count: how many.
            changed: another text in the script's place, for planted breaches.
        """
        digest = script_digest(script)
        if changed is not None:
            digest = self.store.redis.script_load(changed)
        tally = Tally(name=script)
        chance = random.Random(f"{self.seed}/{script}")
        begun = time.monotonic()
        while tally.cases < count and len(tally.breaches) < MOST_BREACHES:
            self._episode(script, digest, min(EPISODE, count - tally.cases), chance, tally)
        tally.seconds = time.monotonic() - begun
        return tally

    def _episode(
        self, script: str, digest: str, count: int, chance: random.Random, tally: Tally
    ) -> None:
        name = chance.choice(self.full * 3 + list(OTHERS))
        world = self.builder.worlds[name]
        out_of_memory = chance.random() < 0.05
        pipe = self.store.redis.pipeline(transaction=False)
        sent: list[tuple[str | None, list[Any]]] = []
        prefix = self.store.key("")

        def look(repaired: bool, again: bool = False) -> None:
            pipe.execute_command(
                "EVALSHA", self.look, 1, prefix, "again" if again else "", *["repaired"] * repaired
            )

        leases = chance.choice(("alive", "alive", "alive", "half", "expired"))
        self.builder.put(name, leases, chance.choice(("heard", "heard", "silent")))
        look(False, again=True)
        if out_of_memory:
            pipe.execute_command("CONFIG", "SET", "maxmemory", 1)
        repaired = False
        request = 0
        for _ in range(count):
            if chance.random() < 0.1:  # another script moves the ledger on
                other = chance.choice(script_names())
                made = list(calls.LIKELY[other](world, chance))
                request += 1
                repaired = repaired or other == "reassert"
                sent.append((other, made))
                pipe.execute_command(
                    "EVALSHA", script_digest(other), 1, prefix, "mover", request, *made
                )
                look(repaired)
            repaired = repaired or script == "reassert"
            command = self._command(script, digest, world, chance)
            sent.append((None, command))
            pipe.execute_command(*command)
            look(repaired)
        if out_of_memory:
            pipe.execute_command("CONFIG", "SET", "maxmemory", 0)
        replies = pipe.execute(raise_on_error=False)
        replies = [r for r in replies if r is not True and r != b"OK"]
        self._judge(script, replies, sent, tally, out_of_memory)

    def _command(self, script: str, digest: str, world: World, chance: random.Random) -> list[Any]:
        args: list[Any] = list(calls.LIKELY[script](world, chance))
        keys: list[Any] = [self.store.key("")]
        caller: Any = "fuzz"
        request: Any = chance.randrange(1, 10**6)
        if chance.random() < 0.65:
            args = calls.mutated(args, chance)
        if chance.random() < 0.05:
            request = chance.choice((1, 2, 3, *calls.NASTY))
        if chance.random() < 0.02:
            caller = chance.choice(calls.NASTY)
        if chance.random() < 0.03:
            keys = chance.choice(
                ([], keys * 2, ["", *keys], ["tandem:other:"], [chance.choice(calls.NASTY)])
            )
        head = [caller, request]
        if chance.random() < 0.01:
            head, args = head[: chance.randrange(2)], []
        return ["EVALSHA", digest, len(keys), *keys, *head, *args]

    def _judge(
        self,
        script: str,
        replies: Sequence[Any],
        sent: list[tuple[str | None, list[Any]]],
        tally: Tally,
        out_of_memory: bool,
    ) -> None:
        watch = Watch()
        found = watch.judge(None, None, replies[0])
        for line in found:
            tally.breaches.append(f"before any call: {line}")
        for (other, command), reply, look in zip(sent, replies[1::2], replies[2::2], strict=True):
            found = watch.judge(other or script, reply, look)
            found += self._reply(other or script, reply, out_of_memory)
            if other is None:
                tally.cases += 1
                if isinstance(reply, Exception):
                    tally.errors[_word(reply)] += 1
                else:
                    tally.fine += 1
                    tally.changed += look != 0
            if found:
                tally.breaches.append(
                    f"{'; '.join(found)[:600]} <- {command!r:.600} -> {reply!r:.300}"
                )
                return  # what follows stands on a broken ledger

    def _reply(self, script: str, reply: Any, out_of_memory: bool) -> list[str]:
        if isinstance(reply, redis.ResponseError):
            word = _word(reply)
            if word in NAMED or (word == "OOM" and out_of_memory):
                return []
            return ["an error without a name"]
        if reply == b"loaded":
            return []
        try:
            legal = calls.LEGAL[script](reply)
        except (ValueError, TypeError):
            legal = False
        return [] if legal else ["no answer of this script"]


def _word(error: Exception) -> str:
    text = str(error)
    return (
        "OOM"
        if ": -OOM " in text or isinstance(error, redis.OutOfMemoryError)
        else text.split(" ")[0]
    )
