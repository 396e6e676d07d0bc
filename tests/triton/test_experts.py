"""Kernels of experts against their reference: routes, rows, codes by expert, sums."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.numerics.e4m3 import column_parts, row_and_column_codes, row_codes
from fp8core.numerics.fused import swiglu_backward_codes, swiglu_codes, swiglu_row_codes
from fp8core.numerics.grouped import (
    FEWEST,
    GROUP_MULTIPLE,
    NO_EXPERT,
    ExpertRows,
    choose_experts,
    expert_rows,
    gathered,
    gathered_codes,
    gathered_row_and_column_codes,
    grouped_weight_gradient,
    mix_backward,
    mixed,
    token_sums,
)
from fp8core.numerics.recipe import FP32_ACTIVATIONS

GROUPS = FP32_ACTIVATIONS.activations, FP32_ACTIVATIONS.tokens
# Tokens, experts, experts of a token: one token, all experts, Qwen3-30B-A3B. The interpreter takes only the first two.
SMALL = [(1, 8, 2), (37, 5, 3), (70, 2, 2)]
LARGE = [(1, 128, 8), (300, 128, 8), (20_000, 8, 2)]
GPU = pytest.mark.gpu
ROUTES = pytest.mark.parametrize(
    ("route", "device"),
    [
        *((route, "interpreter") for route in SMALL),
        *(pytest.param(route, "gpu", marks=GPU) for route in [*SMALL, *LARGE]),
    ],
    indirect=["device"],
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def on(device: torch.device, value: Any) -> Any:
    if isinstance(value, ExpertRows):
        fields = value.sizes, value.owners, value.slots, value.places, value.spans
        return ExpertRows(*(each.to(device) for each in fields))
    return tuple(on(device, each) for each in value) if isinstance(value, tuple) else value.to(device)


def rows_of(tokens: int, count: int, k: int) -> tuple[Tensor, ExpertRows]:
    """Experts, with one that nobody chose where there are more than are chosen, and the reference's rows."""
    logits = random(tokens, count).float()
    logits[:, 0] = -30.0
    experts = choose_experts(logits, k, True)[0]
    return experts, expert_rows(experts, count, GROUP_MULTIPLE)


@ROUTES
@pytest.mark.parametrize("normalise_top_k", [True, False])
def test_the_choice_is_that_of_the_reference(device, run, route, normalise_top_k: bool) -> None:
    tokens, count, k = route
    # Of so few values many are equal.
    logits = (random(tokens, count) * 2).round().float()
    experts, gates = choose_experts(logits, k, normalise_top_k)
    found, found_gates = run(choose_experts, logits.to(device), k, normalise_top_k)
    assert torch.equal(found.cpu(), experts)
    assert torch.allclose(found_gates.cpu(), gates, rtol=1e-6, atol=0)


def test_a_logit_that_is_no_number_reaches_the_gates(device, run) -> None:
    logits = random(3, 8).float()
    logits[1, 5] = torch.nan
    experts, gates = run(choose_experts, logits.to(device), 2, True)
    assert int(experts.max()) < 8
    assert gates.isnan().any(-1).tolist() == [False, True, False]


