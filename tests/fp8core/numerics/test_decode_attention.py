"""The reference of the decode kernel, which runs on a GPU alone (tests/gpu)."""

import math

import pytest
import torch

from fp8core.numerics.attention import Fp8Attention, Fp32Attention
from fp8core.numerics.decode_attention import HEAD_DIM, decode_attention_reference, partition_of
from fp8core.numerics.kv_scales import LayerScales

SCALES = LayerScales(q=0.004, k=0.03125, v=0.125)
PAGE, KEYS, KV_HEADS, GROUP = 16, 77, 2, 4


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * 30).to(torch.float8_e4m3fn)


def test_is_attention_with_e4m3_weights() -> None:
    """As far from attention without rounded weights as the decoder's own is, and not further."""
    query, keys, values = drawn(1, KV_HEADS * GROUP, HEAD_DIM), *(drawn(n, PAGE, KV_HEADS, HEAD_DIM) for n in (6, 7))
    table = torch.tensor([[4, 0, 3, 1, 2, 5]], dtype=torch.int32)
    scales = tuple(torch.tensor(scale) for scale in (SCALES.q, SCALES.k, SCALES.v))
    found = decode_attention_reference(query, keys, values, table, torch.tensor([KEYS]), scales)[0]
    q = query.float()[0, None, :, None] * SCALES.q
    k, v = (x[table[0].long()].flatten(0, 1)[:KEYS].float().transpose(0, 1)[None] for x in (keys, values))
    k, v, mask = k * SCALES.k, v * SCALES.v, torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    theirs, plain = (
        attention.attend(q, *attention.store(k, v, SCALES), mask, SCALES)[0, :, 0].double()
        for attention in (Fp8Attention(), Fp32Attention())
    )
    error = (found - plain).norm()
    assert 0 < error < 1.25 * (theirs - plain).norm()


def test_no_key_and_one_key() -> None:
    query, keys = drawn(2, 2, HEAD_DIM), drawn(3, PAGE, 1, HEAD_DIM).float().clamp(min=1).to(torch.float8_e4m3fn)
    table, one = torch.zeros(2, 1, dtype=torch.int32), torch.tensor(1.0)
    found = decode_attention_reference(query, keys, keys, table, torch.tensor([0, 1]), (one, one, one))
    assert (found[0] == 0).all()
    # A single weight is rounded to E4M3 and divided by what it was before.
    ratio = found[1] / keys[0, 0].double()
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    assert ((ratio - 1).abs() <= 2.0**-4).all()


@pytest.mark.parametrize("longest", [1, 4096, 4097, 12_288, 16_384, 16_385, 40_960, 131_072])
def test_few_partitions_hold_all_keys(longest: int) -> None:
    partition = partition_of(longest)
    assert partition % 32 == 0
    assert math.ceil(longest / partition) <= 4
    assert partition >= 4096
