"""Top-k and top-p: the tokens that are left, their log-probs, entropies and gradients, against a slow definition."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.numerics import packed
from fp8core.numerics.logprobs import (
    FP32_HEAD,
    ExactHead,
    Truncation,
    chunked_logprobs,
    load_head,
    log_softmax,
    token_logprobs,
    truncate,
)

UNITS = 1 << 34


def left_by_definition(row: list[float], temperature: float, top_k: int | None, top_p: float) -> set[int]:
    """Ids of the tokens that are left, in whole numbers of 2^-34 of the largest probability."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:top_k]
    if top_p == 1:
        return set(order)
    highest = row[order[0]] / temperature
    masses = [round(math.exp(row[token] / temperature - highest) * UNITS) for token in order]
    bound, before, left = top_p * (sum(masses) / UNITS), 0, set[int]()
    for token, mass in zip(order, masses, strict=True):
        if before / UNITS >= bound:
            break
        left.add(token)
        before += mass
    return left


def left_by(logits: torch.Tensor, temperature: float, truncation: Truncation | None) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in truncate(logits, temperature, truncation)]


@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(1, 60),
    spread=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    steps=st.sampled_from([1.0, 4.0, 1e6]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.one_of(st.none(), st.integers(1, 70)),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
@settings(max_examples=200)
def test_what_is_left_is_the_definition(seed, vocabulary, spread, steps, temperature, top_k, top_p) -> None:
    """Rounded logits have many ties."""
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits * steps).round() / steps
    found = left_by(logits, temperature, Truncation.of(top_k, top_p))
    expected = [left_by_definition(row, temperature, top_k, top_p) for row in logits.tolist()]
    assert found == expected

    logp = log_softmax(truncate(logits, temperature, Truncation.of(top_k, top_p)), temperature)
    for row, left, values in zip(logits.double() / temperature, expected, logp, strict=True):
        ids = sorted(left)
        assert (values[ids] - torch.log_softmax(row[ids], 0)).abs().max() <= vocabulary * 2.0**-35 + 1e-12
        assert values[[token not in left for token in range(vocabulary)]].isneginf().all()


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -0.0], [2.0] * 5])
    assert left_by(logits, 1.0, Truncation(2, 1.0)) == [{1, 2}, {0, 1}]
    assert left_by(logits, 1.0, Truncation(4, 1.0)) == [{0, 1, 2, 3}, {0, 1, 2, 3}]
    # Two fifths are reached by two tokens of five; a little more takes a third.
    assert left_by(logits, 1.0, Truncation(None, 0.4))[1] == {0, 1}
    assert left_by(logits, 1.0, Truncation(None, 0.400001))[1] == {0, 1, 2}
    # After top-k the same share is of what is left.
    assert left_by(logits, 1.0, Truncation(2, 0.4))[1] == {0}


def test_one_token_is_certain_and_no_truncation_changes_no_bit() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(3)) * 4
    certain = log_softmax(truncate(logits, 0.7, Truncation(1, 1.0)), 0.7)
    assert torch.equal(certain.argmax(-1), logits.argmax(-1))
    assert torch.equal(certain.amax(-1), torch.zeros(7, dtype=torch.float64))
    assert Truncation.of(None, 1.0) is None
    assert truncate(logits, 0.7, None) is logits
    for whole in (Truncation(50, 1.0), Truncation(99, 1.0)):
        assert torch.equal(log_softmax(truncate(logits, 0.7, whole), 0.7), log_softmax(logits, 0.7))


@pytest.mark.parametrize(
    "truncation", [Truncation(5, 1.0), Truncation(None, 0.7), Truncation(9, 0.8), Truncation(1, 1.0)]
)
@pytest.mark.parametrize("chunk", [1 << 24, 40 * 3])
def test_gradients_are_those_of_autograd_over_what_is_left(monkeypatch, truncation, chunk) -> None:
    """FP64 autograd with a fixed mask; both heads, in chunks and at once."""
    monkeypatch.setattr(ExactHead, "chunk_elements", chunk)
    monkeypatch.setattr(packed.PackedHead, "chunk_elements", chunk)
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(rows, 24, generator=generator).bfloat16().float() for rows in (11, 40))
    upstream, temperature = torch.randn(2, 11, generator=generator, dtype=torch.float64), 0.8
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    scaled = wide[0] @ wide[1].t() / temperature
    mask = truncate((scaled * temperature).detach().float(), temperature, truncation).isneginf()
    targets = torch.where(mask, -torch.inf, torch.rand(mask.shape, generator=generator)).argmax(-1)
    kept = [row.masked_select(~out) for row, out in zip(scaled, mask, strict=True)]
    normaliser = torch.stack([row.logsumexp(0) for row in kept])
    expected = (
        scaled.gather(-1, targets[:, None])[:, 0] - normaliser,
        torch.stack([-(row.softmax(0) * row.log_softmax(0)).sum() for row in kept]),
    )
    slopes = torch.autograd.grad([*expected], wide, [*upstream])

    ours = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = token_logprobs(
        ours[0], replace(load_head(weight), master=ours[1]), FP32_HEAD, targets, temperature, truncation
    )
    narrow = [x.bfloat16().requires_grad_(), weight.clone().requires_grad_()]
    head = packed.PackedHead(weight.bfloat16(), torch.float32, temperature, truncation)
    same = chunked_logprobs(narrow[0], narrow[1], head, targets)
    for mine, packed_one, exact in zip(found, same, expected, strict=True):
        assert torch.allclose(mine.double(), exact, atol=2e-6)
        assert torch.equal(packed_one, mine)
    for values, leaves, tolerance in ((found, ours, 1e-5), (same, narrow, 1e-2)):
        gradients = torch.autograd.grad([*values], leaves, [*upstream.float()])
        for gradient, exact in zip(gradients, slopes, strict=True):
            assert (gradient.double() - exact).norm() <= tolerance * exact.norm() + 1e-6
