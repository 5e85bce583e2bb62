"""Made-up responses to mathematics problems, in the shares that a reasoning model's have.

Per 1,000 problems: 550 with an integer for an answer, 130 with a fraction, 150 with another LaTeX
expression, 60 with a set or an interval, 40 with a matrix, 40 whose response ends in junk, 30 whose
response is cut. Groups of eight responses a problem; a response is 20,600 characters long in the
mean, prose and formulas, with an intermediate box here and there. Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

GROUP = 8
MEAN_CHARACTERS = 20_600
SHARES = (
    *(("integer", 550), ("fraction", 130), ("expression", 150), ("set or interval", 60)),
    *(("matrix", 40), ("junk", 40), ("truncated", 30)),
)
"""Problems of a kind in 1,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response, and what is known of it."""

    text: str
    """All of it."""
    gold: str
    """The problem's answer."""
    kind: str
    """Of :data:`SHARES`."""
    right: bool
    """Whether it deserves ``correct``."""
    truncated: bool
    """It was cut."""


@dataclass(frozen=True, slots=True)
class _Problem:
    gold: str
    same: tuple[str, ...]
    """Other spellings of the gold answer."""
    wrong: tuple[str, ...]


def _integer(r: random.Random) -> _Problem:
    n = r.choice((r.randint(0, 50), r.randint(51, 5_000), r.randint(5_001, 10**6)))
    return _Problem(
        str(n), (f"{n:,}", f" {n} ", f"x = {n}"), (str(n + 1), str(2 * n + 3), str(-n - 1))
    )


def _fraction(r: random.Random) -> _Problem:
    b = r.choice((2, 4, 5, 8, 16, 20, 25))
    a = r.randrange(1, 3 * b, 2) if b % 5 else r.choice([k for k in range(1, 3 * b) if k % 5])
    return _Problem(
        f"\\frac{{{a}}}{{{b}}}",
        (f"\\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", str(a / b)),
        (f"\\frac{{{a + 1}}}{{{b}}}", f"\\frac{{{b}}}{{{a}}}", str(a)),
    )


def _expression(r: random.Random) -> _Problem:
    a, b, c = r.randint(2, 9), r.randint(2, 30), r.choice((2, 3, 5, 7))
    kinds = (
        _Problem(
            f"{a}\\sqrt{{{c}}}",
            (f"\\sqrt{{{a * a * c}}}", f"{a} \\cdot \\sqrt{{{c}}}"),
            (f"{a + 1}\\sqrt{{{c}}}", f"{a}\\sqrt{{{c + 1}}}", f"{a}"),
        ),
        _Problem(
            f"{a}x^2 + {b}x + {c}",
            (f"{c} + {b}x + {a}x^2", f"x({a}x + {b}) + {c}"),
            (f"{a}x^2 - {b}x + {c}", f"{a}x^2 + {b}x", f"{a}x + {b}"),
        ),
        _Problem(
            f"\\frac{{{a}\\pi}}{{{b + 1}}}",
            (f"\\frac{{{a}}}{{{b + 1}}}\\pi", f"{a}\\pi/{b + 1}"),
            (f"\\frac{{{a + 1}\\pi}}{{{b + 1}}}", f"\\frac{{{a}}}{{{b + 1}}}", "\\pi"),
        ),
        _Problem(
            f"{b} + {a}\\sqrt{{{c}}}",
            (f"{a}\\sqrt{{{c}}} + {b}", f"{b}+{a}\\sqrt{{{c}}}"),
            (f"{b} - {a}\\sqrt{{{c}}}", f"{b + 1} + {a}\\sqrt{{{c}}}", f"{b}"),
        ),
        _Problem(
            f"{a}\\ln {c}",
            (f"\\ln {c**a}", f"\\ln({c}) \\cdot {a}"),
            (f"{a + 1}\\ln {c}", f"\\ln {a}", f"{a}"),
        ),
        _Problem(
            f"{a}e^{{{b}x}}",
            (f"{a}(e^{{x}})^{{{b}}}", f"{a} \\cdot e^{{{b}x}}"),
            (f"{a}e^{{{b + 1}x}}", f"{a * b}e^{{{b}x}}", f"e^{{{b}}}"),
        ),
    )
    return r.choice(kinds)


def _set(r: random.Random) -> _Problem:
    a = r.randint(-9, 9)
    b, c = a + r.randint(1, 9), a + r.randint(10, 20)
    if r.random() < 0.5:
        return _Problem(
            f"\\{{{a}, {b}, {c}\\}}",
            (f"\\{{{c}, {a}, {b}\\}}", f"\\left\\{{{a},{b},{c}\\right\\}}"),
            (f"\\{{{a}, {b}\\}}", f"\\{{{a}, {b}, {c + 1}\\}}", str(a)),
        )
    return _Problem(
        f"({a}, {b}] \\cup [{c}, \\infty)",
        (
            f"[{c}, \\infty) \\cup ({a}, {b}]",
            f"\\left({a}, {b}\\right] \\cup \\left[{c}, \\infty\\right)",
        ),
        (f"({a}, {b})", f"({a}, {b}] \\cup ({c}, \\infty)", f"[{c}, \\infty)"),
    )


