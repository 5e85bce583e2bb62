"""A runner: tries one program against its tests, each test in a sandbox of its own.

It runs in a process of its own kind (:mod:`tandem.reward.zygote`) and never runs the program
itself. A test is passed when the harness in the box has got to its end and gives back the secret
that it was handed: a program that merely exits well has passed nothing.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from . import sandbox
from .sandbox import Limits, Ran

HARNESS = """
def harness():
    import json, os
    program, kind, *rest = json.loads(os.fdopen(4, "rb").read())
    secret = rest.pop()
    out = os.dup(3)
    os.close(3)
    space = {"__name__": "__main__" if kind == "io" else "program"}
    exec(compile(program, "program.py", "exec"), space)
    if kind == "assert":
        exec(compile(rest[0], "test.py", "exec"), space)
    elif kind == "call":
        name, arguments, wanted = rest
        found = space.get(name)
        if found is None:
            found = getattr(space["Solution"](), name)
        arguments = json.loads(arguments)
        found = found(*(arguments if isinstance(arguments, list) else [arguments]))
        found = json.loads(json.dumps(found))
        wanted = json.loads(wanted)
        # Data sets write a single result as a list of one, too.
        if isinstance(wanted, list) and len(wanted) == 1 and not isinstance(found, list):
            wanted = wanted[0]
        assert found == wanted and isinstance(found, bool) is isinstance(wanted, bool)
    os.write(out, secret.encode())
harness()
"""


class Runner:
    """Runs programs in the first sandbox that works here.

    Raises:
        ConfigError: none does.
    """

    def __init__(self, wanted: str) -> None:
        self.box = sandbox.find(wanted)
        """The sandbox."""

    def run(
        self,
        program: str,
        tests: Sequence[Sequence[str]],
        seconds: float,
        total_seconds: float,
        memory_mb: int,
        stop: bool,
    ) -> tuple[int, int, int]:
        """(tests passed, tests, tests that ran out of time).

        Args:
            program: Python source.
            tests: as :func:`tandem.reward.code.read_tests` gives them.
            seconds: of one test.
            total_seconds: of all; those that are left then count as failed.
            memory_mb: address space of the program.
            stop: at the first test that fails.
        """
        end = time.monotonic() + total_seconds
        passed = timed_out = 0
        for test in tests:
            left = end - time.monotonic()
            if left <= 0:
                timed_out += 1
                break
            limits = Limits(seconds=min(seconds, left), memory_mb=memory_mb)
            ran, ok = self._one(program, test, limits)
            passed += ok
            timed_out += ran.timed_out
            if stop and not ok:
                break
        return passed, len(tests), timed_out

    def _one(self, program: str, test: Sequence[str], limits: Limits) -> tuple[Ran, bool]:
        secret = secrets.token_hex(16)
        kind, *rest = test
        given = rest[0] if kind == "io" else ""
        told = json.dumps([program, kind, *([] if kind == "io" else rest), secret])
        ran = self.box.run(["-I", "-c", HARNESS], given.encode(), told.encode(), limits)
        if ran.status == 126 and ran.output.startswith(b"box: "):
            raise OSError(f"the sandbox failed: {ran.output[5:].decode('utf-8', 'replace')}")
        if kind == "io":
            # It may end by sys.exit, before the harness does; what it wrote is what counts.
            ok = ran.status == 0 and same_output(ran.output, rest[1])
        else:
            ok = ran.report == secret.encode()
        return ran, ok and not ran.timed_out


def same_output(found: bytes, wanted: str) -> bool:
    """Equal line by line but for white space at the ends of lines and of the whole.

    >>> same_output(b"1 2 \\n\\n", "1 2")
    True
    """
    lines = [line.rstrip() for line in found.decode("utf-8", "replace").strip().splitlines()]
    return lines == [line.rstrip() for line in wanted.strip().splitlines()]
