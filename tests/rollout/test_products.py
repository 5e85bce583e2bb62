"""Products with large matrices, taken in pieces."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tandem.rollout.decoding import products
from tandem.rollout.decoding.products import LARGE_BYTES, linear

INNER = 96
LARGE = LARGE_BYTES // (4 * INNER) + 7
"""Rows of a matrix that is large, and no multiple of a piece."""


@pytest.mark.parametrize("rows", [1, 2, products.FEW_ROWS, products.FEW_ROWS + 1, 17])
@pytest.mark.parametrize("out", [5, LARGE])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_library_s_product(rows: int, out: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INNER, generator=generator)
    weight = torch.randn(out, INNER, generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    found = linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape
    assert found.is_contiguous()
    assert float((found - exact).abs().max()) < 1e-4


def test_other_dtypes_are_the_library_s_own() -> None:
    x = torch.randn(4, INNER, dtype=torch.bfloat16)
    weight = torch.randn(LARGE * 2, INNER, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
