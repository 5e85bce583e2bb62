"""Runs one program against its tests, each test in a sandbox of its own.

The runner is a process of its own kind (:mod:`tandem.reward.graders.zygote`) and never executes the
program itself. Expected results stay here: the harness in the sandbox reports, as plain data, what the
program's function returned or what the left side of an assertion evaluates to, and the comparison is
made on this side of the sandbox. So a program may tamper with anything in its process and still has to
name a value that it was never given. Other assertions, and tests of several lines, run in the program's
process; there the harness gives back a secret when it has reached their end.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from . import sandbox
from .expected import Expected, decoded, expected
from .sandbox import Limits, Ran

HARNESS = """
def harness():
    import json, os, sys, types
    program, kind, *rest = json.loads(os.fdopen(4, "rb").read())
    out = os.dup(3)
    os.close(3)
    module = types.ModuleType("__main__" if kind == "io" else "program")
    # Where dataclasses and pickle look for what a program defines.
    sys.modules[module.__name__] = module
    space = module.__dict__
    exec(compile(program, "program.py", "exec"), space)
    if kind == "io":
        return
    if kind == "call":
        name, arguments = rest
        found = space.get(name)
        if found is None:
            found = getattr(space["Solution"](), name)
        arguments = json.loads(arguments)
        said = json.dumps(found(*(arguments if isinstance(arguments, list) else [arguments])))
    elif kind == "value":
        said = json.dumps(encoded(eval(compile(rest[0], "test.py", "eval"), space)))
    elif kind == "truth":
        said = rest[1 if eval(compile(rest[0], "test.py", "eval"), space) else 2]
    else:
        exec(compile(rest[0], "test.py", "exec"), space)
        said = rest[1]
    with open(out, "w") as file:
        file.write(said)
def encoded(value):
    import numbers
    from decimal import Decimal
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return ["float", repr(float(value))]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, numbers.Rational) or (isinstance(value, Decimal) and value.is_finite()):
        return ["fraction", *map(int, value.as_integer_ratio())]
    for name, kind in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kind):
            return [name, *map(encoded, value)]
    if isinstance(value, dict):
        return ["dict", *([encoded(k), encoded(v)] for k, v in value.items())]
    raise TypeError("what the test looks at isn't a plain value")
harness()
"""


class Runner:
    """Runs programs in the first sandbox that works here.

    Raises:
        ConfigError: none works.
    """

    def __init__(self, wanted: str) -> None:
        self.box = sandbox.find(wanted)

    def run(
        self,
        program: str,
        tests: Sequence[Sequence[str]],
        seconds: float,
        total_seconds: float,
        memory_mb: int,
        stop: bool,
    ) -> tuple[int, int, int]:
        """Returns (tests passed, tests, tests that ran out of time).

        Args:
            program: Python source.
            tests: as from :func:`tandem.reward.components.code.read_tests`.
            seconds: time limit of one test.
            total_seconds: time limit of all tests; tests that are left count as failed.
            memory_mb: address space of the program, MiB.
            stop: stop at the first test that fails.
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
        kind, *rest = test
        secret, other = secrets.token_hex(16), secrets.token_hex(16)
        wanted = expected(rest[0]) if kind == "assert" else None
        if kind == "io":
            task = [program, kind]
        elif kind == "call":
            task = [program, kind, *rest[:2]]
        elif wanted is None:
            task = [program, "assert", rest[0], secret]
        elif wanted.kind == "value":
            task = [program, "value", wanted.expression]
        else:
            said = [secret, other] if wanted.value else [other, secret]
            task = [program, "truth", wanted.expression, *said]
        given = rest[0] if kind == "io" else ""
        ran = self.box.run(["-I", "-c", HARNESS], given.encode(), json.dumps(task).encode(), limits)
        if ran.failure:
            raise OSError(f"the sandbox failed: {ran.failure}")
        if kind == "io":
            # The program may call sys.exit before the harness ends; only what it wrote counts.
            ok = ran.status == 0 and same_output(ran.output, rest[1])
        elif kind == "call":
            ok = same_result(ran.report, rest[2])
        elif wanted is not None and wanted.kind == "value":
            ok = same_value(ran.report, wanted)
        else:
            ok = ran.report == secret.encode()
        return ran, ok and not ran.timed_out


def same_result(report: bytes, wanted: str) -> bool:
    """Whether a function's result (JSON) equals the result that a test expects (JSON).

    >>> same_result(b"[1, 2]", "[1, 2]"), same_result(b"1", "true")
    (True, False)
    >>> same_result(b"[1, 2]", "[[1, 2]]"), same_result(b"5", "[5]")
    (True, True)
    """
    result = json.loads(wanted)
    try:
        found = json.loads(report)
        # Data sets also write a single result, be it a list, as a list of one.
        wrapped = isinstance(result, list) and len(result) == 1
        return any(
            found == one and isinstance(found, bool) is isinstance(one, bool)
            for one in ([result, result[0]] if wrapped else [result])
        )
    except (ValueError, RecursionError):
        return False


def same_value(report: bytes, wanted: Expected) -> bool:
    """Whether the value of an assertion's expression is the one that the assertion demands."""
    try:
        value = decoded(json.loads(report))
        return bool(value is wanted.value if wanted.identity else value == wanted.value)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        # Whatever it is, the harness doesn't report such a value.
        return False


def same_output(found: bytes, wanted: str) -> bool:
    """Whether outputs are equal line by line, except for white space at the ends of lines and of the whole.

    >>> same_output(b"1 2 \\n\\n", "1 2")
    True
    """
    lines = [line.rstrip() for line in found.decode("utf-8", "replace").strip().splitlines()]
    return lines == [line.rstrip() for line in wanted.strip().splitlines()]
