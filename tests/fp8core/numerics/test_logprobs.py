import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8core.numerics import logprobs
from fp8core.numerics.logprobs import BF16_HEAD, FP32_HEAD, HeadFormat, load_head, log_softmax, token_logprobs

TEMPERATURES = [0.3, 1.0, 1.7]


def random_case(tokens: int, vocabulary: int, hidden: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and head as BF16 values in FP32, and targets."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(rows, hidden, generator=generator) for rows in (tokens, vocabulary))
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return x.bfloat16().float(), (weight / math.sqrt(hidden) * 3).bfloat16().float(), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the textbook formula in FP64."""
    logp = torch.log_softmax(x.double() @ weight.double().t() / temperature, dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def test_log_softmax_does_not_depend_on_batch_or_vocabulary_order() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 1000, generator=generator) * 4
    whole = log_softmax(logits, 0.7)
    for rows in (*torch.arange(5).split(1), torch.arange(30, 37), torch.randperm(64, generator=generator)):
        assert torch.equal(log_softmax(logits[rows], 0.7), whole[rows])
    wide = 0.01 * torch.randn(2, 151_936, generator=generator)
    for x in (logits, wide):
        order = torch.randperm(x.shape[1], generator=generator)
        assert torch.equal(log_softmax(x[:, order], 0.7), log_softmax(x, 0.7)[:, order])


def test_extreme_logits_stay_finite() -> None:
    logp = log_softmax(torch.tensor([[3e38, -3e38, 0.0], [1e4, 1e4, -1e4]]), 0.01)
    assert logp.isfinite().all()
    assert logp[0, 0].item() == 0.0
    assert logp[1, 0].item() == -math.log(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_round_the_exact_product_once(dtype: torch.dtype) -> None:
    x, weight, _ = random_case(20, 50, 64, seed=2)
    head = load_head(weight.to(dtype))
    exact = x.double() @ weight.double().t()
    fp32, bf16 = FP32_HEAD.logits(x, head), BF16_HEAD.logits(x, head)
    assert fp32.dtype == bf16.dtype == torch.float32
    assert ((fp32 - exact).abs() <= 2.0**-22 * (x.double().abs() @ weight.double().abs().t())).all()
    assert torch.equal(bf16, bf16.bfloat16().float())
    assert ((bf16 - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()
    assert torch.equal(head.values, weight)
    assert head.master is None


@pytest.mark.parametrize("form", [FP32_HEAD, BF16_HEAD])
@pytest.mark.parametrize("hidden", [64, 1000])
def test_nothing_depends_on_the_batch(form: HeadFormat, hidden: int) -> None:
    x, weight, targets = random_case(64, 333, hidden, seed=3)
    head = load_head(weight)
    logits, (logp, entropy) = form.logits(x, head), token_logprobs(x, head, form, targets, 1.0)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(4))
    for rows in (*order[:5].split(1), order[:7], order):
        assert torch.equal(form.logits(x[rows], head), logits[rows])
        some = token_logprobs(x[rows], head, form, targets[rows], 1.0)
        assert torch.equal(some[0], logp[rows])
        assert torch.equal(some[1], entropy[rows])


# Log-probs of tokens


def gradients(
    x: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor, form: HeadFormat, temp: float
) -> tuple[Tensor, ...]:
    x, master = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logp, _ = token_logprobs(x, replace(load_head(weight), master=master), form, targets, temp)
    return torch.autograd.grad(logp, (x, master), upstream)


def test_a_bf16_head_passes_the_gradient_of_its_rounded_logits() -> None:
    x, weight, targets = random_case(20, 50, 64, seed=9)
    upstream = torch.randn(20, generator=torch.Generator().manual_seed(10))
    ours = gradients(x, weight, targets, upstream, BF16_HEAD, 0.7)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = leaves[0] @ leaves[1].t()
    rounded = exact + (BF16_HEAD.logits(x, load_head(weight)).double() - exact).detach()
    logp = torch.log_softmax(rounded / 0.7, dim=-1).gather(-1, targets[:, None])[:, 0]
    for grad, theirs in zip(ours, torch.autograd.grad(logp, leaves, upstream.double()), strict=True):
        assert (grad - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("elements", [1 << 24, 150])
def test_logprobs_entropies_and_gradients_are_those_of_the_plain_formula(
    temperature: float, parts: tuple[float, float], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs.ExactHead, "chunk_elements", elements)
    x, weight, targets = random_case(40, 100, 64, seed=14)
    upstream = torch.randn(2, 40, generator=torch.Generator().manual_seed(15)) * torch.tensor(parts)[:, None]
    ours = x.clone().requires_grad_(), weight.clone().requires_grad_()
    found = token_logprobs(ours[0], replace(load_head(weight), master=ours[1]), FP32_HEAD, targets, temperature)
    theirs = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = plain(*theirs, targets, temperature)
    for value, exact in zip(found, expected, strict=True):
        assert value.dtype == torch.float32
        assert torch.allclose(value.double(), exact, rtol=1e-6, atol=1e-5)
    gradients = []
    for values, leaves in ((found, ours), (expected, theirs)):
        loss = sum((g.to(v.dtype) * v).sum() for g, v, part in zip(upstream, values, parts, strict=True) if part)
        gradients.append(torch.autograd.grad(loss, leaves))
    for grad, exact in zip(*gradients, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_a_frozen_head_passes_the_gradient_on() -> None:
    x, weight, targets = random_case(6, 20, 16, seed=15)
    expected, _ = gradients(x, weight, targets, torch.ones(6), FP32_HEAD, 1.0)
    logp, _ = token_logprobs(x.requires_grad_(), load_head(weight), FP32_HEAD, targets, 1.0)
    assert torch.equal(torch.autograd.grad(logp.sum(), x)[0], expected)
