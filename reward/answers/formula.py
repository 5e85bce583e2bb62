r"""A small grammar of LaTeX formulas, and their values: arithmetic without sympy.

Numbers, letters, ``+ - * / ^``, ``\frac``, ``\sqrt``, ``\pi``, a few functions and brackets are parsed
into a tree and evaluated at a point: modulo a prime as long as there is no root or constant, which
is exact (two different rational functions of this size agree at a point with a chance below 2^-50:
Schwartz and Zippel), else in complex numbers at two points. Roots, logarithms and fractional powers of names are
compared at more points, of all signs, wherever both sides are real. What is ambiguous or outside the grammar has no tree. Nothing here evaluates text as code.
"""

from __future__ import annotations

import cmath
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .tolerances import FLOAT_APART, FLOAT_EQUAL, FLOAT_ROUNDED, FLOAT_TINY

Tree = tuple[Any, ...]
"""``("+", left, right)`` and so on; leaves are ``("n", text)``, ``("v", name)``, ``("c", value)``."""

MAX_CHARACTERS = 300
"""Longer texts are left to a grader process."""
MAX_DEPTH = 24
MAX_EXPONENT = 64
FAR = (8, -8, 100, -100)
"""Further points for roots over names, as multiples of the first one: near 0 alone, the root of (x-3)^2 is 3-x."""
NEAR = 1 / 32
"""The same for what holds only far from 0: the root of y(y-1)^2 is (y-1) times that of y from 1 on."""
MAX_SIGNED = 4
"""With more names, not every combination of their signs is tried."""
PRIME = (1 << 61) - 1

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<command>\\(?:[A-Za-z]+|[{}]))|(?P<letters>[A-Za-z]+)"
    r"|(?P<sign>[-+*/^(){}\[\],&]))"
)
_NO_PRODUCTS = frozenset(
    ("ln", "lg", "pi", "or", "if", "is", "in", "no", "of", "on", "as", "at", "be", "to", "so")
)
"""Two letters that are a word, not a product."""
_VARIABLES = frozenset("abckmnpqrstuvwxyz")
"""Letters that may come before a bracket as a factor; f(x) isn't such a product."""
_PRODUCT = frozenset(("*", "\\cdot", "\\times"))


class Unknown(Exception):
    """The text is outside the grammar, or its value can't be determined here."""


@dataclass(frozen=True, slots=True)
class Formula:
    """The tree of one scalar."""

    tree: Tree
    names: frozenset[str]
    decimal: bool
    """Whether it holds a number with a decimal point, which may be rounded."""
    transcendental: bool
    """Whether it has a function, or an exponent that isn't an integer. If floating point finds two of
    these equal, that proves nothing; if it finds them different, it does."""


