"""Rows by expert, and experts on them against the forward that trains."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8core.models.experts import MlpFormats, MlpWeights, mix
from fp8core.numerics.e4m3 import tile_codes
from fp8core.numerics.elementwise import STEPWISE, round_to_bf16
from fp8core.numerics.grouped import (
    PADDING,
    Quantisers,
    gathered_codes,
    group_rows,
    grouped_experts,
    most_rows,
    weighted_sum,
)
from fp8core.numerics.linear import Fp8BlockLinear, StoredWeight, load_weight
from fp8core.numerics.recipe import FP32, FP32_ACTIVATIONS, POW2, RECIPES, TILE

HIDDEN, WIDTH, COUNT = 256, 128, 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen_experts(tokens: int, k: int, experts: int, seed: int = 0) -> Tensor:
    """No expert twice for a token, in any order, as int32."""
    drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return drawn.argsort(dim=1)[:, :k].int()


@given(st.integers(1, 300), st.integers(1, 4), st.integers(4, 9), st.integers(0, 5))
def test_every_slot_has_its_row_and_no_block_has_two_experts(tokens, k, experts, seed):
    chosen = chosen_experts(tokens, k, experts, seed)
    found = group_rows(chosen, experts)
    assert len(found.tokens) == len(found.experts) == most_rows(tokens * k, experts)
    assert len(set(found.places.flatten().tolist())) == tokens * k
    assert torch.equal(found.experts[found.places], chosen)
    assert torch.equal(found.tokens[found.places], torch.arange(tokens)[:, None].expand(-1, k))
    assert int((found.experts != PADDING).sum()) == tokens * k
    for block in found.experts.view(-1, TILE).tolist():
        owned = [expert for expert in block if expert != PADDING]
        assert len(set(owned)) <= 1
        assert block[: len(owned)] == owned, "padding ends a block"


def test_nothing_waits_for_the_device():
    """On the meta device, which has no values, whatever reads one is an error."""
    chosen = torch.empty(5, 2, dtype=torch.int32, device="meta")
    rows = group_rows(chosen, 8)
    assert rows.tokens.shape == rows.experts.shape == (most_rows(10, 8),)
    codes = torch.empty(5, HIDDEN, dtype=torch.float8_e4m3fn, device="meta"), torch.empty(5, 2, device="meta")
    taken, scales = gathered_codes(codes, rows.tokens)
    assert (taken.shape, scales.shape) == ((most_rows(10, 8), HIDDEN), (most_rows(10, 8), 2))
    outputs = torch.empty(most_rows(10, 8), HIDDEN, dtype=torch.bfloat16, device="meta")
    assert weighted_sum(outputs, rows.places, torch.empty(5, 2, device="meta")).shape == (5, HIDDEN)


def weights(recipe):
    """Experts as the engine holds them, and as the forward that trains does."""
    parts = [
        [
            tile_codes(normal(*shape, seed=3 * expert + i) * shape[1] ** -0.5, recipe.weights)
            for i, shape in enumerate(SHAPES)
        ]
        for expert in range(COUNT)
    ]
    held = tuple(
        (
            torch.stack([torch.cat([parts[e][i][0].view(torch.uint8) for i in of]) for e in range(COUNT)]).view(
                torch.float8_e4m3fn
            ),
            torch.stack([torch.cat([parts[e][i][1] for i in of]) for e in range(COUNT)]),
        )
        for of in ((0, 1), (2,))
    )
    loaded = [
        MlpWeights(load_weight([StoredWeight(*part) for part in each[:2]]), load_weight([StoredWeight(*each[2])]))
        for each in parts
    ]
    return held, loaded


SHAPES = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_experts_are_those_of_the_forward_that_trains(recipe):
    held, loaded = weights(recipe)
    x = normal(150, HIDDEN, seed=50).bfloat16()
    chosen = chosen_experts(150, 3, COUNT)
    gates = normal(150, 3, seed=51).softmax(-1)
    found = grouped_experts(x, chosen, gates, held, Quantisers(recipe.activations))
    formats = MlpFormats(Fp8BlockLinear(recipe), round_to_bf16, STEPWISE)
    ascending = chosen.sort(dim=1)
    expected = mix(x.float(), loaded, formats, ascending.values.long(), gates.gather(1, ascending.indices))
    apart = (found.float() - expected).abs()
    # Sums in FP32 and in FP64 round to other BF16 numbers now and then, next to one another.
    assert (apart <= 2.0**-7 * expected.abs() + 1e-6).all()
    assert (apart > 0).float().mean() < 0.01
    changed = POW2 if recipe.activations.rule == "fp32" else FP32
    other = grouped_experts(x, chosen, gates, held, Quantisers(changed.activations))
    assert (other != found).float().mean() > 0.5, "the scale rule decides"


def test_a_token_does_not_depend_on_others():
    held, _ = weights(FP32_ACTIVATIONS)
    x, chosen = normal(40, HIDDEN, seed=60).bfloat16(), chosen_experts(40, 2, COUNT)
    gates = normal(40, 2, seed=61).softmax(-1)
    together = grouped_experts(x, chosen, gates, held, Quantisers(FP32_ACTIVATIONS.activations))
    for rows in (slice(0, 1), slice(7, 20)):
        assert torch.equal(
            grouped_experts(x[rows], chosen[rows], gates[rows], held, Quantisers(FP32_ACTIVATIONS.activations)),
            together[rows],
        )
