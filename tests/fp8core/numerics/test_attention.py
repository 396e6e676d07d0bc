"""The reference of the decode kernel, which runs on a GPU alone (tests/gpu)."""

import math

import pytest
import torch
from torch import Tensor

from fp8core.kernels.sequence_attention import Batch, Span, batches
from fp8core.numerics.attention import (
    FP8_CACHE_FORMS,
    HEAD_DIMS,
    QUERY_TYPES,
    Bf16Attention,
    ExactFp32Attention,
    Fp8Attention,
    Fp16OverFp8Attention,
    Fp32Attention,
    Queries,
    decode_attention_reference,
)
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import AttentionProducts

POW2 = LayerScales(q=2.0**-6, k=2.0**-7, v=2.0**-7)
FP32 = LayerScales(*(torch.tensor(x).item() for x in (0.0137, 0.0071, 0.021)))
FP8, FP16 = Fp8Attention(), Fp16OverFp8Attention()

Qkv = tuple[Tensor, Tensor, Tensor]


def to_bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().float()


def random_qkv(length: int, seed: int, batch: int = 1, heads: int = 4, kv_heads: int = 2, dim: int = 32) -> Qkv:
    """BF16 values in FP32; a few are beyond what the scales above can represent."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, count, length, dim) for count in (heads, kv_heads, kv_heads)]
    return tuple(to_bf16(2.5 * torch.randn(shape, generator=generator)) for shape in shapes)


def causal(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def full_pass(form, qkv: Qkv, mask: Tensor, scales: LayerScales | None) -> Tensor:
    q, k, v = qkv
    return form.attend(q, *form.store(k, v, scales), mask, scales)


def e4m3(x: Tensor) -> Tensor:
    """FP64 values of the saturated cast."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()


def stored(x: Tensor, scale: float) -> Tensor:
    """FP64 values that E4M3 codes with this scale stand for."""
    return e4m3(x / torch.tensor(scale)) * scale


