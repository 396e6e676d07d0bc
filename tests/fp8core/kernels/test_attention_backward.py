"""How packs are divided and described for cuDNN's backward; a reference stands in for its kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.kernels import attention_backward as module
from fp8core.kernels.attention_backward import MOST_BYTES, Part, Shape, cudnn_gradients, parts_of
from fp8core.numerics.fused import HeadLayout
from fp8core.numerics.packed import PackedSequences

QWEN3 = HeadLayout(32, 8, 128)


@given(st.lists(st.integers(1, 7000), min_size=1, max_size=40))
def test_parts_hold_every_sequence_once_and_fit(lengths):
    sequences = PackedSequences.of(lengths)
    parts = parts_of(sequences, QWEN3)
    if not parts:
        alone = max(Shape.of([end - start]).workspace(QWEN3) for start, end in sequences.spans)
        assert alone > MOST_BYTES
        return
    begins = [start for part in parts for start in part.starts[:-1]]
    assert begins == list(sequences.starts[: len(lengths)])
    assert [part.starts[-1] for part in parts[:-1]] == [part.starts[0] for part in parts[1:]]
    for shape, starts in parts:
        each = torch.tensor(starts).diff()
        assert len(each) <= shape.sequences
        assert int(each.max()) <= shape.longest
        assert int(each.sum()) <= shape.tokens <= shape.sequences * shape.longest
        assert shape.workspace(QWEN3) <= MOST_BYTES


def softmax_gradients(q, k, v, grad):
    leaves = [x.float().detach().requires_grad_() for x in (q, k, v)]
    query, key, value = (x.transpose(0, 1) for x in leaves)
    key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    unseen = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights = (query @ key.mT * q.shape[-1] ** -0.5).masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.autograd.grad((weights @ value).transpose(0, 1), leaves, grad.float())


class Kernel:
    """Reads and writes what offsets and lengths say of flat memory, as cuDNN does."""

    def __init__(self, shape, layout):
        self.shape, self.layout = shape, layout

    def __call__(self, tensors, lengths, offsets):
        assert all(x.is_contiguous() for x in tensors)
        q, k, v, out, grad, sums, *gradients = (x.flatten() for x in tensors)
        assert bool(sums.isfinite().all())
        assert len(out) == len(q)
        assert len(lengths) == self.shape.sequences
        assert int(lengths.max()) <= self.shape.longest
        of_query, of_keys, of_sums = offsets
        query, keys, width = self.layout
        for i, length in enumerate(lengths.tolist()):
            assert of_sums[i] * width == of_query[i]
            if not length:
                continue

            def part(x, start, heads, length=length):
                return x[start : start + length * heads * width].view(length, heads, width)

            read = [part(x, of_query[i], query) for x in (q, grad)]
            read[1:1] = [part(x, of_keys[i], keys) for x in (k, v)]
            written = part(gradients[0], of_query[i], query), *(part(x, of_keys[i], keys) for x in gradients[1:])
            for place, found in zip(written, softmax_gradients(*read), strict=True):
                place.copy_(found)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("layout", [HeadLayout(4, 2, 64), HeadLayout(2, 2, 128)])
def test_gradients_of_all_parts_lie_where_their_tokens_do(monkeypatch, layout, divided):
    monkeypatch.setattr(module, "_graph", lambda shape, layout, _: Kernel(shape, layout))
    sequences = PackedSequences.of([70, 1, 33, 130, 7])
    q, k, v = (torch.randn(sequences.tokens, n, layout.head_dim).bfloat16() for n in (*layout[:2], layout.kv_heads))
    grad = torch.randn(q.shape).bfloat16()
    sums = torch.full((layout.query_heads, sequences.tokens), torch.inf)
    parts = parts_of(sequences, layout)
    if divided:
        starts = parts[0].starts
        halves = starts[:3], starts[2:]
        parts = [Part(Shape.of(torch.tensor(half).diff().tolist()), half) for half in halves]
    found = cudnn_gradients(grad.flatten(1), (q, k, v), (q.flatten(1), sums), parts)
    real = sequences.starts[len(sequences.lengths) - 1]
    assert real < sequences.tokens
    for start, end in sequences.spans[:-1]:
        expected = softmax_gradients(*(x[start:end] for x in (q, k, v, grad)))
        for mine, exact in zip(found, expected, strict=True):
            assert torch.equal(mine[start:end], exact.bfloat16())
    assert not any(x[real:].any() for x in found)
