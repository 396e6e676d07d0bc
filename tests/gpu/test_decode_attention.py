"""The decode kernel against its reference and FlashAttention's format, and whole sequences against it, on a GPU."""

import pytest
import torch
from torch import Tensor

from fp8core.kernels.decode_attention import DecodeAttention
from fp8core.kernels.sequence_attention import SequenceAttention, Span, batches
from fp8core.numerics.attention import (
    FP8_CACHE_FORMS,
    HEAD_DIMS,
    QUERY_TYPES,
    Fp32Attention,
    Queries,
    decode_attention_reference,
)
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import AttentionProducts

# Smaller than the default, so that requests have several.
PARTITION = 1024
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.parametrize("dim", HEAD_DIMS, ids=lambda dim: f"heads of {dim}"),
    pytest.mark.parametrize("products", QUERY_TYPES),
]
Q_SCALE = 0.0625
LENGTHS = [1, 15, 16, 17, 31, 33, 127, 128, 129, 0, 300, 1000, PARTITION, PARTITION + 1, 2 * PARTITION + 77, 5000]


def queries_of(drawn: Tensor, products: AttentionProducts) -> Tensor:
    """Codes, or the values that they would stand for as a part of a fused projection."""
    if products == "fp8":
        return drawn.to(torch.float8_e4m3fn).cuda()
    return torch.cat((drawn, drawn), dim=1).mul(Q_SCALE).bfloat16().cuda()[:, : drawn.shape[1]]


