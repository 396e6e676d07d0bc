"""The packed form against one sequence at a time, and what kernels are told about a pack."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_threads

from fp8core.kernels import attention
from fp8core.numerics import packed
from fp8core.numerics.attention import (
    FP8_CACHE_FORMS,
    HEAD_DIMS,
    QUERY_TYPES,
    Bf16Attention,
    Queries,
    decode_attention_reference,
)
from fp8core.numerics.fused import HeadLayout, Heads, head_codes, head_values, heads_of
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import BF16_HEAD, FP32_HEAD, chunked_logprobs, load_head, token_logprobs
from fp8core.numerics.packed import PAGE, AttentionPack, DevicePack, PackedSequences, packed_length
from fp8core.numerics.recipe import AttentionProducts
from fp8core.training.packed.context import PackChunks, pack_multiple
from fp8core.training.ranks import Ranks

CPU = torch.device("cpu")
LAYOUT = HeadLayout(query_heads=4, kv_heads=2, head_dim=16)
SCALES = LayerScales(q=0.0625, k=0.03125, v=0.125)
FORMS = {form.name: packed.PackedAttention(form, 4096) for form in (Bf16Attention(), *FP8_CACHE_FORMS.values())}


def drawn(sequences: PackedSequences, layout: HeadLayout = LAYOUT) -> torch.Tensor:
    heads = layout.query_heads + 2 * layout.kv_heads
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sequences.tokens, heads * layout.head_dim, generator=generator).bfloat16()


@pytest.mark.parametrize("name", FORMS)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=10)
def test_a_sequence_attends_as_if_it_were_alone(name: str, lengths: list[int]) -> None:
    form = FORMS[name]
    sequences = PackedSequences.of(lengths)
    qkv, pack = drawn(sequences), DevicePack.of(sequences, CPU)
    out, for_backward = packed.packed_attention(qkv, LAYOUT, pack, form, SCALES)
    assert out.dtype == torch.bfloat16
    alone_qkv, outputs = qkv.detach().requires_grad_(), []
    for length, start in zip(lengths, sequences.starts, strict=False):
        q, k, v = (part.transpose(0, 1)[None].float() for part in heads_of(alone_qkv[start : start + length], LAYOUT))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        expected = form.exact.attend(q, *form.exact.store(k, v, SCALES), mask, SCALES)[0].transpose(0, 1).flatten(1)
        assert torch.equal(out[start : start + length].float(), expected)
        outputs.append(expected)
    upstream = torch.zeros_like(out)
    upstream[: lengths[0]] = torch.linspace(-1, 1, out.shape[1]).bfloat16()
    gradient = packed.packed_attention_backward(upstream, qkv, for_backward, LAYOUT, pack, form, SCALES)
    (expected,) = torch.autograd.grad(outputs[0].bfloat16(), alone_qkv, upstream[: lengths[0]])
    assert torch.equal(gradient, expected)
    assert gradient[: lengths[0]].any()
    assert not gradient[lengths[0] :].any()


@pytest.mark.parametrize("products", QUERY_TYPES)
def test_what_the_kernel_is_told_is_the_pack(products: AttentionProducts) -> None:
    """The decode kernel's own reference, on the pages of a pack, finds what each sequence attends to."""
    sequences = PackedSequences.of([35, 1, 16])
    layout = LAYOUT._replace(head_dim=HEAD_DIMS[-1])
    pack, qkv = DevicePack.of(sequences, CPU), drawn(sequences, layout)
    q, k, v = head_codes(qkv, layout, SCALES, products)
    keys, values = (codes.view(-1, PAGE, *codes.shape[1:]) for codes in (k, v))
    each = torch.arange(sequences.tokens + 1, dtype=torch.int32)
    seen = torch.where(sequences.valid, sequences.offsets + 1, 0).int()
    queries = Queries(pack.pages[sequences.owners], each, seen)
    scales = tuple(torch.tensor(scale) for scale in vars(SCALES).values())
    found = decode_attention_reference(q, keys, values, queries, scales).flatten(1)
    expected = packed.packed_attention(qkv, layout, pack, FORMS[products], SCALES).out
    real = sequences.valid
    error = (found[real] - expected[real].double()).norm() / expected[real].double().norm()
    # The decode kernel's maximum is a power of two, so P is rounded elsewhere; then all is rounded to BF16.
    assert error < (0.03 if products == "fp8" else 0.003)
    assert not found[~real].any()


