"""Supports of top-k, top-p and min-p, and what is scored and learnt in them, against slow definitions in FP64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8core.numerics import packed
from fp8core.numerics.logprobs import FP32_HEAD, ExactHead, chunked_logprobs, load_head, token_logprobs
from fp8core.numerics.packed import PackedHead
from fp8core.numerics.support import truncated
from fp8core.numerics.truncation import Truncation

CUTS = [
    Truncation(top_k=5),
    Truncation(top_p=0.7),
    Truncation(min_p=0.2),
    Truncation(9, 0.8, 0.05),
    Truncation(top_k=1),
]


def supports(logits: Tensor, temperature: float, cut: Truncation, targets: Tensor | None = None) -> list[set[int]]:
    found = truncated(logits, temperature, cut, targets)
    assert torch.equal(found[found.isfinite()], logits[found.isfinite()])
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in found]


def definition(row: list[float], temperature: float, cut: Truncation) -> tuple[set[int], float]:
    """The support by NumPy, token by token, and how near a probability is to where another set begins."""
    p = np.exp(np.array(row, np.float64) / temperature - max(row) / temperature)
    nearest = min(abs(p / (cut.min_p or 2.0) - 1))
    inside = [i for i in range(len(row)) if p[i] >= cut.min_p]
    inside = [i for i in inside if cut.top_k is None or sum(other > row[i] for other in row) < cut.top_k]
    if cut.top_p < 1:
        share = [sum(p[j] for j in inside if row[j] > row[i]) / sum(p[inside]) for i in inside]
        nearest = min(nearest, *(abs(each - cut.top_p) for each in share))
        inside = [i for i, each in zip(inside, share, strict=True) if each < cut.top_p]
    return set(inside), nearest


@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(1, 60),
    spread=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    steps=st.sampled_from([1.0, 4.0, 1e6]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    cut=st.builds(
        Truncation,
        st.one_of(st.none(), st.integers(1, 70)),
        st.sampled_from([1e-9, 0.11, 0.53, 0.91, 0.997, 1.0]),
        st.sampled_from([0.0, 0.011, 0.23, 0.77]),
    ),
)
@settings(max_examples=200)
def test_a_support_is_that_of_the_definition(seed, vocabulary, spread, steps, temperature, cut) -> None:
    """Rounded logits have many ties."""
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits * steps).round() / steps
    for found, row in zip(supports(logits, temperature, cut), logits.tolist(), strict=True):
        expected, nearest = definition(row, temperature, cut)
        assert found == expected or nearest < 1e-6


def test_equal_logits_stay_together_and_a_row_is_alone() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -0.0], [2.0] * 5])
    assert supports(logits, 1.0, Truncation(top_k=2)) == [{1, 2, 3}, {*range(5)}]
    assert supports(logits, 1.0, Truncation(top_k=4)) == [{*range(5)}, {*range(5)}]
    assert supports(logits, 1.0, Truncation(top_p=0.4)) == [{1, 2, 3}, {*range(5)}]
    assert supports(logits, 1.0, Truncation(top_k=1), torch.tensor([4, 0]))[0] == {1, 2, 3, 4}
    # Min-p comes before top-p: 0.5 of two tokens of 0.4 is one, and of all four it is two.
    logits = torch.tensor([[0.42, 0.4, 0.09, 0.09]]).log()
    assert supports(logits, 1.0, Truncation(top_p=0.5, min_p=0.3)) == [{0}]
    assert supports(logits, 1.0, Truncation(top_p=0.5)) == [{0, 1}]
    wide = 2 * torch.randn(64, 301, generator=torch.Generator().manual_seed(4))
    whole = truncated(wide, 0.9, CUTS[3])
    assert all(torch.equal(truncated(wide[rows], 0.9, CUTS[3]), whole[rows]) for rows in (slice(0, 1), slice(5, 12)))


def test_no_number_shows() -> None:
    logits = torch.tensor([[1.0, torch.nan, 0.0], [-torch.inf, 0.0, -torch.inf]])
    assert truncated(logits, 1.0, Truncation(2, 0.9, 0.1))[0].isnan().any()
    assert supports(logits[1:], 1.0, Truncation(2, 0.9, 0.1)) == [{1}]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("chunk", [1 << 24, 40 * 3])
def test_scores_and_gradients_are_those_of_a_masked_softmax(monkeypatch, cut, chunk) -> None:
    """FP64 autograd in a fixed support. Some targets are not in the policy's own, and are added to it."""
    for head in (ExactHead, packed.PackedHead):
        monkeypatch.setattr(head, "chunk_elements", chunk)
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(rows, 24, generator=generator).bfloat16().float() for rows in (11, 40))
    upstream = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    temperature = 0.8
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    scaled = wide[0] @ wide[1].t() / temperature
    inside = torch.zeros(11, 40, dtype=torch.bool)
    for row, logits in enumerate((scaled * temperature).tolist()):
        inside[row, [*definition(logits, temperature, cut)[0]]] = True
    targets = torch.where(inside, 1.0, torch.rand(11, 40, generator=generator)).argmax(-1)
    targets[8:] = torch.where(inside[8:], -1.0, torch.rand(3, 40, generator=generator)).argmax(-1)
    inside[range(11), targets] = True
    logp = scaled.masked_fill(~inside, -1e30).log_softmax(-1)
    expected = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp * inside).sum(-1)
    slopes = torch.autograd.grad([*expected], wide, [*upstream])

    exact = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    head = load_head(weight)
    scores = token_logprobs(
        exact[0], type(head)(head.values, head.aligned, exact[1]), FP32_HEAD, targets, temperature, cut
    )
    fast = [x.bfloat16().requires_grad_(), weight.clone().requires_grad_()]
    same = chunked_logprobs(*fast, PackedHead(weight.bfloat16(), torch.float32, temperature, cut), targets)
    for ours, packed_scores, theirs in zip(scores, same, expected, strict=True):
        assert torch.allclose(ours.double(), theirs, atol=2e-6)
        assert torch.equal(packed_scores, ours)
    for values, leaves, tolerance in ((scores, exact, 1e-5), (same, fast, 1e-2)):
        gradients = torch.autograd.grad([*values], leaves, [*upstream.float()])
        for gradient, theirs in zip(gradients, slopes, strict=True):
            assert (gradient.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-6