def _matrix(r: random.Random) -> _Problem:
    a, b, c, d = (r.randint(-9, 9) for _ in range(4))

    def made(of: str, *rows: str) -> str:
        lines = " \\\\ ".join(rows)
        return f"\\begin{{{of}}} {lines} \\end{{{of}}}"

    return _Problem(
        made("pmatrix", f"{a} & {b}", f"{c} & {d}"),
        (made("bmatrix", f"{a} & {b}", f"{c} & {d}"), made("pmatrix", f"{a}&{b}", f"{c}&{d}")),
        (
            made("pmatrix", f"{a + 1} & {b}", f"{c} & {d}"),
            made("pmatrix", f"{a}", f"{c}"),
            made("pmatrix", f"{b} & {a}", f"{d} & {c}"),
        ),
    )


JUNK = (
    "I could not finish the calculation, so the answer stays open",
    "x^{+ = }",
    "\\frac{}{}",
    "see above",
    "\\text{no solution was found in time}",
)
MAKERS: dict[str, Callable[[random.Random], _Problem]] = {
    "integer": _integer,
    "fraction": _fraction,
    "expression": _expression,
    "set or interval": _set,
    "matrix": _matrix,
    "junk": _expression,
    "truncated": _integer,
}
SENTENCES = (
    "Let me set $a_{1} = @n$ and see where that leads.",
    "So we need $x^2 - @nx + @m = 0$, which factors as $(x - @m)(x - 1)$ only if $@m + 1 = @n$.",
    "Wait, that isn't right, because the left side is at least @n for every $k \\geq @m$.",
    "By the triangle inequality, $|u + v| \\leq |u| + |v| \\leq \\frac{@n}{@m}$.",
    "Hmm, let me try $n = @n$ first, and then go on to the general case.",
    "Therefore $\\sum_{k=1}^{n} k = \\frac{n(n+1)}{2}$, so that the total is @m.",
    "That gives us \\[ @ny + @m = \\sqrt{@n^2 + @m} \\] and we can square both sides.",
    "Check with a small case: @n times @m is not the number that we want.",
    "An intermediate result would be \\boxed{@m}, but there is more to do.",
)


def _thoughts(r: random.Random, length: int) -> str:
    pieces, total = [], 0
    while total < length:
        # The last one holds a box; a model boxes on its way, but seldom.
        place = len(SENTENCES) - 1 if r.random() < 0.002 else r.randrange(len(SENTENCES) - 1)
        sentence = SENTENCES[place].replace("@n", str(r.randint(2, 99)))
        sentence = sentence.replace("@m", str(r.randint(2, 999)))
        pieces.append(sentence)
        total += len(sentence) + 1
    return "\n".join(pieces)


def responses(problems: int, seed: int = 0) -> list[list[Response]]:
    """``[problems][8]`` responses."""
    r = random.Random(seed)
    kinds = [kind for kind, share in SHARES for _ in range(share)]
    step = max(1, 1_000 // problems)
    chosen = [kinds[(place * step + step // 2) % 1_000] for place in range(problems)]
    r.shuffle(chosen)
    return [_group(r, kind) for kind in chosen]


def _group(r: random.Random, kind: str) -> list[Response]:
    problem = MAKERS[kind](r)
    skill = r.choice((0.1, 0.5, 0.9))
    # Many shorter ones and a long tail, as reasoning models write.
    lengths = [max(500, int(r.gammavariate(2.0, MEAN_CHARACTERS / 2))) for _ in range(GROUP)]
    return [_response(r, kind, problem, skill, length) for length in lengths]


def _response(
    r: random.Random, kind: str, problem: _Problem, skill: float, length: int
) -> Response:
    right = r.random() < skill
    if right:
        answer = problem.gold if r.random() < 0.8 else r.choice(problem.same)
    else:
        answer = r.choice(problem.wrong)
    thoughts = _thoughts(r, length)
    if kind == "truncated":
        return Response(text=thoughts, gold=problem.gold, kind=kind, right=False, truncated=True)
    if kind == "junk":
        right, answer = False, r.choice(JUNK)
    text = f"{thoughts}\n</think>\n\nThe final answer is $\\boxed{{{answer}}}$."
    return Response(text=text, gold=problem.gold, kind=kind, right=right, truncated=False)
