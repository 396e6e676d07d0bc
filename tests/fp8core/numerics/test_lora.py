"""Merged weights are the same in any cut, and gradients reach both adapters."""

import pytest
import torch

from fp8core.numerics import lora
from fp8core.numerics.lora import merged_weight, with_gradients


@pytest.fixture
def weights():
    """W, B and A with a rank of 6."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(300, 90, generator=generator).bfloat16()
    return base, *(0.1 * torch.randn(shape, generator=generator) for shape in ((300, 6), (6, 90)))


def test_a_merged_weight_adds_products_in_the_order_of_the_rank(weights) -> None:
    base, left, right = weights
    merged = merged_weight(base, left, right, 1 / 3)
    for row, column in ((0, 0), (299, 89), (17, 55)):
        total = 0.0
        for rank in range(6):
            total += float(left[row, rank]) * float(right[rank, column])
        expected = torch.tensor(total * (1 / 3) + float(base[row, column]), dtype=torch.float64).float()
        assert merged[row, column] == expected


def test_rows_of_a_merged_weight_are_the_same_in_any_cut(weights, monkeypatch) -> None:
    base, left, right = weights
    whole = merged_weight(base, left, right, 0.3)
    assert torch.equal(merged_weight(base[128:201], left[128:201], right, 0.3), whole[128:201])
    assert merged_weight(base[:0], left[:0], right, 0.3).shape == (0, 90)
    monkeypatch.setattr(lora, "_CHUNK", 200)
    assert torch.equal(merged_weight(base, left, right, 0.3), whole)


def test_gradients_are_those_of_an_explicit_merge(weights) -> None:
    base, left, right = weights
    given = torch.randn(base.shape, generator=torch.Generator().manual_seed(1))
    narrow = [each.clone().requires_grad_() for each in (left, right)]
    (with_gradients(merged_weight(base, left, right, 0.7), *narrow, 0.7) * given).sum().backward()
    wide = [each.double().requires_grad_() for each in (left, right)]
    ((base.double() + 0.7 * wide[0] @ wide[1]) * given.double()).sum().backward()
    for found, expected in zip(narrow, wide, strict=True):
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)
