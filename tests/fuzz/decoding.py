"""Hands mutated frames to a decoder, in a process of its own that may not take long or grow."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import random
import resource
import signal
import time
import tracemalloc
from typing import Any

from decoder import Decoder
from tally import MOST_BREACHES, Tally

from tandem.common.errors import TandemError

CALL_SECONDS = 5.0
"""One frame may take so long, on a busy machine."""
ROOM_BYTES = 1 << 30
"""Address space beyond what the process has when it starts."""
SMALL_BYTES = 4 << 20
"""Any frame may take so much memory, and :data:`PER_BYTE` times its length."""
PER_BYTE = 200
MEASURED = 20
"""Memory is measured for one frame in so many."""


class TookTooLong(BaseException):
    """No decoder catches it."""


def fuzz_decoder(decoder: Decoder, count: int, seed: int) -> Tally:
    """So many mutated frames; every frame of the corpus itself must be read first."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(decoder, count, seed, theirs), daemon=True)
    child.start()
    theirs.close()
    tally = Tally(name=decoder.name)
    try:
        while True:
            # Something comes at least once a thousand frames; a loop in C is ended from here.
            if not ours.poll(60 + 2 * CALL_SECONDS):
                tally.breaches.append("it hangs in a call that can't be interrupted")
                child.kill()
                break
            told = ours.recv()
            if isinstance(told, Tally):
                tally = told
                break
    except EOFError:
        child.join(5)
        tally.breaches.append(f"its process ended with status {child.exitcode}")
    child.join(5)
    ours.close()
    return tally


def _work(decoder: Decoder, count: int, seed: int, results: Any) -> None:
    # What a decoder warns of would be a hundred thousand lines.
    logging.disable(logging.CRITICAL)
    if decoder.imports:
        importlib.import_module(decoder.imports)
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, size + ROOM_BYTES))
    signal.signal(signal.SIGALRM, _too_long)
    tally = Tally(name=decoder.name)
    begun = time.monotonic()
    for frame in decoder.corpus:
        valid = Tally(name=decoder.name)
        problem = one_case(decoder, frame, valid)
        if problem or valid.errors:
            problem = problem or f"it is refused with {', '.join(valid.errors)}"
            tally.breaches.append(f"a valid frame: {problem:.300} <- {frame!r:.300}")
    chance = random.Random(f"{seed}/{decoder.name}")
    while tally.cases < count and len(tally.breaches) < MOST_BREACHES:
        frame = decoder.mutate(chance.choice(decoder.corpus), decoder.corpus, chance)
        problem = one_case(decoder, frame, tally)
        if problem:
            tally.breaches.append(f"{problem:.400} <- {frame!r:.600}")
        if tally.cases % 1000 == 0:
            results.send(tally.cases)
    tally.seconds = time.monotonic() - begun
    results.send(tally)
    results.close()


def one_case(decoder: Decoder, frame: bytes, tally: Tally) -> str:
    """Counts one frame; returns what is wrong, or nothing."""
    tally.cases += 1
    measured = tally.cases % MEASURED == 0
    if measured:
        tracemalloc.start()
    signal.setitimer(signal.ITIMER_REAL, CALL_SECONDS)
    problem = ""
    try:
        try:
            record = decoder.decode(frame)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        tally.fine += 1
        problem = decoder.check(record)
    except TandemError as error:
        tally.errors[type(error).__name__] += 1
        if len(str(error)) < 10:
            problem = f"an error that says nothing: {error!r}"
    except TookTooLong:
        problem = f"it took longer than {CALL_SECONDS:.0f} s"
    except Exception as error:  # noqa: BLE001 - that it isn't the project's own is the finding
        problem = f"{type(error).__module__}.{type(error).__name__}: {error}"
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > SMALL_BYTES + PER_BYTE * len(frame):
            problem = problem or f"{peak:,} bytes of memory for a frame of {len(frame):,}"
    return problem


def _too_long(*_: object) -> None:
    raise TookTooLong
