"""The problems: what they ask, what answers them, and that none is drawn twice."""

from __future__ import annotations

from random import Random

import pytest

from tandem.common.errors import TandemError
from tandem.launch.miniature.problems import Problem, distinct, draw, is_right, is_well_formed

EXAMPLE = Problem(start=49, operands=(-6, 8, -3))


def test_the_example_reads_as_documented():
    assert EXAMPLE.k == 3
    assert EXAMPLE.totals == (49, 43, 51, 48)
    assert EXAMPLE.prompt == "49-6+8-3=?<think>"
    assert EXAMPLE.response == "49-6=43+8=51-3=48</think> <answer> \\boxed{48} </answer>"


def test_totals_wrap_modulo_100_and_keep_two_digits():
    problem = Problem(start=3, operands=(-5, 9))
    assert problem.prompt == "03-5+9=?<think>"
    assert problem.response == "03-5=98+9=07</think> <answer> \\boxed{07} </answer>"
    assert problem.answer == "07"


@pytest.mark.parametrize("k", range(1, 11))
def test_the_final_total_equals_no_earlier_one(k: int):
    rng = Random(k)
    for _ in range(300):
        *earlier, last = draw(rng, k).totals
        assert last not in earlier


@pytest.mark.parametrize("k", [4, 8])
def test_a_chain_that_stops_early_is_well_formed_and_wrong(k: int):
    rng = Random(k)
    for problem in (draw(rng, k) for _ in range(100)):
        for steps in range(1, k):
            response = problem.response_after(steps)
            assert is_well_formed(response)
            assert not is_right(problem, response)
        assert is_right(problem, problem.response)


def test_starts_and_operands_cover_their_whole_range():
    rng = Random(0)
    problems = [draw(rng, 4) for _ in range(3000)]
    assert {p.start for p in problems} == set(range(100))
    assert {o for p in problems for o in p.operands} == set(range(-9, 10)) - {0}


def test_the_same_seed_gives_the_same_problems():
    assert distinct(Random("a"), 8, 50) == distinct(Random("a"), 8, 50)
    assert distinct(Random("a"), 8, 50) != distinct(Random("b"), 8, 50)


def test_distinct_problems_differ_from_each_other_and_from_the_excluded():
    # k=1 has only 1,800 problems: without the check, repeats would be certain.
    held_out = distinct(Random(0), 1, 150)
    training = distinct(Random(1), 1, 300, exclude=held_out)
    assert len({p.prompt for p in held_out + training}) == 450


def test_more_problems_than_can_be_drawn_are_refused():
    with pytest.raises(TandemError, match="k=1"):
        distinct(Random(0), 1, 1000)


def test_a_chain_without_operations_is_refused():
    with pytest.raises(TandemError, match="k=0"):
        draw(Random(0), 0)


@pytest.mark.parametrize(
    "response",
    [
        "49-6=43+8=51-3=48</think> <answer> 48 </answer>",
        "49-6=43+8=51-3=48</think><answer> \\boxed{48} </answer>",
        "49-6=43+8=51-3=48</think> <answer> \\boxed{48} </answer> ",
        "<think>49-6=43+8=51-3=48</think> <answer> \\boxed{48} </answer>",
        "49-6=43+8=51-3=48</think> <answer> \\boxed{} </answer>",
        "</think> <answer> \\boxed{48} </answer>",
        "",
    ],
)
def test_anything_but_the_exact_form_is_wrong(response: str):
    assert not is_well_formed(response)
    assert not is_right(EXAMPLE, response)


def test_the_boxed_integer_is_compared_as_a_number():
    problem = Problem(start=3, operands=(4,))
    assert is_right(problem, "03+4=07</think> <answer> \\boxed{7} </answer>")
    assert not is_right(problem, "03+4=07</think> <answer> \\boxed{8} </answer>")
