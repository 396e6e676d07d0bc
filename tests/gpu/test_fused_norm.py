import pytest
import torch
from torch import Tensor

from fp8core.numerics.block_codes import Codes, FiniteFlag, row_and_column_codes
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.fused_norm import add_norm, add_norm_backward, add_norm_codes, add_norm_row_codes

pytestmark = pytest.mark.gpu

EPS = 1e-6
RULES = ["pow2", "fp32"]
# Decoding, prompts of no round length, the small and the large models' hidden sizes, a last group that is shorter.
SHAPES = [(1, 512), (3, 4096), (130, 200), (333, 5120), (1025, 4096)]


def draw(*shape: int, seed: int, device: torch.device) -> Tensor:
    """Heavy tails and signed zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    x, spread = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return torch.where(spread > 2, x.sign() * -0.0, x * torch.exp(2 * spread)).bfloat16()


def weight_of(hidden: int, device: torch.device) -> Tensor:
    return (1 + draw(hidden, seed=9, device=device).float() / 8).bfloat16().float()


def on_cpu(arguments: tuple) -> tuple:
    return tuple(value.cpu() if isinstance(value, Tensor) else value for value in arguments)


def assert_same(found: Codes, expected: Codes) -> None:
    assert found[0].is_contiguous()
    assert torch.equal(found[0].cpu().view(torch.uint8), expected[0].cpu().view(torch.uint8))
    assert torch.equal(found[1].cpu(), expected[1].cpu())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("adds", [True, False])
def test_the_forward_gives_the_bytes_of_the_reference(device, shape: tuple[int, int], adds: bool) -> None:
    x = draw(*shape, seed=1, device=device)
    added = draw(*shape, seed=2, device=device) if adds else None
    arguments = x, added, weight_of(shape[1], device), EPS
    expected = add_norm(*on_cpu(arguments))
    for found, reference in zip(add_norm(*arguments), expected, strict=True):
        assert torch.equal(found.cpu(), reference)
    for rule in RULES:
        rows, columns = row_and_column_codes(expected[1], rule)
        total, by_row, by_column, inverse = add_norm_codes(*arguments, rule)
        assert torch.equal(total.cpu(), expected[0])
        assert torch.equal(inverse.cpu(), expected[2])
        assert_same(by_row, rows)
        assert_same(by_column, columns)
        total, by_row = add_norm_row_codes(*arguments, rule)
        assert torch.equal(total.cpu(), expected[0])
        assert_same(by_row, rows)


def test_a_row_is_the_same_alone_and_among_others(device) -> None:
    x, added = draw(300, 4096, seed=1, device=device), draw(300, 4096, seed=2, device=device)
    weight = weight_of(4096, device)
    _total, (codes, scales) = add_norm_row_codes(x, added, weight, EPS, "pow2")
    for row in (0, 17, 299):
        part = slice(row, row + 1)
        _total, alone = add_norm_row_codes(x[part], added[part], weight, EPS, "pow2")
        assert_same(alone, (codes[part], scales[part]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sends", [True, False])
def test_the_backward_agrees_with_the_reference_and_with_itself(device, shape: tuple[int, int], sends: bool) -> None:
    x, grad_normed = draw(*shape, seed=1, device=device), draw(*shape, seed=3, device=device)
    weight = weight_of(shape[1], device)
    total, _normed, inverse = add_norm(x, None, weight, EPS)
    arguments = grad_normed, draw(*shape, seed=4, device=device) if sends else None, total, weight, inverse
    grad, grad_weight = add_norm_backward(*arguments)
    expected, expected_weight = add_norm_backward(*on_cpu(arguments))
    assert (grad.cpu() != expected).float().mean() < 0.01
    # Where a row's gradient cancels, what is left has the error of what cancelled.
    scale = expected.float().abs().amax(-1, keepdim=True)
    assert ((grad.cpu().float() - expected.float()).abs() <= 2**-7 * expected.float().abs() + 1e-5 * scale).all()
    assert torch.allclose(grad_weight.cpu(), expected_weight, rtol=1e-4, atol=1e-4 * float(expected_weight.abs().max()))
    for _ in range(3):
        again = add_norm_backward(*arguments)
        assert torch.equal(again[0], grad)
        assert torch.equal(again[1], grad_weight)


@pytest.mark.parametrize("codes_of", [add_norm_row_codes, add_norm_codes])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (129, 299), (64, 128)])
def test_nothing_with_nan_or_infinity_is_quantised(device, codes_of, value: float, place: tuple[int, int]) -> None:
    x = torch.ones(130, 300, dtype=torch.bfloat16, device=device)
    bad = x.clone()
    bad[place] = value
    weight = torch.ones(300, device=device)
    for rule in RULES:
        for arguments in ((bad, None), (bad, x), (x, bad)):
            with pytest.raises(GroupNotFinite):
                codes_of(*arguments, weight, EPS, rule)
        weight_bad = weight.clone()
        weight_bad[place[1]] = value
        with pytest.raises(GroupNotFinite):
            codes_of(x, None, weight_bad, EPS, rule)
        clean = FiniteFlag(device)
        codes_of(x, x, weight, EPS, rule, clean)
        clean.check()


def test_a_full_batch(device) -> None:
    """Offsets beyond 2^31 bytes; the reference is the GPU's own unfused composition."""
    x = torch.randn(65_536, 4096, device=device).bfloat16()
    added, weight = x.flip(0).contiguous(), weight_of(4096, device)
    total, by_row, by_column, _inverse = add_norm_codes(x, added, weight, EPS, "pow2")
    plain, normed, _inverse = add_norm(x, added, weight, EPS)
    rows, columns = row_and_column_codes(normed, "pow2")
    assert torch.equal(total, plain)
    for found, expected in ((by_row, rows), (by_column, columns)):
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1], expected[1])