@pytest.mark.parametrize("scales", [POW2, FP32])
def test_fp8_is_the_kernels_arithmetic_one_row_at_a_time(scales: LayerScales) -> None:
    q, k, v = random_qkv(40, seed=4)
    out = full_pass(FP8, (q, k, v), causal(40), scales)
    grid_q, grid_k, grid_v = e4m3(q / scales.q), e4m3(k / scales.k), e4m3(v / scales.v)
    for head in range(4):
        for t in range(40):
            products = grid_k[0, head // 2, : t + 1] @ grid_q[0, head, t]
            scores = products * (scales.q * scales.k / math.sqrt(32))
            p = torch.exp(scores - scores.max())
            values = (e4m3(256 * p) @ grid_v[0, head // 2, : t + 1]) * (scales.v / 256)
            assert torch.equal(out[0, head, t], to_bf16(values / p.sum()))


@pytest.mark.parametrize("scales", [POW2, FP32])
def test_fp16_products_are_those_of_a_slow_version(scales: LayerScales) -> None:
    q, k, v = random_qkv(40, seed=4)
    q[..., 0] *= 2.0**14  # Some are beyond FP16.
    assert q.max() > 65504
    out = full_pass(FP16, (q, k, v), causal(40), scales)
    fp16_q = q.clamp(-65504, 65504).half().double()
    # 30 bits, of 53: a code of K has 18, and 32 products are summed.
    step = 2.0 ** (fp16_q.abs().amax(-1, keepdim=True).log2().floor() + 1 - 30)
    fp16_q, grid_k, grid_v = (fp16_q / step).round() * step, e4m3(k / scales.k), e4m3(v / scales.v)
    for head in range(4):
        for t in range(40):
            keys, values = grid_k[0, head // 2, : t + 1], grid_v[0, head // 2, : t + 1]
            products = torch.tensor(
                [math.fsum(row) for row in (keys * fp16_q[0, head, t]).tolist()], dtype=torch.float64
            )
            scores = products * (scales.k / math.sqrt(32))
            p = torch.exp(scores - scores.max()).float().half().double()
            sums = torch.tensor(
                [math.fsum(column) for column in (p[:, None] * values).t().tolist()], dtype=torch.float64
            )
            assert torch.equal(out[0, head, t], to_bf16(sums * scales.v / math.fsum(p.tolist())))


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights and output in FP64, with the K and V heads repeated."""
    k, v = (part.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = (q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    return weights, weights @ v


@pytest.mark.parametrize(("form", "bits"), [(Bf16Attention(), 8), (Fp32Attention(), 23), (ExactFp32Attention(), 23)])
def test_bf16_and_fp32_against_plain_softmax(form, bits: int) -> None:
    q, k, v = random_qkv(40, seed=5, batch=2)
    out = full_pass(form, (q, k, v), causal(40), None).double()
    assert torch.equal(out, out.float().double())
    weights, expected = plain_attention(q, k, v, causal(40))
    bound = 2 * 2.0**-bits * (weights @ v.double().abs().repeat_interleave(2, dim=1))
    assert ((out - expected).abs() <= bound).all()


# Gradients, against the autograd of models that spell out what each rounding passes


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ((ours.double() - theirs.double()).abs() <= 1e-5 * theirs.double().abs().max()).all()


def passing(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded - x).detach()


def explicit_attention(form, qkv: Qkv, mask: Tensor, scales: LayerScales | None, round_p) -> Tensor:
    q, k, v = (part.double() for part in qkv)
    if scales is not None:
        limits = [448 * scale for scale in (scales.q, scales.k, scales.v)]
        # At a bound the gradient of `clamp` is 1 or 0, by version of torch.
        pairs = zip((q, k, v), limits, strict=True)
        clamped = [torch.where(x.abs() <= limit, x, limit * x.sign()) for x, limit in pairs]
        codes = [passing(x, stored(x.detach(), limit / 448)) for x, limit in zip(clamped, limits, strict=True)]
        q, k, v = codes if form is FP8 else (q, *codes[1:])
    k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    p = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    rounded = passing(p, round_p(p.detach()))
    return (rounded @ v) / (rounded if form is FP16 else p).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("form", "scales", "round_p"),
    [
        (FP8, POW2, lambda p: e4m3(256 * p) / 256),
        (FP8, FP32, lambda p: e4m3(256 * p) / 256),
        (FP16, POW2, lambda p: p.half().double()),
        (FP16, FP32, lambda p: p.half().double()),
        (Bf16Attention(), None, lambda p: to_bf16(p).double()),
        (Fp32Attention(), None, lambda p: p),
        (ExactFp32Attention(), None, lambda p: p),
    ],
)
def test_gradients_are_those_of_the_explicit_model(form, scales: LayerScales | None, round_p) -> None:
    leaves = [part.requires_grad_() for part in random_qkv(30, seed=11, batch=2)]
    upstream = torch.randn(2, 4, 30, 32, generator=torch.Generator().manual_seed(12))
    ours = torch.autograd.grad(full_pass(form, tuple(leaves), causal(30), scales), leaves, upstream)
    explicit = explicit_attention(form, tuple(leaves), causal(30), scales, round_p)
    for grad, expected in zip(ours, torch.autograd.grad(explicit, leaves, upstream.double()), strict=True):
        assert grad.dtype == torch.float32
        assert_close(grad, expected)


SCALES = LayerScales(q=0.004, k=0.03125, v=0.125)
PAGE, KEYS, KV_HEADS, GROUP = 16, 77, 2, 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * 30).to(torch.float8_e4m3fn)


def queries(products: AttentionProducts, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes or what they stand for, and their values."""
    codes = drawn(*shape)
    values = (codes.float() * SCALES.q).bfloat16()
    return (codes, codes.float() * SCALES.q) if products == "fp8" else (values, values.float())


@pytest.mark.parametrize("products", QUERY_TYPES)
def test_is_attention_with_rounded_weights(products: AttentionProducts) -> None:
    """As far from attention without rounded weights as the decoder's own is, and not further."""
    query, of_query = queries(products, 1, KV_HEADS * GROUP, HEAD_DIMS[-1])
    keys, values = (drawn(n, PAGE, KV_HEADS, HEAD_DIMS[-1]) for n in (6, 7))
    table = int32(4, 0, 3, 1, 2, 5)[None]
    scales = tuple(torch.tensor(scale) for scale in (SCALES.q, SCALES.k, SCALES.v))
    found = decode_attention_reference(query, keys, values, Queries(table, int32(0, 1), int32(KEYS)), scales)[0]
    q = of_query[0, None, :, None]
    k, v = (x[table[0].long()].flatten(0, 1)[:KEYS].float().transpose(0, 1)[None] for x in (keys, values))
    k, v, mask = k * SCALES.k, v * SCALES.v, torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    theirs, plain = (
        attention.attend(q, *attention.store(k, v, SCALES), mask, SCALES)[0, :, 0].double()
        for attention in (FP8_CACHE_FORMS[products], Fp32Attention())
    )
    error = (found - plain).norm()
    assert 0 < error < 1.25 * (theirs - plain).norm()


def every_key_once(spans: list[Span], batch: Batch, partition: int, group: int) -> dict[int, list[int]]:
    """The keys of each query row's token, in the order in which the kernel goes through the tiles that it reads."""
    found: dict[int, list[int]] = {}
    pairs = batch.pairs.tolist()
    for first_pair, row, seen, tokens in batch.work.tolist():
        assert tokens <= 192 // group
        owner, end = pairs[first_pair][0], seen + tokens - 1
        tiles = []
        for _owner, first in (pair for pair in pairs[first_pair:] if pair[0] == owner):
            second = [first + 128] if (first + 128) // partition == first // partition else []
            tiles += [tile for tile in (first, *second) if tile < end]
        for token in range(tokens):
            own = seen + token
            found[row + token] = [key for tile in tiles for key in range(tile, min(tile + 32, own))]
    return found


@pytest.mark.parametrize(("partition", "group"), [(4096, 4), (1056, 8), (1024, 3), (32, 1)])
def test_every_new_token_sees_each_key_before_it_once(partition: int, group: int) -> None:
    """Whole prompts, ends of cached ones, and requests that another kernel decodes."""
    spans = [Span(0, 700, 700), Span(700, 1, 33), Span(701, 0, 2000), Span(701, 70, 2125), Span(771, 129, 129)]
    found: dict[int, list[int]] = {}
    made = batches(spans, group, 4096, torch.device("cpu"), partition)
    for batch in made:
        assert batch.lengths.tolist() == [span.keys for span in spans]
        found |= every_key_once(spans, batch, partition, group)
    for row, tokens, keys in spans:
        for token in range(tokens):
            assert sorted(found.pop(row + token)) == list(range(keys - tokens + token + 1)), (row, token)
    assert not found
