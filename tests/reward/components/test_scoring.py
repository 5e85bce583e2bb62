"""Components by their formulas, and how weights, gates and verdicts make a reward of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.errors import ConfigError
from tandem.common.records import FinishReason, Verdict
from tandem.reward.components import programs
from tandem.reward.components.builtin import Graded, component
from tandem.reward.components.scoring import Scorer

OPEN = "1+1=?<think>"


def value(
    name: str, text: str = "", /, _sample: dict[str, Any] | None = None, **params: Any
) -> Any:
    fields: dict[str, Any] = {"text": text, "verdict": Verdict.CORRECT, **(_sample or {})}
    return component(name, params)[1](Graded(**fields))


def tokens(count: int) -> dict[str, Any]:
    return {"tokens": np.arange(count, dtype=np.int32)}


# --- formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("a</think> <answer>b</answer>", 1.0),
        ("a</think>\n<answer>b</answer>\n", 1.0),
        ("a</think> <answer></answer>", 0.0),
        ("</think> <answer>b</answer>", 0.0),
        ("a</think> well <answer>b</answer>", 0.0),
        ("a</think> <answer>b</answer> more", 0.0),
        ("a</think> <answer>b</answer> <answer>c</answer>", 0.0),
        ("a</think></think> <answer>b</answer>", 0.0),
        ("<think>a</think> <answer>b</answer>", 0.0),
        ("<answer>b</answer>", 0.0),
    ],
)
def test_tags_wants_one_structure_after_the_prompts_open_think(text: str, paid: float) -> None:
    assert value("format", text, {"prompt_text": OPEN}, style="tags") == paid


def test_tags_takes_the_responses_own_think_where_the_prompt_has_none() -> None:
    assert value("format", "<think>a</think> <answer>b</answer>", style="tags") == 1.0
    assert value("format", "a</think> <answer>b</answer>", style="tags") == 0.0


@pytest.mark.parametrize(
    ("style", "text", "paid"),
    [
        ("r1_zero", "a</think> <answer>b</answer>", 1.0),
        ("r1_zero", "a</think><answer>b</answer>", 0.0),
        ("r1_zero", "a</think>\n<answer>b</answer>", 0.0),
        ("open_r1", "<think>\na\n</think>\n<answer>\nb\n</answer>", 1.0),
        ("open_r1", "<think>a</think>\n<answer>\nb\n</answer>", 0.0),
        ("open_r1", "<think>\na\n</think>\n<answer>\nb\n</answer> x", 0.0),
        ("tutorial", "<think>a</think><answer>b</answer>", 1.0),
        ("tutorial", "<think>a</think><think>c</think> <answer>b</answer>", 1.0),
        ("tutorial", "x <think>a</think> <answer>b</answer>", 0.0),
        ("think_only", "<think>a</think> b", 1.0),
        ("think_only", "<think>a<think>b</think>", 0.0),
        ("think_only", "a</think> b", 0.0),
        ("boxed", "a</think> \\boxed{1}", 1.0),
        ("boxed", "\\boxed{1} a</think>", 0.0),
    ],
)
def test_each_style_is_its_sources_rule(style: str, text: str, paid: float) -> None:
    assert value("format", text, style=style) == paid


def test_a_pattern_must_match_the_whole_response() -> None:
    pattern = r"[0-9+=-]+</think> <answer> \\boxed\{[0-9]{1,2}\} </answer>"
    assert value("format", "1+1=2</think> <answer> \\boxed{2} </answer>", pattern=pattern) == 1.0
    assert value("format", "1+1=2</think> <answer> \\boxed{2} </answer> ", pattern=pattern) == 0.0


def test_tag_count_pays_a_quarter_for_each_tag() -> None:
    assert value("tag_count", "<think>\nx\n</think>\n<answer>\ny\n</answer>") == 1.0
    assert value("tag_count", "<think>\nx\n</think>\n<answer>\ny") == 0.75


def test_reasoning_steps_pays_up_to_three_marks() -> None:
    text = "1. a\n2. b\n3. c"
    assert value("reasoning_steps", text) == pytest.approx(1 / 3)
    assert value("reasoning_steps", text, multiline=True) == 1.0
    assert value("reasoning_steps", "Step 1: a, First, b") == pytest.approx(2 / 3)


# --- lengths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "correct", "paid"),
    [(0, True, 1.0), (100, True, 0.5), (200, True, 0.5), (0, False, -1.0), (100, False, -0.5),
     (25, True, 0.5 + 0.25 * (1 + math.cos(math.pi / 4)))],
)  # fmt: skip
def test_cosine_length_pays_short_right_and_long_wrong_answers(
    length: int, correct: bool, paid: float
) -> None:
    sample = {**tokens(length), "verdict": Verdict.CORRECT if correct else Verdict.WRONG}
    assert value("cosine_length", "", sample, max_length=100) == pytest.approx(paid, abs=1e-12)


def test_cosine_length_without_a_clamp_rises_again() -> None:
    text = "a" * 200
    assert value(
        "cosine_length", text, max_length=100, unit="characters", clamp=False
    ) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("So:\n<code>\nprint(1)\n</code> and <code>x</code>", "print(1)"),
        ("```python\nx = 1\n```\nor\n```python\ny = 2\n```\n", "y = 2"),
        ("print(1)\n", "print(1)"),
        ("<code></code>", ""),
    ],
)
def test_a_program_is_in_tags_or_a_fenced_block_or_is_all_there_is(text: str, code: str) -> None:
    assert programs.program(text) == code


@pytest.mark.parametrize(
    ("code", "paid"),
    [
        ("for x in range(3):\n    print(x)", 1.0),
        ("for x in range(3) print(x)", 0.0),
        ("", 0.0),
        ("x = '\0'", 0.0),
        ("(" * 5000 + ")" * 5000, 0.0),
        ("-" * 90_000 + "1", 0.0),
        ("x = 1\n" * 20_000, 0.0),
    ],
)
def test_a_program_that_can_be_parsed_pays_and_is_never_run(code: str, paid: float) -> None:
    assert programs.parses([f"<code>{code}</code>"]) == [paid]


def test_words_that_occur_pay_once_each_up_to_1() -> None:
    words = ["apis.", "execute(", "evaluate(", "complete_task"]
    assert value("mentions", "apis.a apis.b", words=words) == pytest.approx(0.3)
    assert value("mentions", "apis.complete_task execute( evaluate(", words=words) == 1.0
    for wrong in ({"words": []}, {"words": "apis."}, {"words": [1]}, {"words": words, "each": 0}):
        with pytest.raises(ConfigError):
            component("mentions", wrong)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_response_that_was_cut_pays_for_its_missing_end(reason: FinishReason) -> None:
    paid = 0.0 if reason is FinishReason.STOP else -1.0
    assert value("missing_eos", "The answer is 3.", {"finish_reason": reason}) == paid


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    ids = np.array([1, 2, 1, 2, 1, 2], np.int32)
    assert value("repetition", "", {"tokens": ids}, ngram=2) == pytest.approx(-0.6)
    assert value("repetition", "A b a B", ngram=2, unit="words") == pytest.approx(-1 / 3)
    assert value("repetition", "one", ngram=3, unit="words") == 0.0


@pytest.mark.parametrize(("length", "paid"), [(80, 0.0), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_soft_overlong_falls_linearly_and_stops(length: int, paid: float) -> None:
    assert value("soft_overlong", "", tokens(length), max_length=100, cache=20) == pytest.approx(
        paid
    )


def test_dapo_overlong_has_no_floor() -> None:
    assert value("dapo_overlong", "", tokens(120), max_length=100, buffer=20) == pytest.approx(-2.0)


# --- variants by origin: the numbers are worked out by hand from the published formulas ---------

SQUARE = math.sqrt(0.5)
"""cos(pi / 4), a quarter of the way."""


@pytest.mark.parametrize(
    ("name", "text", "correct", "paid"),
    [
        # open-r1: characters, 1,000 of them, from 0.5 to 1 and from -1 to -0.5.
        ("cosine_open_r1", 250, True, 0.75 + 0.25 * SQUARE),
        ("cosine_open_r1", 500, False, -0.75),
        ("cosine_open_r1", 1000, False, -0.5),
        ("cosine_open_r1", 2000, True, 1.0),
        # Its command line turns the wrong branch round: 0 for a short one, -0.5 for a long one.
        ("cosine_open_r1_cli", 0, False, 0.0),
        ("cosine_open_r1_cli", 500, False, -0.25),
        ("cosine_open_r1_cli", 1000, False, -0.5),
        ("cosine_open_r1_cli", 500, True, 0.75),
        ("cosine_tutorial", 250, True, 0.9 + 0.1 * SQUARE),
        ("cosine_tutorial", 250, False, -0.3 - 0.2 * SQUARE),
        ("cosine_tutorial", 1000, True, 0.8),
    ],
)
def test_cosines_by_origin(name: str, text: int, correct: bool, paid: float) -> None:
    verdict = Verdict.CORRECT if correct else Verdict.WRONG
    # Tokens are known, and not what these count.
    sample = {**tokens(3), "verdict": verdict}
    assert value(name, "a" * text, sample) == pytest.approx(paid, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "text", "paid"),
    [
        ("repetition_open_r1", "a b C a B c", -0.25),  # 4 trigrams, 3 distinct
        ("repetition_tutorial", "a b c a b c", -0.025),
        ("repetition_open_r1", "a b", 0.0),
        ("reasoning_steps_tutorial", "1. a\n2. b", 2 / 3),
        ("format_open_r1", "<think>\na\n</think>\n<answer>\nb\n</answer>", 1.0),
        ("format_tutorial", "<think>a</think>\n\n<answer>b</answer>", 1.0),
        ("think_format", "<think>a</think>b<think>", 0.0),
        ("format_r1_zero", "</think> <answer>b</answer>", 1.0),
        ("soft_overlong", "a" * 12_288, 0.0),  # 16,384 less a cache of 4,096
        ("soft_overlong", "a" * 13_312, -0.25),
        ("soft_overlong", "a" * 16_385, -1.0),
        ("dapo_overlong", "a" * 16_384, 0.0),  # 20,480 less a buffer of 4,096
        ("dapo_overlong", "a" * 16_385, -1 / 4096),
        ("dapo_overlong", "a" * 24_576, -2.0),
    ],
)
def test_defaults_by_origin(name: str, text: str, paid: float) -> None:
    assert value(name, text) == pytest.approx(paid, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("acuracy", {}, "did you mean accuracy"),
        ("nobodys", {}, "package.module:function"),
        ("format", {"stile": "tags"}, "unknown parameter 'stile'"),
        ("format", {"style": "tag"}, "isn't one of"),
        ("format", {"pattern": "("}, "format"),
        ("repetition", {"max_penalty": 1.0}, "should not be positive"),
        ("repetition", {"unit": "lines"}, "params.unit='lines' isn't one of tokens, words"),
        ("cosine_tutorial", {"min_correct": "0.5"}, "params.min_correct='0.5'.*`float`, got `str`"),
        ("cosine_tutorial", {"clamp": "no"}, "params.clamp='no'.*`bool`, got `str`"),
        ("dapo_overlong", {"factor": "1"}, "params.factor='1'.*`float`, got `str`"),
        ("soft_overlong", {"cache": "1"}, "params.cache='1'.*`int`, got `str`"),
        ("code", {"tests": 3}, "params.tests=3.*`str`, got `int`"),
        ("cosine_length", {}, "max_length"),
        ("format", {"pattern": "a", "style": "tags"}, "not both"),
    ],
)
def test_a_component_that_cannot_be_made_is_a_config_error(
    name: str, params: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        component(name, params)


def test_whole_numbers_and_0_and_1_are_taken_as_yaml_of_others_has_them() -> None:
    component("cosine_length", {"max_length": 1000.0})
    component("cosine_tutorial", {"clamp": 1})
    with pytest.raises(ConfigError, match="got `float`"):
        component("cosine_length", {"max_length": 1000.5})


# --- composition ------------------------------------------------------------------------------


def scorer(*parts: ComponentConfig, **changes: Any) -> Scorer:
    return Scorer(RewardConfig(components=parts, **changes))


def graded(verdict: Verdict, text: str = "a</think> <answer>b</answer>") -> Graded:
    return Graded(text=text, verdict=verdict, prompt_text=OPEN)


ACCURACY = ComponentConfig(name="accuracy")
FORMAT = ComponentConfig(name="format", weight=0.5)
GATE = ComponentConfig(name="format", weight=0.0, gate=True)


def test_the_reward_is_the_weighted_sum() -> None:
    reward, components = scorer(ACCURACY, FORMAT).score(graded(Verdict.CORRECT))
    assert reward == 1.5
    assert components == {"accuracy": 1.0, "format": 1.0}


def test_a_sum_that_is_not_finite_in_float32_is_no_reward() -> None:
    large = scorer(ComponentConfig(name="my.rewards:one", weight=-10.0))
    assert large.score(graded(Verdict.WRONG), {"my.rewards:one": 1e37})[0] == -1e38
    for value in (1e308, 1e38, -1e308):
        assert large.score(graded(Verdict.WRONG), {"my.rewards:one": value})[0] is None


def test_tokens_that_earn_what_is_not_finite_in_float32_make_no_reward_either() -> None:
    own = scorer(ComponentConfig(name="my.rewards:tokens", weight=10.0))
    for value, paid in ((1e37, 0.0), (1e38, None), (1e308, None)):
        found = {"my.rewards:tokens": [value, -value]}
        (one,) = own.score_group([graded(Verdict.WRONG)], [found], [None])
        assert one.reward == paid
        assert one.token_rewards == (None if paid is None else [1e38, -1e38])


def test_a_closed_gate_pays_nothing_and_keeps_the_components() -> None:
    reward, components = scorer(ACCURACY, GATE).score(graded(Verdict.CORRECT, "no format"))
    assert reward == 0.0
    assert components == {"accuracy": 1.0, "format": 0.0}


def test_a_gate_without_a_value_is_closed() -> None:
    gate = ComponentConfig(name="my.rewards:one", weight=0.0, gate=True)
    assert scorer(ACCURACY, gate).score(graded(Verdict.CORRECT), {"my.rewards:one": None})[0] == 0.0


def test_an_open_gate_of_weight_zero_pays_the_others() -> None:
    assert scorer(ACCURACY, GATE).score(graded(Verdict.CORRECT))[0] == 1.0


@pytest.mark.parametrize("verdict", [Verdict.CRASHED, Verdict.GOLD_UNPARSABLE])
def test_a_failure_that_is_not_the_texts_own_has_no_reward(verdict: Verdict) -> None:
    reward, components = scorer(ACCURACY, FORMAT).score(graded(verdict))
    assert reward is None
    assert components == {"accuracy": None, "format": 1.0}


@pytest.mark.parametrize("verdict", [Verdict.TIMEOUT, Verdict.MEMORY])
def test_a_hang_pays_what_the_config_says(verdict: Verdict) -> None:
    assert scorer(ACCURACY, FORMAT, timeout_pays=-0.25).score(graded(verdict))[0] == -0.25


@pytest.mark.parametrize("verdict", [Verdict.TIMEOUT, Verdict.MEMORY])
def test_a_hang_pays_like_any_text_where_no_answer_is_asked_for(verdict: Verdict) -> None:
    made = scorer(ComponentConfig(name="soft_overlong", params={"max_length": 2, "cache": 1}))
    assert [made.score(graded(one, "long"))[0] for one in (Verdict.WRONG, verdict)] == [-1.0, -1.0]


@pytest.mark.parametrize("verdict", list(Verdict))
def test_own_reward_pays_every_sample_the_same(verdict: Verdict) -> None:
    reward, components = scorer(ACCURACY, GATE, own_reward=0.0).score(graded(verdict, "none"))
    assert reward == 0.0
    assert set(components) == {"accuracy", "format"}


def test_a_reward_without_accuracy_needs_no_verdict() -> None:
    assert scorer(FORMAT).score(graded(Verdict.CRASHED))[0] == 0.5


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        scorer(ACCURACY, ACCURACY)


# --- what other processes found ---------------------------------------------------------------

OWN = ComponentConfig(name="my.rewards:one")
HALF = ComponentConfig(name="my.rewards:two", weight=0.5)


def test_a_component_without_a_value_is_left_out_of_the_sum() -> None:
    found = {"my.rewards:one": None, "my.rewards:two": 3.0}
    reward, components = scorer(OWN, HALF).score(graded(Verdict.WRONG), found)
    assert reward == 1.5
    assert components == found


def test_what_tokens_have_earned_is_a_part_of_the_sum_and_is_kept() -> None:
    found = {"my.rewards:one": [0.5, 0.0, -1.0], "my.rewards:two": [1.0, 1.0, 2.0]}
    made = scorer(ACCURACY, OWN, HALF)
    (one,) = made.score_group([graded(Verdict.CORRECT)], [found], [None])
    assert one.reward == 1.0 - 0.5 + 0.5 * 4.0
    assert one.components == {"accuracy": 1.0, "my.rewards:one": -0.5, "my.rewards:two": 4.0}
    assert one.token_rewards == [1.0, 0.5, 0.0]
    # One number is for the whole response, and so is all of a reward that isn't the sum.
    mixed = {"my.rewards:one": [0.5, 0.0, -1.0], "my.rewards:two": 4.0}
    assert made.score_group([graded(Verdict.WRONG)], [mixed], [None])[0].token_rewards == [
        *(0.5, 0.0, -1.0)
    ]
    plain = {"my.rewards:one": 1.0, "my.rewards:two": 4.0}
    assert made.score_group([graded(Verdict.WRONG)], [plain], [None])[0].token_rewards is None
    (hung,) = made.score_group([graded(Verdict.CORRECT)], [found], [Verdict.TIMEOUT])
    assert (hung.reward, hung.token_rewards) == (0.0, None)
    gated = scorer(ACCURACY, OWN, GATE)
    (closed,) = gated.score_group([graded(Verdict.CORRECT, "no format")], [found], [None])
    assert (closed.reward, closed.token_rewards) == (0.0, None)


def test_a_sample_of_which_no_component_says_anything_has_no_reward() -> None:
    found = {"my.rewards:one": None}
    assert scorer(OWN, GATE).score(graded(Verdict.WRONG), found)[0] is None


@pytest.mark.parametrize(
    ("failure", "paid"),
    [(Verdict.CRASHED, None), (Verdict.TIMEOUT, -0.25), (Verdict.MEMORY, -0.25)],
)
def test_a_function_that_fails_pays_by_how_it_failed(failure: Verdict, paid: float | None) -> None:
    made = scorer(ACCURACY, OWN, timeout_pays=-0.25)
    reward, components = made.score(graded(Verdict.CORRECT), {}, failure)
    assert reward == paid
    assert components == {"accuracy": 1.0, "my.rewards:one": None}


# --- groups -----------------------------------------------------------------------------------


def test_a_group_component_sees_the_whole_group() -> None:
    kimi = ComponentConfig(name="length_open_r1")
    samples = [
        Graded(text="a" * length, verdict=verdict)
        for length, verdict in (
            (10, Verdict.CORRECT),
            (20, Verdict.CORRECT),
            (10, Verdict.WRONG),
            (20, Verdict.WRONG),
            (12, Verdict.CRASHED),
        )
    ]
    found = scorer(ACCURACY, kimi).score_group(samples, [{}] * 5, [None] * 5)
    assert [components["length_open_r1"] for _, components, _ in found] == [
        0.5,
        -0.5,
        0.0,
        -0.5,
        None,
    ]
    assert [reward for reward, _, _ in found] == [1.5, 0.5, 0.0, -0.5, None]


def test_a_group_of_equal_lengths_has_nothing_to_compare() -> None:
    samples = [Graded(text="ab", verdict=v) for v in (Verdict.CORRECT, Verdict.WRONG)]
    assert component("length_kimi", {})[1](samples) == [0.0, 0.0]
