"""Ranks that share a pack attend to the bytes of one, and sum its gradients."""

import pytest
import torch
from thread_ranks import on_threads

from fp8core.numerics.attention import FP8_CACHE_FORMS, Bf16Attention
from fp8core.numerics.fused import HeadLayout
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import (
    DevicePack,
    PackedAttention,
    PackedSequences,
    packed_attention,
    packed_attention_backward,
)
from fp8core.rl.batch import TokenBatch
from fp8core.training.packed.context import PackChunks, PackShare, pack_multiple
from fp8core.training.ranks import ALONE, Ranks, Teams

CPU = torch.device("cpu")
LAYOUT = HeadLayout(4, 2, 16)
SCALES = LayerScales(2.0**-6, 2.0**-7, 2.0**-7)
FORMS = {"bf16": Bf16Attention(), **FP8_CACHE_FORMS}
# The first lies in all chunks of two ranks, some in one of them, the last chunk is filling alone.
LENGTHS = [650, 1, 33, 40]


def attended(pack, qkv, upstream, form):
    form = PackedAttention(form, 4096)
    out, saved = packed_attention(qkv, LAYOUT, pack, form, SCALES)
    return out, packed_attention_backward(upstream, qkv, saved, LAYOUT, pack, form, SCALES)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("count", [2, 3])
def test_chunks_attend_to_the_bytes_of_the_whole(form, count: int) -> None:
    sequences = PackedSequences.of(LENGTHS, pack_multiple(count))
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sequences.tokens, 8 * LAYOUT.head_dim, generator=generator).bfloat16()
    upstream = torch.randn(sequences.tokens, 4 * LAYOUT.head_dim, generator=generator).bfloat16()
    upstream[~sequences.valid] = 0
    expected = attended(DevicePack.of(sequences, CPU), qkv, upstream, form)

    def act(ranks):
        chunks = PackChunks(sequences, ranks, CPU)
        assert torch.equal(chunks.positions, chunks.own(sequences.positions))
        found = attended(chunks, *(chunks.own(each) for each in (qkv, upstream)), form)
        return [torch.equal(found[0], chunks.own(expected[0])), found[1], chunks.own(expected[1])]

    for equal, gradient, whole in on_threads(count, act):
        assert equal
        # One rounding to BF16 of sums in another order.
        assert (gradient.float() - whole.float()).norm() < 1e-4 * whole.float().norm()


def test_targets_are_of_the_rank_that_predicts_them_and_come_back_in_order() -> None:
    rows = [[1] * n for n in (300, 5, 200)]
    batch = TokenBatch.of(rows, [[2 + i for i in range(n)] for n in (250, 3, 9)])
    targets = PackShare.of(batch, ALONE, CPU).targets

    def act(ranks):
        share = PackShare.of(batch, ranks, CPU)
        own = (share.targets * 1.0).requires_grad_()
        found = share.joined(own)
        (gradient,) = torch.autograd.grad(found, own, targets * 3.0)
        return found.detach(), torch.equal(gradient, share.targets * 3.0), len(own)

    found = on_threads(3, act)
    assert all(torch.equal(each, targets.float()) and equal for each, equal, _ in found)
    assert sum(count for *_, count in found) == len(targets)
    assert min(count for *_, count in found) < len(targets)


class Process(Ranks):
    """One of four processes; what it hands over comes back."""

    count = 4

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_teams_share_parts_out_and_answer_once() -> None:
    teams = [Teams(Process(rank), 2) for rank in range(4)]
    assert [team.own(5) for team in teams] == [range(2), range(2), range(2, 5), range(2, 5)]
    error = ValueError("of one")
    assert [team.joined(["result", error]) for team in teams] == [["result", error], [error]] * 2
