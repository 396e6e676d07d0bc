"""The packed form against one sequence at a time, and what kernels are told about a pack."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.numerics.attention import Bf16Attention, Fp8Attention
from fp8core.numerics.decode_attention import HEAD_DIM, Queries, decode_attention_reference
from fp8core.numerics.e4m3 import encode, round_to_e4m3
from fp8core.numerics.fused_rotary import HeadLayout
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed_attention import (
    Bf16PackedAttention,
    DevicePack,
    Fp8PackedAttention,
    heads_of,
    static_codes,
)
from fp8core.numerics.packed_sequences import PAGE, PackedSequences

CPU = torch.device("cpu")
LAYOUT = HeadLayout(query_heads=4, kv_heads=2, head_dim=16)
SCALES = LayerScales(q=0.0625, k=0.03125, v=0.125)
FORMS = {
    "bf16": (Bf16PackedAttention(Bf16Attention()), Bf16Attention()),
    "fp8": (Fp8PackedAttention(longest=4096), Fp8Attention()),
}


def drawn(sequences: PackedSequences, layout: HeadLayout = LAYOUT) -> torch.Tensor:
    heads = layout.query_heads + 2 * layout.kv_heads
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sequences.tokens, heads * layout.head_dim, generator=generator).bfloat16()


@pytest.mark.parametrize("name", FORMS)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_a_sequence_attends_as_if_it_were_alone(name: str, lengths: list[int]) -> None:
    packed, alone = FORMS[name]
    sequences = PackedSequences.of(lengths)
    qkv = drawn(sequences).requires_grad_()
    out = packed(qkv, LAYOUT, DevicePack.of(sequences, CPU), SCALES)
    assert out.dtype == torch.bfloat16
    for length, start in zip(lengths, sequences.starts, strict=False):
        q, k, v = (part.transpose(0, 1)[None].float() for part in heads_of(qkv[start : start + length], LAYOUT))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        expected = alone.attend(q, *alone.store(k, v, SCALES), mask, SCALES)[0].transpose(0, 1).flatten(1)
        assert torch.equal(out[start : start + length].float(), expected)
    upstream = torch.zeros_like(out)
    upstream[: lengths[0]] = 1
    (gradient,) = torch.autograd.grad(out, qkv, upstream)
    assert gradient[: lengths[0]].any()
    assert not gradient[lengths[0] :].any()


def test_fp8_attention_without_scales_is_refused() -> None:
    pack = DevicePack.of(PackedSequences.of([3]), CPU)
    with pytest.raises(AssertionError, match="calibrate first"):
        FORMS["fp8"][0](drawn(pack.sequences), LAYOUT, pack, None)


def test_what_the_kernel_is_told_is_the_pack() -> None:
    """The decode kernel's own reference, on the pages of a pack, finds what each sequence attends to."""
    sequences = PackedSequences.of([35, 1, 16])
    layout = LAYOUT._replace(head_dim=HEAD_DIM)
    pack, qkv = DevicePack.of(sequences, CPU), drawn(sequences, layout)
    q, k, v = (static_codes(x, s) for x, s in zip(heads_of(qkv, layout), vars(SCALES).values(), strict=True))
    keys, values = (codes.view(-1, PAGE, *codes.shape[1:]) for codes in (k, v))
    each = torch.arange(sequences.tokens + 1, dtype=torch.int32)
    queries = Queries(pack.pages, pack.owners, each, pack.seen)
    scales = tuple(torch.tensor(scale) for scale in vars(SCALES).values())
    found = decode_attention_reference(q, keys, values, queries, scales).flatten(1)
    expected = FORMS["fp8"][0](qkv, layout, pack, SCALES)
    real = sequences.valid
    error = (found[real] - expected[real].double()).norm() / expected[real].double().norm()
    # The decode kernel's maximum is a power of two, so P is rounded elsewhere.
    assert error < 0.03
    assert not found[~real].any()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1), st.sampled_from([2.0**-7, 0.3, 1.0]))
def test_static_codes_are_the_grid_of_the_reference(values: list[float], scale: float) -> None:
    x = torch.tensor(values)
    expected = encode(round_to_e4m3(x / torch.tensor(scale)))
    assert torch.equal(static_codes(x, scale).view(torch.uint8), expected.view(torch.uint8))