class Case:
    """Requests of ragged lengths over a cache whose unused slots are NaN."""

    def __init__(
        self, lengths: list[int], kv_heads: int, group: int, page: int, dim: int, products: AttentionProducts
    ) -> None:
        generator, self.products = torch.Generator().manual_seed(0), products
        blocks = sum(-(-length // page) for length in lengths) + 1
        order = torch.randperm(blocks, generator=generator)
        # As vLLM lays it out: the keys of a token's head beside its values.
        cache = torch.randn(blocks, page, kv_heads, 2 * dim, generator=generator) * 30
        codes = cache.to(torch.float8_e4m3fn)
        table = torch.zeros(len(lengths), max(-(-length // page) for length in lengths) + 1, dtype=torch.int32)
        used = 0
        for i, length in enumerate(lengths):
            count = -(-length // page)
            mine = order[used : used + count]
            table[i, :count] = mine.int()
            used += count
            if count and length % page:
                codes.view(torch.uint8)[mine[-1], length % page :] = 0x7F  # NaN
        query = torch.randn(len(lengths), kv_heads * group, dim, generator=generator) * 40
        self.keys, self.values = codes.cuda().split(dim, dim=-1)
        self.query, self.table = queries_of(query, products), table.cuda()
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.narrow_scores(Q_SCALE)
        self.attention = self.kernel(64)

    def narrow_scores(self, scale: float) -> None:
        """Scores are those of codes of Q with this scale; Q in FP16 has none, so that of K makes up for it."""
        scales = (scale, 0.03125, 0.125) if self.products == "fp8" else (1.0, 0.03125 * scale / Q_SCALE, 0.125)
        self.scales = tuple(torch.tensor(each, device="cuda") for each in scales)

    def kernel(self, at_once: int) -> DecodeAttention:
        shape, strides, group = self.keys.shape, self.keys.stride(), self.query.shape[1] // self.keys.shape[2]
        return DecodeAttention(self.keys.device, shape, strides, group, 9000, at_once, self.products, PARTITION)

    def sequences(
        self, query: Tensor, spans: list[Span], partition: int = PARTITION, logsumexp: Tensor | None = None
    ) -> Tensor:
        """What whole sequences give; rows that are left are NaN."""
        shape, strides, group = self.keys.shape, self.keys.stride(), query.shape[1] // self.keys.shape[2]
        attention = SequenceAttention(query.device, shape, strides, group, 9000, self.products, partition)
        work = batches(spans, group, 9000, query.device, partition)
        out = torch.full(query.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        attention(query, self.keys, self.values, self.table, work, self.scales, out, logsumexp)
        return out

    def one_by_one(self, query: Tensor, spans: list[Span], partition: int = PARTITION) -> Tensor:
        """The same tokens, each a query of the decode kernel."""
        owners, seen = zip(
            *((owner, span.keys - span.tokens + i + 1) for owner, span in enumerate(spans) for i in range(span.tokens)),
            strict=True,
        )
        shape, strides, group = self.keys.shape, self.keys.stride(), query.shape[1] // self.keys.shape[2]
        attention = DecodeAttention(query.device, shape, strides, group, 9000, 300, self.products, partition)
        each = torch.arange(len(owners) + 1, dtype=torch.int32, device="cuda")
        table = self.table[torch.tensor(owners, device="cuda")]
        return self.attend(query, Queries(table, each, torch.tensor(seen, dtype=torch.int32, device="cuda")), attention)

    def queries(self, rows: slice = slice(None)) -> Queries:
        """One token of each of some requests."""
        lengths = self.lengths[rows]
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")
        return Queries(self.table[rows], starts, lengths)

    def run(self, rows: slice = slice(None)) -> Tensor:
        return self.attend(self.query[rows], self.queries(rows), self.attention)

    def attend(self, query: Tensor, queries: Queries, attention: DecodeAttention) -> Tensor:
        out = torch.full(query.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        attention(query, self.keys, self.values, queries, self.scales, out)
        return out

    def expected(self) -> Tensor:
        return decode_attention_reference(self.query, self.keys, self.values, self.queries(), self.scales)


@pytest.mark.parametrize(("kv_heads", "group", "page"), [(8, 4, 16), (2, 8, 16), (1, 1, 16), (3, 2, 64), (4, 5, 128)])
def test_equals_the_reference(kv_heads: int, group: int, page: int, dim: int, products: AttentionProducts) -> None:
    case = Case(LENGTHS, kv_heads, group, page, dim, products)
    found, expected = case.run().double(), case.expected()
    # Scores are summed in FP32 here and in FP64 there, so a few P round the other way; then all of it to BF16.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < 4e-3
    assert (found[LENGTHS.index(0)] == 0).all()


def test_is_the_contracts_attention(dim: int, products: AttentionProducts) -> None:
    """As near to attention without rounded weights as FP8 weights are, whatever maximum they are relative to."""
    case = Case([700], 8, 4, 16, dim, products)
    blocks = case.table[0, : -(-700 // 16)].long()
    case.narrow_scores(0.004)
    q_scale, k_scale, v_scale = (float(scale) for scale in case.scales)
    q = (case.query[0].float().cpu() * q_scale)[None, :, None]
    k, v = (x[blocks].flatten(0, 1)[:700].float().cpu().transpose(0, 1)[None] for x in (case.keys, case.values))
    k, v = k * k_scale, v * v_scale
    scales, mask = LayerScales(q=q_scale, k=k_scale, v=v_scale), torch.ones(1, 1, 1, 700, dtype=torch.bool)
    theirs, plain = (
        attention.attend(q, *attention.store(k, v, scales), mask, scales)[0, :, 0].double()
        for attention in (FP8_CACHE_FORMS[products], Fp32Attention())
    )
    ours = case.run()[0].double().cpu()
    assert (ours - plain).norm() < 1.25 * (theirs - plain).norm()


def spans_of(tokens: list[int], keys: list[int]) -> list[Span]:
    """Side by side in the query."""
    return [Span(sum(tokens[:i]), count, keys[i]) for i, count in enumerate(tokens)]


def drawn(tokens: int, heads: int, dim: int, products: AttentionProducts) -> Tensor:
    return queries_of(torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(7)) * 40, products)


@pytest.mark.parametrize("group", range(1, 9))
def test_whole_sequences_have_the_bytes_of_single_tokens(group: int, dim: int, products: AttentionProducts) -> None:
    """Of each group size: ragged, shorter than a tile, at the ends of tiles and pairs, and over several partitions."""
    keys = [1, 15, 16, 17, 31, 33, 127, 128, 129, 256, 257, 300, PARTITION, PARTITION + 1, 2 * PARTITION + 77]
    case, spans = Case(keys, 2, group, 16, dim, products), spans_of(keys, keys)
    query = drawn(sum(keys), 2 * group, dim, products)
    assert torch.equal(case.sequences(query, spans), case.one_by_one(query, spans))


def test_the_log_sum_exp_is_that_of_the_scores(dim: int, products: AttentionProducts) -> None:
    keys = [300, 2 * PARTITION + 77]
    case, spans = Case(keys, 2, 4, 16, dim, products), spans_of(keys, keys)
    case.narrow_scores(0.004)
    query = drawn(sum(keys), 8, dim, products)
    found = torch.zeros(8, len(query), device="cuda")
    case.sequences(query, spans, logsumexp=found)
    for span, table in zip(spans, case.table, strict=True):
        blocks = table[: -(-span.keys // 16)].long()
        k = case.keys[blocks].flatten(0, 1)[: span.keys].double().repeat_interleave(4, 1)
        q = query[span.row : span.row + span.tokens].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * float(case.scales[0] * case.scales[1]) * dim**-0.5
        unseen = torch.ones(span.tokens, span.keys, dtype=torch.bool, device="cuda").triu(1)
        expected = scores.masked_fill(unseen, -torch.inf).logsumexp(-1)
        assert (found[:, span.row : span.row + span.tokens] - expected).abs().max() < 1e-4