# --- reading ----------------------------------------------------------------------------------


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        end = 0
        text = text.rstrip()
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise Unknown
            end = match.end()
            letters = match.group("letters")
            if letters is None:
                self.tokens.append(match.group(match.lastgroup or 0))
            elif len(letters) > 2 or letters.lower() in _NO_PRODUCTS:
                raise Unknown
            else:
                self.tokens += letters
        self.at = 0
        self.names: set[str] = set()
        self.decimal = False
        self.transcendental = False
        self.depth = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.next
        if not token or (wanted and token != wanted):
            raise Unknown
        self.at += 1
        return token

    def whole(self) -> Formula:
        tree = self.sum()
        if self.next:
            raise Unknown
        return Formula(tree, frozenset(self.names), self.decimal, self.transcendental)

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unknown
        total = self.product()
        while self.next in ("+", "-"):
            total = (self.take(), total, self.product())
        self.depth -= 1
        return total

    def product(self) -> Tree:
        if self.next in ("+", "-"):
            sign = self.take()
            if self.next in ("+", "-"):
                raise Unknown
            value = self.product()
            return value if sign == "+" else ("-", _ZERO, value)
        value, last = self.power()
        while True:
            if self.next in _PRODUCT:
                self.take()
                factor, last = self.power()
                value = ("*", value, factor)
            elif self.next == "/":
                self.take()
                factor, last = self.power()
                if self._begins_factor():
                    raise Unknown  # 1/2x
                value = ("/", value, factor)
            elif self._begins_factor():
                before = last
                factor, last = self.power()
                if last == "number" or (before == "number" and last == "frac"):
                    raise Unknown  # x2, or a mixed number
                value = ("*", value, factor)
            else:
                return value

    def _begins_factor(self) -> bool:
        token = self.next
        return bool(token) and (token[0].isalnum() or token in _FACTORS)

    def power(self) -> tuple[Tree, str]:
        base, kind = self.atom()
        if self.next != "^":
            return base, kind
        self.take()
        before = self.at
        if self.next == "{":
            exponent = self.group()
        else:
            token = self.next
            if not token.isalnum() or len(token) > 1:
                raise Unknown
            exponent, _ = self.atom()
        if self.next == "^":
            raise Unknown
        digits = "".join(self.tokens[before : self.at]).strip("{}")
        if digits.removeprefix("-").isdigit():
            if len(digits) > 3 or abs(int(digits)) > MAX_EXPONENT:
                raise Unknown
            return ("^", base, int(digits)), "power"
        self.transcendental = True
        return ("**", base, exponent), "power"

    def group(self) -> Tree:
        self.take("{")
        inside = self.sum()
        self.take("}")
        return inside

    def atom(self) -> tuple[Tree, str]:
        token = self.take()
        if token[0].isdigit():
            self.decimal = self.decimal or "." in token
            return ("n", token), "number"
        if token == "e":
            return ("c", math.e), "letter"
        if token.isalpha():
            if token in "ijEI" or (self.next == "(" and token not in _VARIABLES):
                raise Unknown
            self.names.add(token)
            return ("v", token), "letter"
        if token == "\\pi":
            return ("c", math.pi), "letter"
        if token == "(":
            inside = self.sum()
            self.take(")")
            return inside, "bracket"
        if token == "{":
            self.at -= 1
            return self.group(), "bracket"
        if token == "\\frac":
            return ("/", self.group(), self.group()), "frac"
        if token == "\\sqrt":
            degree = 2
            if self.next == "[":
                self.take()
                digit = self.take()
                if not digit.isdigit() or not 2 <= int(digit[:2]) <= 9:
                    raise Unknown
                degree = int(digit)
                self.take("]")
            return ("root", self.group(), degree), "root"
        if token in _FUNCTIONS:
            return ("f", token, self.argument()), "function"
        raise Unknown

    def argument(self) -> Tree:
        """Reads a function's argument: brackets, or one number or letter with nothing else attached."""
        self.transcendental = True
        token = self.next
        if token in ("(", "{") or (token and token[0].isalnum()) or token == "\\pi":
            inside, _ = self.atom()
            bracketed = token in ("(", "{")
            if self.next == "^" or (not bracketed and self._begins_factor()):
                raise Unknown  # sin x^2, sin xy
            return inside
        raise Unknown


_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "\\ln": cmath.log,
    "\\sin": cmath.sin,
    "\\cos": cmath.cos,
    "\\tan": cmath.tan,
}
_ZERO: Tree = ("n", "0")
_FACTORS = frozenset(("(", "{", "\\frac", "\\sqrt", "\\pi", *_FUNCTIONS))


# --- arithmetic -------------------------------------------------------------------------------


class _NotExact(Exception):
    """There is a root, a constant or an exponent that has no value modulo a prime."""


class _NotReal(Exception):
    """A root, a logarithm or a power of names isn't real at the point, where the formula may not be meant to hold."""


def _modular(tree: Tree) -> int:
    """The value modulo :data:`PRIME` at the fixed point."""
    kind = tree[0]
    if kind == "n":
        whole, _, places = tree[1].partition(".")
        value = int(whole + places) % PRIME
        return value if not places else value * pow(10 ** len(places), -1, PRIME) % PRIME
    if kind == "v":
        return pow(ord(tree[1]), 0x1234567, PRIME)
    if kind in ("c", "root", "**", "f"):
        raise _NotExact
    left = _modular(tree[1])
    if kind == "^":
        if tree[2] <= 0 and not left:
            raise Unknown
        return pow(left, tree[2], PRIME)
    right = _modular(tree[2])
    if kind == "+":
        return (left + right) % PRIME
    if kind == "-":
        return (left - right) % PRIME
    if kind == "*":
        return left * right % PRIME
    if not right:
        raise Unknown
    return left * pow(right, -1, PRIME) % PRIME


