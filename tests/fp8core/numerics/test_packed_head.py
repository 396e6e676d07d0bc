import pytest
import torch

from fp8core.numerics import packed_head
from fp8core.numerics.logprobs import Bf16Head, Fp32Head, load_head, token_logprobs
from fp8core.numerics.packed_head import HeadOptions

TOKENS, HIDDEN, VOCABULARY = 37, 24, 50


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("chunk", [1 << 27, 4 * VOCABULARY])
@pytest.mark.parametrize(("form", "output"), [(Fp32Head(), torch.float32), (Bf16Head(), torch.bfloat16)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_a_cpu_it_is_the_exact_head(monkeypatch: pytest.MonkeyPatch, form, output, temperature, chunk: int) -> None:
    monkeypatch.setattr(packed_head, "_CHUNK_ELEMENTS", chunk)
    hidden, weight = drawn(TOKENS, HIDDEN), drawn(VOCABULARY, HIDDEN)
    targets = torch.arange(TOKENS) % VOCABULARY
    # Ours takes BF16, the other the same values in FP32.
    ours, theirs = (
        [hidden.to(kind, copy=True).requires_grad_(), weight.float().requires_grad_()]
        for kind in (torch.bfloat16, torch.float32)
    )

    options = HeadOptions(output, temperature)
    found = packed_head.token_logprobs(ours[0], ours[1], weight, targets, options)
    expected = token_logprobs(theirs[0], load_head(weight, theirs[1]), form, targets, temperature)

    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    upstream = drawn(TOKENS).float()
    found[0].backward(upstream)
    expected[0].backward(upstream)
    # Slopes are rounded to BF16 before they are multiplied.
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.grad.float() - exact.grad).norm() < 4e-3 * exact.grad.norm()


def test_without_a_master_no_gradient_of_the_weight_is_made() -> None:
    hidden = drawn(TOKENS, HIDDEN).requires_grad_()
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    options = HeadOptions(torch.float32, 1.0)
    packed_head.token_logprobs(hidden, None, drawn(VOCABULARY, HIDDEN), targets, options)[0].sum().backward()
    assert hidden.grad is not None


def test_no_tokens_give_no_logprobs() -> None:
    options = HeadOptions(torch.float32, 1.0)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, entropy = packed_head.token_logprobs(drawn(0, HIDDEN), None, drawn(VOCABULARY, HIDDEN), none, options)
    assert (len(logprobs), len(entropy)) == (0, 0)
