"""A token's experts give it the same bytes in any company."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.numerics.e4m3 import column_parts, row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.gemm import forward_gemm
from fp8core.numerics.grouped import (
    GROUP_MULTIPLE,
    choose_experts,
    expert_rows,
    gate_gradient,
    gathered,
    gathered_codes,
    grouped_gemm,
    mix_backward,
    mixed,
    weighted_sum,
)
from fp8core.numerics.recipe import FP32_ACTIVATIONS

HIDDEN, OUT, COUNT = 160, 72, 4
ROWS, COLUMNS = FP32_ACTIVATIONS.activations, FP32_ACTIVATIONS.tokens


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


WEIGHTS = [tile_codes(weight, FP32_ACTIVATIONS.weights) for weight in normal(COUNT, OUT, HIDDEN)]
STACKED = (
    torch.stack([codes.view(torch.uint8) for codes, _ in WEIGHTS]).view(torch.float8_e4m3fn),
    torch.stack([scales for _, scales in WEIGHTS]),
)
TOKENS = normal(300, HIDDEN) * 2.0 ** torch.randint(-9, 9, (300, 1), generator=torch.Generator().manual_seed(1))


@st.composite
def routes(draw):
    """Experts of each token, ascending, int64 [tokens, k]: where few are drawn from, all tokens go to the same."""
    k = draw(st.integers(1, 3))
    open_ones = draw(st.sets(st.integers(0, COUNT - 1), min_size=k))
    tokens = draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    order = torch.rand(tokens, len(open_ones), generator=generator).argsort(-1)[:, :k]
    return torch.tensor(sorted(open_ones))[order].sort(-1).values


def outputs(x, experts):
    rows = expert_rows(experts, COUNT, GROUP_MULTIPLE)
    return rows, grouped_gemm(gathered_codes(row_codes(x, ROWS), rows), STACKED, rows)


@given(routes())
def test_a_row_is_the_product_of_one_row_in_any_company(experts) -> None:
    x = TOKENS[: len(experts)]
    rows, found = outputs(x, experts)
    gates = torch.rand(experts.shape, generator=torch.Generator().manual_seed(2))
    total = mixed(found, rows, gates)
    for token in {0, len(x) // 2, len(x) - 1}:
        one = slice(token, token + 1)
        plain = torch.cat([forward_gemm(row_codes(x[one], ROWS), WEIGHTS[e]) for e in experts[token].tolist()])
        assert torch.equal(found[rows.places[token]], plain)
        alone, by_row = outputs(x[one], experts[one])
        assert torch.equal(mixed(by_row, alone, gates[one])[0], total[token])
    filled = torch.zeros(len(found), dtype=torch.bool).index_fill_(0, rows.places.flatten(), True)
    assert not found[~filled].any()


@given(routes())
def test_codes_are_those_of_each_expert_by_itself(experts) -> None:
    """By row they may be made before tokens are gathered; by column no group has tokens of two experts."""
    x = TOKENS[: len(experts)]
    rows = expert_rows(experts, COUNT, GROUP_MULTIPLE)
    assert all(count % 128 == 0 for count in rows.counts)
    by_expert = gathered(x, rows)
    by_row, by_column = row_and_column_codes(by_expert, ROWS, COLUMNS, None, rows.spans)
    codes, scales = gathered_codes(row_codes(x, ROWS), rows)
    assert torch.equal(codes.view(torch.uint8), by_row[0].view(torch.uint8))
    real = rows.tokens < len(x)
    assert torch.equal(scales[real], by_row[1][real])
    parts = zip(by_expert.split(rows.counts), column_parts(by_column, rows.counts), strict=True)
    for expert, (part, found) in enumerate(parts):
        own = x[(experts == expert).any(-1)]
        assert torch.equal(part[: len(own)], own)
        assert (rows.owners[rows.places[experts == expert]] == expert).all()
        assert len(part) - len(own) < 128
        if len(own):
            expected = row_and_column_codes(part, ROWS, COLUMNS)[1]
            assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
            assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("normalise_top_k", [True, False])
def test_gradients_of_the_mix_are_those_of_autograd(normalise_top_k) -> None:
    logits, grad = normal(50, COUNT).float(), normal(50, HIDDEN)
    experts, gates = choose_experts(logits, 2, normalise_top_k)
    rows = expert_rows(experts, COUNT, GROUP_MULTIPLE)
    by_row = gathered(normal(50, HIDDEN), rows)
    leaves = by_row.double().requires_grad_(), logits.double().requires_grad_()
    shares = (leaves[1].gather(-1, experts) if normalise_top_k else leaves[1]).softmax(-1)
    shares = shares if normalise_top_k else shares.gather(-1, experts)
    assert torch.allclose(gates.double(), shares, rtol=1e-6, atol=0)
    (shares[..., None] * leaves[0][rows.places]).sum(1).backward(grad.double())
    of_rows, of_gates = mix_backward(grad, by_row, rows, gates)
    assert torch.allclose(of_rows.double(), leaves[0].grad, rtol=2**-8, atol=1e-7)
    of_logits = gate_gradient(of_gates, logits, experts, gates, normalise_top_k)
    assert torch.allclose(of_logits.double(), leaves[1].grad, rtol=1e-4, atol=1e-4)


def test_the_sum_is_in_the_order_of_the_experts() -> None:
    """(1 + 2^60) - 2^60 is 0 in FP64, and (2^60 - 2^60) + 1 is 1."""
    by_expert = torch.tensor([[[1.0], [2.0**60], [-(2.0**60)]], [[2.0**60], [-(2.0**60)], [1.0]]])
    assert weighted_sum(by_expert, torch.ones(2, 3)).tolist() == [[0.0], [1.0]]