@ROUTES
@pytest.mark.parametrize("multiple", [GROUP_MULTIPLE, FEWEST])
def test_rows_lie_as_in_the_reference(device, run, multiple: int, route) -> None:
    experts = rows_of(*route)[0]
    rows = expert_rows(experts, route[1], multiple)
    found = run(expert_rows, experts.to(device), route[1], multiple)
    total = sum(rows.counts)
    assert found.multiple == multiple
    assert found.counts == rows.counts
    assert torch.equal(found.places.cpu(), rows.places)
    for name, size in (("owners", total), ("slots", total), ("spans", total // multiple)):
        assert torch.equal(getattr(found, name)[:size].cpu(), getattr(rows, name)), name
    assert (found.owners[total:] == NO_EXPERT).all()
    assert (found.slots[total:] == experts.numel()).all()


@ROUTES
def test_rows_and_their_codes_are_gathered(device, run, route) -> None:
    rows = rows_of(*route)[1]
    x = random(route[0], 200)
    own = on(device, rows)
    assert torch.equal(run(gathered, x.to(device), own).cpu(), gathered(x, rows))
    expected = run(row_and_column_codes, gathered(x, rows).to(device), *GROUPS, None, own.spans)
    for found, side in zip(run(gathered_row_and_column_codes, x.to(device), own, *GROUPS), expected, strict=True):
        for each, reference in zip(found, side, strict=True):
            assert torch.equal(each.contiguous().view(torch.uint8), reference.contiguous().view(torch.uint8))
    inner = random(len(rows.slots), 256)
    filled = rows.slots < rows.places.numel()
    # What lies in rows without a token is nobody's.
    inner[~filled] = torch.nan
    for found, expected in (
        (
            run(gathered_codes, run(row_codes, x.to(device), GROUPS[0]), own),
            gathered_codes(row_codes(x, GROUPS[0]), rows),
        ),
        (
            run(swiglu_row_codes, inner.to(device), GROUPS[0], None, own),
            run(swiglu_row_codes, inner.nan_to_num().to(device), GROUPS[0]),
        ),
    ):
        for each, reference in zip(found, expected, strict=True):
            each, reference = (x.cpu()[filled] for x in (each, reference))
            assert torch.equal(each.view(torch.uint8), reference.view(torch.uint8))
        assert found[1].stride(0) == 1


@ROUTES
@pytest.mark.parametrize("operation", [row_and_column_codes, swiglu_codes, swiglu_backward_codes])
def test_columns_of_an_expert_lie_together(device, run, operation, route) -> None:
    rows = rows_of(*route)[1]
    size = len(rows.slots)
    operands = (
        (random(size, 256),) if operation is not swiglu_backward_codes else (random(size, 128), random(size, 256))
    )
    found = run(operation, *on(device, operands), *GROUPS, None, rows.spans.to(device))[1]
    plain = run(operation, *on(device, operands), *GROUPS)[1]
    for (codes, scales), part, by_group in zip(
        column_parts(found, rows.counts),
        plain[0].split(rows.counts, dim=1),
        plain[1].split([count // 128 for count in rows.counts], dim=1),
        strict=True,
    ):
        assert torch.equal(codes.view(torch.uint8), part.view(torch.uint8))
        assert torch.equal(scales, by_group)


@ROUTES
def test_sums_over_experts_and_their_gradients(device, run, route) -> None:
    tokens, _count, k = route
    rows = rows_of(*route)[1]
    outputs, grad = random(len(rows.slots), 200), random(tokens, 200, seed=1)
    gates = torch.rand(tokens, k, generator=torch.Generator().manual_seed(2))
    own = on(device, rows)
    assert torch.equal(run(mixed, outputs.to(device), own, gates.to(device)).cpu(), mixed(outputs, rows, gates))
    sums = run(token_sums, outputs.to(device), own).cpu()
    assert torch.allclose(sums, token_sums(outputs, rows), rtol=1e-5, atol=1e-5)
    found = run(mix_backward, *on(device, (grad, outputs)), own, gates.to(device))
    for each, expected in zip(found, mix_backward(grad, outputs, rows, gates), strict=True):
        assert torch.allclose(each.cpu().float(), expected.float(), rtol=2**-7, atol=1e-4)


@ROUTES
def test_gradients_of_weights_are_sums_over_an_experts_tokens(device, run, route) -> None:
    tokens, count, _k = route
    rows = rows_of(*route)[1]
    sides = [
        row_and_column_codes(gathered(random(tokens, width, seed=width), rows), *GROUPS, None, rows.spans)[1]
        for width in (192, 256)
    ]
    total = random(count, 192, 256, seed=3).float()
    by_group = [(codes.to(device), scales.t().contiguous().to(device).t()) for codes, scales in sides]
    found = run(grouped_weight_gradient, *by_group, on(device, rows), total.clone().to(device))
    expected = grouped_weight_gradient(*sides, rows, total.clone())
    assert (found.cpu() - expected).norm() <= 1e-3 * expected.norm()
    alone = [expert for expert, size in enumerate(rows.counts) if not size]
    assert torch.equal(found[alone].cpu(), total[alone])
