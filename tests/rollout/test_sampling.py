"""Noise belongs to (seed, group, sample, position); a draw is the inverse of the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tandem.common.records import SamplingParams
from tandem.common.seeds import keyed_generator
from tandem.rollout.decoding.sampling import CHUNK, Noise, draw, kept


def numbers(noise: Noise, rows: int, count: int) -> np.ndarray:
    return np.stack([noise.next(rows) for _ in range(count)], axis=1)


def test_a_rows_numbers_are_those_of_its_keyed_generator() -> None:
    noise = Noise()
    noise.put([0, 1], [(3, "0-1", 0, 0), (3, "0-1", 1, 0)])
    found = numbers(noise, 2, 2 * CHUNK + 5)
    for index in range(2):
        expected = keyed_generator(3, "0-1", index).random(2 * CHUNK + 5)
        np.testing.assert_array_equal(found[index], expected)


@pytest.mark.parametrize("first", [1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 3, 1000])
def test_a_row_may_begin_at_any_position(first: int) -> None:
    noise = Noise()
    noise.put([0], [(0, "1-9", 4, first)])
    expected = keyed_generator(0, "1-9", 4).random(first + CHUNK + 2)[first:]
    np.testing.assert_array_equal(numbers(noise, 1, CHUNK + 2)[0], expected)


def test_moving_and_replacing_rows_leaves_the_others_numbers() -> None:
    noise = Noise()
    noise.put(range(4), [(0, "0-0", i, i) for i in range(4)])
    numbers(noise, 4, 10)
    noise.move(np.array([0]), np.array([3]))
    noise.put([2], [(0, "0-9", 0, 0)])
    found = numbers(noise, 3, 5)
    for row, (group, index, first) in enumerate([("0-0", 3, 13), ("0-0", 1, 11), ("0-9", 0, 0)]):
        expected = keyed_generator(0, group, index).random(first + 5)[first:]
        np.testing.assert_array_equal(found[row], expected)


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]])).repeat(5, 1)
    uniforms = torch.tensor([0.0, 0.2, 0.3, 0.74, 0.76], dtype=torch.float64)
    tokens, logprobs = draw(
        logits, SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024), uniforms
    )
    assert tokens.tolist() == [0, 0, 1, 1, 2]
    np.testing.assert_allclose(logprobs[2], math.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2], logits[0, 4] = 0.0, 1.0
    tokens, logprobs = draw(
        logits,
        SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        torch.tensor([uniform], dtype=torch.float64),
    )
    assert int(tokens[0]) in (2, 4)
    assert math.isfinite(float(logprobs[0]))


def test_temperature_divides_the_logits() -> None:
    logits = torch.randn(3, 7)
    found = kept(
        logits, SamplingParams(temperature=0.5, top_p=1.0, top_k=0, max_new_tokens=1024)
    ).log_softmax(-1)
    torch.testing.assert_close(found, (2 * logits).log_softmax(-1))


def test_greedy_takes_the_most_likely_token_at_temperature_one_log_probs() -> None:
    logits = torch.randn(4, 9)
    tokens, logprobs = draw(
        logits,
        SamplingParams(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        torch.zeros(4, dtype=torch.float64),
    )
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


def test_top_k_comes_before_top_p() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    found = kept(
        logits, SamplingParams(top_k=3, top_p=0.5, temperature=1.0, max_new_tokens=1024)
    ).softmax(-1)[0]
    # Of the three kept, renormalised 0.44, 0.33, 0.22, two reach 0.5.
    np.testing.assert_allclose(found, [4 / 7, 3 / 7, 0, 0], atol=1e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-38, 1.0), (1e-50, 1.0), (1.0, 1e-50)])
def test_the_likeliest_token_stays_however_narrow_the_distribution_is(
    temperature: float, top_p: float
) -> None:
    logits = torch.tensor([[7.0, 30.0, -50.0, float("-inf")], [1e4, -1e4, 0.0, 9e3]])
    tokens, logprobs = draw(
        logits,
        SamplingParams(temperature=temperature, top_p=top_p, top_k=0, max_new_tokens=1024),
        torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64),
    )
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]