def floating(tree: Tree, point: Mapping[str, float]) -> complex:
    """The value in complex numbers where the names have these values.

    Raises:
        _NotReal: a root, a logarithm or a power of something with names isn't real there.
    """
    kind = tree[0]
    if kind == "n":
        return complex(float(tree[1]))
    if kind == "c":
        return complex(tree[1])
    if kind == "v":
        return complex(point[tree[1]])
    if kind == "f":
        argument = floating(tree[2], point)
        if tree[1] == "\\ln" and _is_lost(argument, tree):
            raise _NotReal
        return _FUNCTIONS[tree[1]](argument)
    left = floating(tree[1], point)
    if kind == "^":
        if tree[2] <= 0 and not left:
            raise Unknown
        return left ** tree[2]
    if kind == "root":
        if tree[2] % 2 and not left.imag and left.real < 0:
            # The cube root of -8 is -2.
            return complex(-(abs(left) ** (1 / tree[2])))
        if _is_lost(left, tree):
            raise _NotReal
        return left ** (1 / tree[2]) if left else left
    right = floating(tree[2], point)
    if kind == "+":
        return left + right
    if kind == "-":
        return left - right
    if kind == "*":
        return left * right
    if kind == "**":
        if not left:
            raise Unknown
        if _is_lost(left, tree):
            raise _NotReal
        return left**right
    if not right:
        raise Unknown
    return left / right


def _is_lost(value: complex, tree: Tree) -> bool:
    """Whether a root, a logarithm or a power of this value isn't real, and that depends on names."""
    return bool(value.imag or value.real < 0) and _has_names(tree)


def _has_names(tree: Tree) -> bool:
    return tree[0] == "v" or any(_has_names(part) for part in tree[1:] if isinstance(part, tuple))


def _may_be_lost(tree: Tree) -> bool:
    """Whether a root, a logarithm or a power is taken of something with names."""
    if tree[0] in ("root", "**") or tree[:2] == ("f", "\\ln"):
        return _has_names(tree)
    return any(_may_be_lost(part) for part in tree[1:] if isinstance(part, tuple))


def _points(names: frozenset[str], several: bool) -> Iterator[tuple[dict[str, float], bool]]:
    """Points to compare at, and whether they are far from 0; ``several`` asks for more than two.

    Points differ and have both signs: there the root of a square isn't always its base.
    """
    order = sorted(names)
    first = [0.3 + math.fmod(ord(name) * 0.618033988749895, 1.0) * 2.0 for name in order]
    if not several:
        signs = [(1.0,) * len(order), (-1.0,) * len(order)][: 2 if order else 1]
        for each in signs:
            yield dict(zip(order, map(float.__mul__, first, each), strict=True)), False
        return
    count = len(order)
    if count <= MAX_SIGNED:
        patterns = list(itertools.product((1.0, -1.0), repeat=count))
    else:
        patterns = [(1.0,) * count, (-1.0,) * count]
        patterns += [tuple(-1.0 if i == j else 1.0 for j in range(count)) for i in range(count)]
    # Of two names, each is the greater one at some point.
    mirrored = [2.6 - value for value in first]
    for values in (first, mirrored, [NEAR * value for value in first]):
        for each in patterns:
            yield dict(zip(order, map(float.__mul__, values, each), strict=True)), False
    for scale in FAR:
        yield {name: scale * value for name, value in zip(order, first, strict=True)}, True


# --- equality ---------------------------------------------------------------------------------


def same_value(a: Formula, b: Formula) -> bool | None:
    """Whether two scalars are equal; None if that can't be determined here."""
    if a.names != b.names:
        return None  # "5m" may be five metres.
    decimal = a.decimal or b.decimal
    try:
        try:
            equal = _modular(a.tree) == _modular(b.tree)
            if equal or not decimal:
                return equal
        except _NotExact:
            equal = False
        certain = not (decimal or a.transcendental or b.transcendental)
        several = bool(a.names) and (_may_be_lost(a.tree) or _may_be_lost(b.tree))
        met = False
        for point, far in _points(a.names, several):
            try:
                p, q = floating(a.tree, point), floating(b.tree, point)
            except _NotReal:
                continue
            if not (cmath.isfinite(p) and cmath.isfinite(q)):
                return None
            most = max(abs(p), abs(q), 1e-300)
            distance = abs(p - q) / most
            if distance > FLOAT_APART:
                # Both are tiny, or rounded: math-verify has its own conventions for them. Far from 0 two terms may
                # cancel each other to the last digit.
                vague = most < FLOAT_TINY or (decimal and distance < FLOAT_ROUNDED) or far
                return None if vague else False
            # A far point tells only by an exact agreement.
            met = met or not far or distance <= FLOAT_EQUAL
            certain = certain and (distance <= FLOAT_EQUAL or far)
    except (Unknown, OverflowError, ZeroDivisionError, ValueError):
        return None
    return True if certain and met else None


@lru_cache(maxsize=8_192)
def read_formula(text: str) -> Formula | None:
    """The tree of one scalar; None if the text isn't in this grammar."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return _Reader(text).whole()
    except (Unknown, RecursionError):
        return None
