"""The reference of the decode kernel, which runs on a GPU alone (tests/gpu)."""

import math

import pytest
import torch

from fp8core.numerics.attention import Fp8Attention, Fp32Attention
from fp8core.numerics.decode_attention import (
    HEAD_DIM,
    Queries,
    decode_attention_reference,
    partition_of,
    token_queries,
)
from fp8core.numerics.kv_scales import LayerScales

SCALES = LayerScales(q=0.004, k=0.03125, v=0.125)
PAGE, KEYS, KV_HEADS, GROUP = 16, 77, 2, 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * 30).to(torch.float8_e4m3fn)


def test_is_attention_with_e4m3_weights() -> None:
    """As far from attention without rounded weights as the decoder's own is, and not further."""
    query, keys, values = drawn(1, KV_HEADS * GROUP, HEAD_DIM), *(drawn(n, PAGE, KV_HEADS, HEAD_DIM) for n in (6, 7))
    table = int32(4, 0, 3, 1, 2, 5)[None]
    scales = tuple(torch.tensor(scale) for scale in (SCALES.q, SCALES.k, SCALES.v))
    found = decode_attention_reference(query, keys, values, Queries(table, int32(0), int32(0, 1), int32(KEYS)), scales)[
        0
    ]
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
    """A single weight is rounded to E4M3, and divided by what it was rounded to."""
    query, keys = drawn(2, 2, HEAD_DIM), drawn(3, PAGE, 1, HEAD_DIM)
    queries = Queries(int32(0)[None], int32(0, 0), int32(0, 1, 2), int32(0, 1))
    found = decode_attention_reference(query, keys, keys, queries, (torch.tensor(1.0),) * 3)
    assert (found[0] == 0).all()
    assert torch.equal(found[1], keys[0, 0].double().expand(2, -1))


def test_every_new_token_sees_what_came_before_it() -> None:
    """Three new tokens of seven, none of five, one of one, two of two; then two tokens of padding."""
    starts, lengths = int32(0, 3, 3, 4, 6), int32(7, 5, 1, 2)
    table = int32(9, 8, 7, 6)[:, None]
    queries = token_queries(table, starts, lengths, 8)
    assert queries.block_table is table
    assert queries.owners[:6].tolist() == [0, 0, 0, 2, 3, 3]
    assert queries.lengths.tolist() == [5, 6, 7, 1, 1, 2, 0, 0]
    assert queries.starts.tolist() == list(range(9))
    assert {tensor.dtype for tensor in queries} == {torch.int32}
    assert int(queries.owners.max()) < len(lengths)


def test_a_prompts_last_token_is_what_is_decoded() -> None:
    query, keys, values = drawn(4, 2, HEAD_DIM), *(drawn(n, PAGE, 1, HEAD_DIM) for n in (6, 7))
    table, scales = int32(3, 1, 0, 2, 5, 4).view(2, 3), (torch.tensor(0.01),) * 3
    prompts = token_queries(table, int32(0, 1, 4), int32(40, 20), 4)
    found = decode_attention_reference(query, keys, values, prompts, scales)
    alone = Queries(table, int32(1), int32(0, 1), int32(20))
    assert torch.equal(decode_attention_reference(query[3:], keys, values, alone, scales)[0], found[3])
    shorter = alone._replace(lengths=int32(18))
    assert torch.equal(decode_attention_reference(query[1:2], keys, values, shorter, scales)[0], found[1])


@pytest.mark.parametrize("longest", [1, 4096, 4097, 12_288, 16_384, 16_385, 40_960, 131_072])
def test_few_partitions_hold_all_keys(longest: int) -> None:
    partition = partition_of(longest)
    assert partition % 32 == 0
    assert math.ceil(longest / partition) <= 4
    assert partition >= 4096