class Kernels:
    """What a GPU would run, as references on a CPU, and how often each is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = Counter[str]()
        self.attended = list[torch.Tensor]()
        for name in ("packed_attention", "packed_attention_backward"):
            monkeypatch.setattr(packed, name, getattr(attention, name))
        monkeypatch.setattr(attention, "_flash_attention", self.flash)
        monkeypatch.setattr(attention, "attention_gradients", self.flash_backward)
        monkeypatch.setattr(attention, "_sequence_attention", lambda *shape: self.sequence)

    def flash(self, heads: Heads, pack: DevicePack) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls["flash"] += 1
        self.attended.append(self.softmax(heads, pack))
        return self.attended[-1], torch.zeros(heads[0].shape[1], len(heads[0]))

    def flash_backward(
        self, grad: torch.Tensor, heads: Heads, saved: tuple[torch.Tensor, ...], pack: DevicePack
    ) -> Heads:
        self.calls["flash backward"] += 1
        leaves = [x.detach().requires_grad_() for x in heads]
        with torch.enable_grad():
            out = self.softmax((leaves[0], leaves[1], leaves[2]), pack)
        given = saved[0].view(out.shape)
        assert any(given.shape == each.shape and torch.equal(given, each) for each in self.attended)
        q, k, v = torch.autograd.grad(out, leaves, grad.view(out.shape))
        return q, k, v

    def sequence(self, query, keys, values, pages, work, scales, out, logsumexp) -> None:
        self.calls["sequence"] += 1
        for batch in work:
            for pair, row, seen, tokens in batch.work.tolist():
                lengths = torch.arange(seen, seen + tokens, dtype=torch.int32)
                each = torch.arange(tokens + 1, dtype=torch.int32)
                queries = Queries(pages[batch.pairs[pair, 0]].expand(tokens, -1), each, lengths)
                own = slice(row, row + tokens)
                out[own] = decode_attention_reference(query[own], keys, values, queries, scales).bfloat16()
                logsumexp[:, own] = 0.0
        self.attended.append(out)

    @staticmethod
    def softmax(heads: Heads, pack: DevicePack) -> torch.Tensor:
        outputs = []
        for start, end in pack.sequences.spans:
            first = max(start, pack.prefix)
            own = slice(first - pack.prefix, end - pack.prefix), slice(start, end), slice(start, end)
            q, k, v = (x[rows].float().transpose(0, 1) for x, rows in zip(heads, own, strict=True))
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            weights = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(
                torch.ones(end - first, end - start, dtype=torch.bool).triu(1 + first - start), -torch.inf
            )
            outputs.append((weights.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outputs).bfloat16()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


WIDE = LAYOUT._replace(head_dim=HEAD_DIMS[-1])
PACK = DevicePack.of(PackedSequences.of([19, 5]), CPU)


def gradient(
    name: str, qkv: torch.Tensor, pack: AttentionPack = PACK, upstream: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and gradient of a pass."""
    out, for_backward = packed.packed_attention(qkv, WIDE, pack, FORMS[name], SCALES)
    if upstream is None:
        upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16()
    return out, packed.packed_attention_backward(upstream, qkv, for_backward, WIDE, pack, FORMS[name], SCALES)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("bf16", {"flash": 1, "flash backward": 1}),
        *((products, {"sequence": 1, "flash backward": 1}) for products in QUERY_TYPES),
    ],
)
def test_a_backward_does_not_attend_again(name: str, calls: dict[str, int], kernels: Kernels) -> None:
    gradient(name, 8 * drawn(PACK.sequences, WIDE))
    assert kernels.calls == calls


