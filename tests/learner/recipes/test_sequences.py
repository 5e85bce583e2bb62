"""Masked sums and means, prompts with responses, packing and batches."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.learner.recipes.sequences import (
    Batches,
    PackedDataset,
    masked_mean,
    masked_sum,
    pad_pairs,
    response_log_probs,
    sequence_log_prob,
    tokenize_pairs,
)

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[True, False, False], [True, True, False]])


@pytest.mark.parametrize(
    ("dim", "total", "mean"),
    [
        (None, 10, 10 / 3),
        (0, [5, 5, 0], [2.5, 5, 0]),
        (1, [1, 9], [1, 4.5]),
        (-1, [1, 9], [1, 4.5]),
    ],
)
def test_masked_sums_and_means(dim: int | None, total: Any, mean: Any) -> None:
    torch.testing.assert_close(masked_sum(VALUES, MASK, dim), torch.tensor(total).float())
    torch.testing.assert_close(masked_mean(VALUES, MASK, dim), torch.tensor(mean).float())
    halved = masked_sum(VALUES, MASK.int(), dim, divisor=2.0)
    torch.testing.assert_close(halved, torch.tensor(total) / 2)


def test_an_empty_slice_is_what_one_asks_for() -> None:
    assert masked_mean(VALUES, MASK, 0, empty=math.nan)[2].isnan()
    assert masked_mean(VALUES, torch.zeros_like(MASK)).item() == 0.0


def test_nothing_leaks_out_of_a_mask() -> None:
    leaf = torch.tensor([1.0, math.nan, -math.inf], requires_grad=True)
    found = masked_mean(leaf, torch.tensor([True, False, False]))
    found.backward()
    assert found.item() == 1.0
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 0.0, 0.0]


class Words:
    """A tokenizer of words: their lengths are their ids."""

    pad_token_id: int | None = None
    eos_token_id: int | None = 99

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [len(word) for word in text.split()]


def test_prompts_and_responses_are_joined_and_shifted() -> None:
    found = tokenize_pairs(["ab abc", "a"], ["abcd", "ab abcde a"], Words())
    assert found["input_ids"].tolist() == [[2, 3, 4], [1, 2, 5]]
    assert found["labels"].tolist() == [[3, 4, 99], [2, 5, 1]]
    assert found["response_mask"].tolist() == [[False, True, False], [True, True, True]]


def test_padding_and_other_rows_do_not_reach_a_response(made_up: ModuleType) -> None:
    model = made_up.tiny_model()
    parts = [([5, 6, 7], [8, 9]), ([5], [10, 11, 12, 13, 14])]
    both = pad_pairs(parts, pad=3)
    scored = response_log_probs(model, both["input_ids"], both["labels"], with_entropy=True)
    sums = masked_sum(scored["log_probs"], both["response_mask"], 1)
    for number, (prompt, response) in enumerate(parts):
        alone = sequence_log_prob(model, prompt, response)
        torch.testing.assert_close(sums[number], alone, atol=1e-5, rtol=1e-5)
    assert (scored["token_entropy"] > 0).all()


def test_documents_are_packed_into_pieces_of_equal_length() -> None:
    packed = PackedDataset([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 4)
    assert [one["input_ids"].tolist() for one in packed] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [one["labels"].tolist() for one in packed] == [[2, 3, 4, 5], [6, 7, 8, 9]]
    # One token less, and the last piece would lack its last label.
    assert len(PackedDataset([[1, 2, 3], [4, 5], [6, 7, 8]], 4)) == 1
    assert len(PackedDataset([], 4)) == 0


def test_shuffled_documents_stay_whole() -> None:
    documents = [[n, n, n] for n in range(20)]
    generator = torch.Generator().manual_seed(1)
    shuffled = PackedDataset(documents, 3, generator=generator)
    found = [one["input_ids"].tolist() for one in shuffled]
    assert all(len(set(piece)) == 1 for piece in found)
    assert found != [one["input_ids"].tolist() for one in PackedDataset(documents, 3)]


def test_batches_go_through_all_pieces_once() -> None:
    packed = PackedDataset([list(range(23))], 2)
    batches = Batches(packed, 4, generator=torch.Generator().manual_seed(2))
    assert len(packed) == 11
    assert len(batches) == 3
    passes = []
    for _ in range(2):
        found = list(batches)
        assert [len(batch["labels"]) for batch in found] == [4, 4, 3]
        passes.append([row for batch in found for row in batch["input_ids"].tolist()])
    assert sorted(passes[0]) == sorted(passes[1]) == [[n, n + 1] for n in range(0, 22, 2)]
    assert passes[0] != passes[1]
