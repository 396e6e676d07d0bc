import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.numerics.e4m3 import E4M3_MAX, encode, round_to_e4m3
from fp8core.numerics.fused_head_codes import head_codes, head_gradients, head_values, static_codes
from fp8core.numerics.fused_rotary import HeadLayout, heads_of
from fp8core.numerics.kv_scales import LayerScales

LAYOUT = HeadLayout(query_heads=4, kv_heads=2, head_dim=16)
SCALES = LayerScales(q=0.0625, k=0.03125, v=0.125)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1), st.sampled_from([2.0**-7, 0.3, 1.0]))
def test_static_codes_are_the_grid_of_the_reference(values: list[float], scale: float) -> None:
    x = torch.tensor(values)
    expected = encode(round_to_e4m3(x / torch.tensor(scale)))
    assert torch.equal(static_codes(x, scale).view(torch.uint8), expected.view(torch.uint8))


def test_every_part_has_its_own_scale() -> None:
    qkv = 10 * torch.randn(5, 8 * 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = zip(head_codes(qkv, LAYOUT, SCALES), head_values(qkv, LAYOUT, SCALES), strict=True)
    given_parts = zip(heads_of(qkv, LAYOUT), vars(SCALES).values(), strict=True)
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
    q, k, v = heads_of(qkv, LAYOUT)
    q[0, 0, 0], q[0, 0, 1], k[1, 1, 2], k[1, 1, 3], v[2, 0, 4], v[2, 1, 5] = (
        *(largest, next_one, -largest, -next_one),
        *(torch.inf, torch.nan),
    )
    grads = tuple(torch.full_like(x, i + 1).contiguous() for i, x in enumerate((q, k, v)))
    scales = LayerScales(*[limit / E4M3_MAX] * 3)
    of_q, of_k, of_v = heads_of(head_gradients(grads, qkv, LAYOUT, scales), LAYOUT)
    for found, value, zeros in ((of_q, 1, [(0, 0, 1)]), (of_k, 2, [(1, 1, 3)]), (of_v, 3, [(2, 0, 4), (2, 1, 5)])):
        assert found.unique().tolist() == [0, value]
        assert (found == 0).nonzero().tolist() == [list(at) for at in zeros]