@pytest.mark.parametrize("products", QUERY_TYPES)
def test_gradients_of_fp8_are_those_of_bf16_over_what_codes_stand_for(
    products: AttentionProducts, kernels: Kernels
) -> None:
    # Of wide scales: some elements are saturated, most are not.
    qkv = 8 * drawn(PACK.sequences, WIDE)
    _out, found = gradient(products, qkv)
    values = torch.cat(head_values(qkv, WIDE, SCALES, products), dim=1).flatten(1)
    _out, expected = gradient("bf16", values)
    limits = [448 * scale for scale in vars(SCALES).values()]
    limits[0] = limits[0] if products == "fp8" else torch.inf
    passed = torch.cat([x.abs() <= s for x, s in zip(heads_of(qkv, WIDE), limits, strict=True)], dim=1).flatten(1)
    assert 0 < (~passed).float().mean() < 0.5
    assert torch.equal(found, expected * passed)


@pytest.mark.parametrize("name", ["bf16", *QUERY_TYPES])
def test_what_kernels_get_of_a_chunk_gives_what_they_give_of_the_whole(name: str, kernels: Kernels) -> None:
    sequences = PackedSequences.of([300, 1, 40], pack_multiple(2))
    qkv = 8 * drawn(sequences, WIDE)
    upstream = drawn(sequences, WIDE)[:, : WIDE.query_heads * WIDE.head_dim] * sequences.valid[:, None]
    expected = gradient(name, qkv, DevicePack.of(sequences, CPU), upstream)

    def act(ranks: Ranks) -> list[tuple[torch.Tensor, torch.Tensor]]:
        chunks = PackChunks(sequences, ranks, CPU)
        found = gradient(name, chunks.own(qkv), chunks, chunks.own(upstream))
        real = chunks.own(sequences.valid)
        return [(each[real], chunks.own(whole)[real]) for each, whole in zip(found, expected, strict=True)]

    for (out, whole_out), (found, whole) in on_threads(2, act):
        assert torch.equal(out, whole_out) or (name == "bf16" and torch.allclose(out, whole_out, rtol=0.02, atol=0.02))
        assert (found.float() - whole.float()).norm() < 0.01 * whole.float().norm()


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_a_pack_is_whole_pages_and_whole_groups(lengths: list[int]) -> None:
    pack = PackedSequences.of(lengths)
    assert pack.tokens % 128 == 0
    assert all(start % PAGE == 0 for start in pack.starts)
    assert pack.lengths[: len(lengths)] == tuple(lengths)
    assert pack.tokens - sum(map(packed_length, lengths)) < 128
    for tensor in (pack.positions, pack.offsets, pack.valid, pack.owners):
        assert tensor.shape == (pack.tokens,)
    assert int(pack.valid.sum()) == sum(lengths)
    for index, (length, (start, end)) in enumerate(zip(pack.lengths, pack.spans, strict=True)):
        assert end - start <= pack.longest
        assert torch.equal(pack.offsets[start:end], torch.arange(end - start))
        assert torch.equal(pack.positions[start : start + length], torch.arange(length))
        assert not pack.positions[start + length : end].any()
        assert pack.valid[start:end].tolist() == [True] * length + [False] * (end - start - length)
        assert set(pack.owners[start:end].tolist()) == {index}


TOKENS, HIDDEN, VOCABULARY = 37, 24, 50


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("chunk", [1 << 27, 4 * VOCABULARY])
@pytest.mark.parametrize("form", [FP32_HEAD, BF16_HEAD], ids=lambda form: form.name)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_a_cpu_it_is_the_exact_head(monkeypatch: pytest.MonkeyPatch, form, temperature, chunk: int) -> None:
    monkeypatch.setattr(packed.PackedHead, "chunk_elements", chunk)
    hidden, weight = tensor(TOKENS, HIDDEN), tensor(VOCABULARY, HIDDEN)
    targets = torch.arange(TOKENS) % VOCABULARY
    # Ours takes BF16, the other the same values in FP32.
    ours, theirs = (
        [hidden.to(kind, copy=True).requires_grad_(), weight.float().requires_grad_()]
        for kind in (torch.bfloat16, torch.float32)
    )

    found = chunked_logprobs(ours[0], ours[1], packed.PackedHead(weight, form.output, temperature), targets)
    expected = token_logprobs(theirs[0], replace(load_head(weight), master=theirs[1]), form, targets, temperature)

    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    upstream = tensor(TOKENS).float()
    found[0].backward(upstream)
    expected[0].backward(upstream)
    # Slopes are rounded to BF16 before they are multiplied.
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.grad.float() - exact.grad).norm() < 4e-3 * exact.grad.norm()
