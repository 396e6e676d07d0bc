import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8core.numerics import fused
from fp8core.numerics.attention import QUERY_TYPES
from fp8core.numerics.e4m3 import encode, round_to_e4m3
from fp8core.numerics.elementwise import KERNELS, rms_norm, rotate, round_to_bf16
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import E4M3_MAX, AttentionProducts
from fp8core.numerics.rotary import inverse_frequencies

EPS = 1e-6
HIDDEN = 200


def randn(*shape: int, seed: int) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def inputs(tokens: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    x, added = randn(tokens, HIDDEN, seed=1), randn(tokens, HIDDEN, seed=2)
    return x, added, (1 + 0.1 * randn(HIDDEN, seed=3).float()).bfloat16().float()


@pytest.mark.parametrize("adds", [True, False])
def test_the_norm_reads_the_rounded_sum_as_the_decoder_does(adds: bool) -> None:
    x, added, weight = inputs()
    total, normed, inverse = fused.add_norm(x, added if adds else None, weight, EPS)
    expected = KERNELS.sums(x.float() + added.float() if adds else x.float())
    assert (total.dtype, normed.dtype, inverse.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.equal(total.float(), expected)
    assert torch.equal(normed.float(), rms_norm(expected, weight, EPS, round_to_bf16, KERNELS.normalised))
    rms = (expected.double().square().mean(-1) + EPS).sqrt()
    assert torch.allclose(inverse.double() * rms, torch.ones(()).double(), rtol=1e-7)


# SwiGLU

PACKED, POSITIONS = 19, 64
LAYOUT = fused.HeadLayout(query_heads=6, kv_heads=2, head_dim=32)


def tables() -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, sines, and positions of two packed sequences."""
    angles = torch.arange(POSITIONS).float()[:, None] * inverse_frequencies(LAYOUT.head_dim, 10_000.0)
    positions = torch.cat((torch.arange(11), torch.arange(50, 50 + PACKED - 11)))
    return KERNELS.tables(angles.cos()), KERNELS.tables(angles.sin()), positions


def qkv_of(seed: int) -> Tensor:
    return randn(PACKED, (LAYOUT.query_heads + 2 * LAYOUT.kv_heads) * LAYOUT.head_dim, seed=seed)


def norms() -> tuple[Tensor, Tensor]:
    return 1 + randn(LAYOUT.head_dim, seed=2).float() / 16, 1 + randn(LAYOUT.head_dim, seed=3).float() / 8


@pytest.mark.parametrize("normed", [True, False])
def test_q_and_k_are_those_of_the_decoder_and_v_is_itself(normed: bool) -> None:
    qkv, (cos, sin, positions), weights = qkv_of(1), tables(), norms()
    out = fused.norm_rotate(qkv, weights if normed else None, cos, sin, positions, LAYOUT, EPS)
    assert (out.dtype, out.shape) == (torch.bfloat16, qkv.shape)
    width = LAYOUT.query_heads * LAYOUT.head_dim
    last = LAYOUT.kv_heads * LAYOUT.head_dim
    parts = zip(out.split([width, last, last], dim=1), qkv.split([width, last, last], dim=1), strict=True)
    (q, raw_q), (k, raw_k), (v, raw_v) = parts
    assert torch.equal(v, raw_v)
    for found, raw, weight in ((q, raw_q, weights[0]), (k, raw_k, weights[1])):
        # As the decoder has them: [B, heads, T, d].
        heads = raw.float().view(1, PACKED, -1, LAYOUT.head_dim).transpose(1, 2)
        if normed:
            heads = rms_norm(heads, weight, EPS, round_to_bf16, KERNELS.normalised)
        expected = rotate(heads, cos[positions][None, None], sin[positions][None, None], round_to_bf16)
        assert torch.equal(found.float(), expected.transpose(1, 2).reshape(PACKED, -1))


SMALL = fused.HeadLayout(query_heads=4, kv_heads=2, head_dim=16)
SCALES = LayerScales(q=0.0625, k=0.03125, v=0.125)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1), st.sampled_from([2.0**-7, 0.3, 1.0]))
def test_static_codes_are_the_grid_of_the_reference(values: list[float], scale: float) -> None:
    x = torch.tensor(values)
    expected = encode(round_to_e4m3(x / torch.tensor(scale)))
    assert torch.equal(fused.static_codes(x, scale).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("products", QUERY_TYPES)
def test_every_part_has_its_own_scale(products: AttentionProducts) -> None:
    qkv = 10 * torch.randn(5, 8 * 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = [
        *zip(
            fused.head_codes(qkv, SMALL, SCALES, products), fused.head_values(qkv, SMALL, SCALES, products), strict=True
        )
    ]
    given_parts = [*zip(fused.heads_of(qkv, SMALL), vars(SCALES).values(), strict=True)]
    if products != "fp8":
        (codes, values), (q, _) = found.pop(0), given_parts.pop(0)
        assert torch.equal(codes, q)
        assert torch.equal(values, q)
    for (codes, values), (x, scale) in zip(found, given_parts, strict=True):
        assert codes.is_contiguous()
        assert values.is_contiguous()
        grid = round_to_e4m3(x.float() / scale)
        assert torch.equal(codes.float(), grid)
        assert values.dtype == torch.bfloat16
        assert torch.equal(values.float(), grid * scale)
        assert (values.float().abs().max() == E4M3_MAX * scale) == (x.abs().max() > E4M3_MAX * scale)


@pytest.mark.parametrize(("limit", "largest", "next_one"), [(28.0, 28.0, 28.125), (134.6, 134.0, 135.0)])
def test_gradients_pass_by_what_is_not_saturated(limit: float, largest: float, next_one: float) -> None:
    """Also where BF16 does not have the limit, which it would round up to 135."""
    qkv = torch.zeros(3, 8 * 16).bfloat16()
    q, k, v = fused.heads_of(qkv, SMALL)
    q[0, 0, 0], q[0, 0, 1], k[1, 1, 2], k[1, 1, 3], v[2, 0, 4], v[2, 1, 5] = (
        *(largest, next_one, -largest, -next_one),
        *(torch.inf, torch.nan),
    )
    grads = tuple(torch.full_like(x, i + 1).contiguous() for i, x in enumerate((q, k, v)))
    scales = LayerScales(*[limit / E4M3_MAX] * 3)
    unbound = fused.heads_of(fused.head_gradients(grads, qkv, SMALL, scales, "fp16_over_fp8_cache"), SMALL)[0]
    assert (unbound == 1).all(), "Q in FP16 has no codes that saturate"
    of_q, of_k, of_v = fused.heads_of(fused.head_gradients(grads, qkv, SMALL, scales, "fp8"), SMALL)
    for found, value, zeros in ((of_q, 1, [(0, 0, 1)]), (of_k, 2, [(1, 1, 3)]), (of_v, 3, [(2, 0, 4), (2, 1, 5)])):
        assert found.unique().tolist() == [0, value]
        assert (found == 0).nonzero().tolist() == [list(at) for at in zeros]
