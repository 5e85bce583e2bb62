"""Padded sequences ``[B, T]``: masked means, prompts with responses, packing, batches of both.

The trainer itself works on flat tokens without padding (:mod:`tandem.learner.rows.rows`); these functions
are for scripts and notebooks, and for checking one against the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..losses.penalties import entropy_of


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is needed."""

    pad_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of a text."""
        ...


def masked_sum(
    values: Tensor, mask: Tensor, dim: int | None = None, *, divisor: float = 1.0
) -> Tensor:
    """Σ of the values where the mask is on, over a dimension (None = all), divided by ``divisor``.

    A masked NaN or infinity leaks neither into the sum nor into the gradient.
    """
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return (kept.sum() if dim is None else kept.sum(dim)) / divisor


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, *, empty: float = 0.0
) -> Tensor:
    """The mean of the values where the mask is on, over a dimension (None = all).

    Args:
        values: any shape.
        mask: same shape, bool or 0 and 1.
        dim: the dimension to average over.
        empty: result for a slice without any value: 0, so that training never meets a NaN.
    """
    mask = mask.bool()
    total = masked_sum(values, mask, dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    mean = total / count.clamp(min=1).to(total.dtype)
    return torch.where(count > 0, mean, torch.full_like(mean, empty))


def tokenize_pairs(
    prompts: Sequence[str], responses: Sequence[str], tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """Prompts and responses, tokenised separately and joined, padded on the right.

    No special tokens are added: the texts must contain what a template needs. Padding is the
    tokenizer's pad token, else its end-of-sequence token, else 0; it never counts.

    Returns:
        With L the greatest joint length: ``input_ids`` ``[B, L − 1]`` int64, without the last
        token; ``labels`` ``[B, L − 1]``, without the first; ``response_mask`` ``[B, L − 1]`` bool,
        True where the label is a token of the response.
    """
    parts = [
        (
            tokenizer.encode(prompt, add_special_tokens=False),
            tokenizer.encode(response, add_special_tokens=False),
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return pad_pairs(parts, next(pad for pad in pads if pad is not None))


def pad_pairs(
    parts: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int = 0
) -> dict[str, Tensor]:
    """Like :func:`tokenize_pairs` for token ids, with one prompt and one response each."""
    width = max((len(prompt) + len(response) for prompt, response in parts), default=1)
    ids = torch.full((len(parts), max(width, 1)), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for number, (prompt, response) in enumerate(parts):
        joined = [*prompt, *response]
        ids[number, : len(joined)] = torch.tensor(joined, dtype=torch.int64)
        mask[number, len(prompt) : len(joined)] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def label_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """``[..., T]`` log-probs of labels from logits ``[..., T, V]``."""
    return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def response_log_probs(
    model: Any, input_ids: Tensor, labels: Tensor, *, with_entropy: bool = False
) -> dict[str, Tensor]:
    """``log_probs`` and, on request, ``token_entropy``, ``[B, T]`` each, of a causal model.

    Prompt and padding are not masked; that is left to the loss. Whole logits are in memory: for
    training with large vocabularies see :func:`tandem.learner.forward.logprobs.token_logprobs`.
    """
    logits = model(input_ids).logits
    result = {"log_probs": label_log_probs(logits, labels)}
    if with_entropy:
        result["token_entropy"] = entropy_of(logits)
    return result


def sequence_log_prob(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Scalar ``Σ_t log π(y_t | prompt, y_<t)`` of one response, for the preference losses."""
    one = pad_pairs([(prompt, response)])
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in one.items()}
    logprobs = response_log_probs(model, batch["input_ids"], batch["labels"])["log_probs"]
    return masked_sum(logprobs, batch["response_mask"])


class PackedDataset:
    """Documents joined into one line of tokens and cut into pieces of equal length.

    Piece i has ``input_ids`` ``line[i L : (i + 1) L]`` and ``labels`` one token further; what is
    left at the end, too short for both, is dropped.

    Args:
        documents: token ids of each document, with the special tokens that it needs.
        length: L.
        generator: shuffles the documents first; None = in their order.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        length: int,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        order = range(len(documents))
        if generator is not None:
            order = torch.randperm(len(documents), generator=generator).tolist()  # type: ignore[assignment]
        line = [token for number in order for token in documents[number]]
        self.length = length
        self._line = torch.tensor(line, dtype=torch.int64)

    def __len__(self) -> int:
        return max(0, (len(self._line) - 1) // self.length)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.length
        return {
            "input_ids": self._line[start : start + self.length],
            "labels": self._line[start + 1 : start + 1 + self.length],
        }


class Batches:
    """Stacked pieces of a data set; each iteration is one pass.

    Args:
        pieces: a sized collection of mappings of tensors.
        size: size of a batch; the last may be smaller.
        generator: shuffles the pieces anew for each pass; None = in their order.
    """

    def __init__(self, pieces: Any, size: int, *, generator: torch.Generator | None = None) -> None:
        self._pieces = pieces
        self._size = size
        self._generator = generator

    def __len__(self) -> int:
        return -(-len(self._pieces) // self._size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = list(range(len(self._pieces)))
        if self._generator is not None:
            order = torch.randperm(len(order), generator=self._generator).tolist()
        for start in range(0, len(order), self._size):
            chosen: list[Mapping[str, Tensor]] = [
                self._pieces[number] for number in order[start : start + self._size]
            ]
            yield {name: torch.stack([one[name] for one in chosen]) for name in chosen[0]}
