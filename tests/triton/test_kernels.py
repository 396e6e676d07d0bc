"""Every operation with a Triton kernel: its cases, and the bytes or the distance of kernel and reference."""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.numerics.adamw import AdamWStep, adamw
from fp8core.numerics.attention import QUERY_TYPES
from fp8core.numerics.dispatch import OPERATIONS, kernel_of
from fp8core.numerics.e4m3 import GroupNotFinite, round_to_e4m3, row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.fused import (
    HeadLayout,
    add_norm,
    add_norm_backward,
    add_norm_codes,
    add_norm_row_codes,
    head_codes,
    head_gradients,
    head_values,
    heads_of,
    limits_of,
    norm_rotate,
    norm_rotate_backward,
    swiglu,
    swiglu_backward,
    swiglu_backward_codes,
    swiglu_codes,
    swiglu_row_codes,
)
from fp8core.numerics.gemm import transpose
from fp8core.numerics.kv_scales import TALLY, LayerScales, tally
from fp8core.numerics.logprobs import drawn_tokens, log_softmax, logit_slopes, token_statistics
from fp8core.numerics.lora import merged_weight
from fp8core.numerics.recipe import FP32, POW2, RECIPES, TILE, AttentionProducts, Recipe
from fp8core.numerics.rotary import inverse_frequencies
from fp8core.numerics.support import truncated
from fp8core.numerics.truncation import Truncation

EPS = 1e-6
RULES = ["pow2", "fp32"]


def drawn(*shape: int, seed: int) -> Tensor:
    """BF16 with heavy tails and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    x, spread = (torch.randn(shape, generator=generator) for _ in range(2))
    return torch.where(spread > 2, x.sign() * -0.0, x * torch.exp(spread)).bfloat16()


def weight_of(size: int, seed: int = 9) -> Tensor:
    return (1 + drawn(size, seed=seed).float() / 8).bfloat16().float()


@dataclass(frozen=True)
class Case:
    """An operation on arguments of the CPU.

    Attributes:
        near: relative distance of BF16 results from the reference; None where bytes must be equal.
        large: for a GPU alone.
    """

    operation: Callable[..., Any]
    name: str
    arguments: Callable[[], tuple[Any, ...]]
    near: float | None = None
    large: bool = False


def quantise_cases() -> Iterator[Case]:
    for (name, recipe), shape in product(RECIPES.items(), ((130, 5), (37, 200))):
        for operation, groups in (
            (row_codes, (recipe.activations,)),
            (row_and_column_codes, (recipe.activations, recipe.tokens)),
            (tile_codes, (recipe.weights,)),
        ):
            yield Case(operation, f"{shape}-{name}", lambda s=shape, g=groups: (drawn(*s, seed=1), *g))
    for shape in ((37, 200), (3, 130, 70)):

        def weight(shape: tuple[int, ...] = shape) -> tuple[Any, ...]:
            codes = drawn(*shape, seed=3).to(torch.float8_e4m3fn)
            return ((codes, torch.rand(*shape[:-2], -(-shape[-2] // TILE), -(-shape[-1] // TILE))),)

        yield Case(transpose, f"{shape}", weight)
    # The smallest scales are normal numbers, values may be subnormal.
    for recipe, exponent in product((POW2, FP32), (-40, -70, -100, -118, -124)):

        def small(recipe: Recipe = recipe, exponent: int = exponent) -> tuple[Any, ...]:
            return drawn(130, 200, seed=2).float() * 2.0**exponent, recipe.gradients, recipe.tokens

        yield Case(row_and_column_codes, f"2^{exponent}-{recipe.name}", small)


def norm_cases() -> Iterator[Case]:
    # Decoding, prompts of no round length, the models' hidden sizes, a last group that is shorter.
    for tokens, hidden in ((37, 256), (37, 200), (1, 512), (3, 4096), (130, 200), (333, 5120), (1025, 4096)):
        for adds in (True, False):
            what, large = f"{tokens}x{hidden}-{'adds' if adds else 'first'}", tokens != 37

            def forward(n: int = tokens, h: int = hidden, adds: bool = adds) -> tuple[Any, ...]:
                return drawn(n, h, seed=1), drawn(n, h, seed=2) if adds else None, weight_of(h), EPS

            def backward(forward: Callable[[], tuple[Any, ...]] = forward) -> tuple[Any, ...]:
                x, added, weight, _eps = forward()
                total, _normed, inverse = add_norm(x, None, weight, EPS)
                return drawn(*x.shape, seed=3), added, total, weight, inverse

            yield Case(add_norm, what, forward, large=large)
            yield Case(add_norm_backward, what, backward, near=2**-7, large=large)
            for name, recipe in RECIPES.items():
                for operation, groups in (
                    (add_norm_row_codes, (recipe.activations,)),
                    (add_norm_codes, (recipe.activations, recipe.tokens)),
                ):
                    yield Case(operation, f"{what}-{name}", lambda f=forward, g=groups: (*f(), *g), large=large)


def projection(tokens: int, layout: HeadLayout, seed: int) -> Tensor:
    return drawn(tokens, (layout.query_heads + 2 * layout.kv_heads) * layout.head_dim, seed=seed)


def rotary_cases() -> Iterator[Case]:
    # Fewer heads than a program takes and more, a half that is no power of two; Qwen3-8B and Qwen3-0.6B.
    small = [(13, HeadLayout(4, 2, 32)), (13, HeadLayout(9, 3, 24)), (13, HeadLayout(16, 8, 64))]
    layouts = HeadLayout(32, 8, 128), HeadLayout(16, 8, 128), HeadLayout(9, 3, 96)
    for tokens, layout in [*small, *((n, layout) for n in (1, 77, 1025) for layout in layouts)]:
        for normed in (True, False):
            what = f"{tokens}-{'-'.join(map(str, layout))}-{'normed' if normed else 'plain'}"

            def rest(n: int = tokens, layout: HeadLayout = layout, normed: bool = normed) -> tuple[Any, ...]:
                angles = torch.arange(50).float()[:, None] * inverse_frequencies(layout.head_dim, 1e4)
                cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
                weights = weight_of(layout.head_dim, 7), weight_of(layout.head_dim, 8)
                positions = torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(1))
                return weights if normed else None, cos, sin, positions, layout, EPS

            def forward(
                n: int = tokens, layout: HeadLayout = layout, rest: Callable[[], Any] = rest
            ) -> tuple[Any, ...]:
                qkv = projection(n, layout, 2)
                # Values are copied whatever they are.
                heads_of(qkv, layout)[2][-1, 0, :2] = torch.tensor([torch.nan, torch.inf])
                return qkv, *rest()

            def backward(
                n: int = tokens, layout: HeadLayout = layout, rest: Callable[[], Any] = rest
            ) -> tuple[Any, ...]:
                return projection(n, layout, 3), projection(n, layout, 2), *rest()

            yield Case(norm_rotate, what, forward, large=tokens != 13)
            yield Case(norm_rotate_backward, what, backward, near=2**-7, large=tokens != 13)


def swiglu_cases() -> Iterator[Case]:
    # 200 columns: gate and up share a group, which has no kernel of its own.
    for tokens, columns in ((37, 128), (37, 200), (1, 128), (130, 200), (333, 384), (1025, 1536)):
        what, large = f"{tokens}x{columns}", tokens != 37

        def forward(n: int = tokens, m: int = columns) -> tuple[Any, ...]:
            return (drawn(n, 2 * m, seed=1),)

        def backward(n: int = tokens, m: int = columns) -> tuple[Any, ...]:
            return drawn(n, m, seed=2), drawn(n, 2 * m, seed=1)

        yield Case(swiglu, what, forward, near=2**-6, large=large)
        yield Case(swiglu_backward, what, backward, near=2**-6, large=large)


# The last are no powers of two: quotients, products and the limits (134.6, which BF16 has not) are rounded.
# 129 / 128 over Q's is next to the middle between two codes; a product with the reciprocal is that middle.
SCALES = [LayerScales(2.0**-6, 2.0**-5, 2.0**-7), LayerScales(0.7010869979858398, 0.0123, 134.6 / 448)]


def head_cases() -> Iterator[Case]:
    # Tokens that no program has whole; heads that fill a part of a program, several programs, one exactly.
    small = [(13, HeadLayout(4, 2, 32)), (13, HeadLayout(9, 3, 24)), (13, HeadLayout(16, 8, 128))]
    layouts = HeadLayout(32, 8, 128), HeadLayout(9, 3, 24), HeadLayout(20, 10, 128)
    for tokens, layout in [*small, *((n, layout) for n in (9, 77, 1025) for layout in layouts)]:
        for (scales, rule), products in product(zip(SCALES, RULES, strict=True), QUERY_TYPES):
            what = f"{tokens}-{'-'.join(map(str, layout))}-{rule}-{products}"

            def forward(
                n: int = tokens,
                layout: HeadLayout = layout,
                scales: LayerScales = scales,
                products: AttentionProducts = products,
                nan: bool = tokens != 13,
            ) -> tuple[Any, ...]:
                """Some elements are saturated, some on the limit or next to it, some are nothing in E4M3."""
                qkv = projection(n, layout, 2)
                for x, limit in zip(heads_of(qkv, layout), limits_of(scales, "fp8"), strict=True):
                    x.mul_(limit / 8)
                    near = torch.tensor([limit]).bfloat16().view(torch.int16) + torch.arange(-2, 3, dtype=torch.int16)
                    x[5, 0, :5], x[6, 0, :5] = near.view(torch.bfloat16), -near.view(torch.bfloat16)
                    x[7, 0, :6] = torch.tensor([torch.inf, -torch.inf, 3e38, 1e-40, -1e-30, limit * 2**-19])
                    x[8] = 129 / 128
                    if nan:
                        x[7, 0, 6] = torch.nan
                return qkv, layout, scales, products

            def backward(forward: Callable[..., Any] = forward) -> tuple[Any, ...]:
                """Gradients are views of one tensor, as they come from a fused projection."""
                qkv, layout, *rest = forward(nan=True)
                return heads_of(projection(len(qkv), layout, 3), layout), qkv, layout, *rest

            for operation in (head_codes, head_values):
                yield Case(operation, what, forward, large=tokens != 13)
            yield Case(head_gradients, what, backward, large=tokens != 13)


CASES = [*quantise_cases(), *norm_cases(), *rotary_cases(), *swiglu_cases(), *head_cases()]


def places(cases: list[Case]) -> list[Any]:
    """Small cases in the interpreter, all of them on a GPU."""
    found = []
    for case in cases:
        name = f"{case.operation.__name__}-{case.name}"
        if not case.large:
            found.append(pytest.param(case, "interpreter", id=f"{name}-interpreter"))
        found.append(pytest.param(case, "gpu", id=f"{name}-gpu", marks=pytest.mark.gpu))
    return found


def moved(value: Any, device: torch.device | str) -> Any:
    """Arguments with their tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def flat(value: Any) -> list[Tensor | None]:
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, tuple) else [value]


def bits(x: Tensor) -> Tensor:
    """Bit patterns on the CPU, with one NaN."""
    x = x.cpu()
    return torch.where(x.float().isnan(), 12345.0, x.float()).view(torch.int32) if x.is_floating_point() else x


def assert_same(found: Any, expected: Any) -> None:
    for mine, reference in zip(flat(found), flat(expected), strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None and reference is not None:
            assert (mine.shape, mine.dtype) == (reference.shape, reference.dtype)
            assert mine.is_contiguous() or mine.dtype != torch.float8_e4m3fn
            assert torch.equal(bits(mine), bits(reference))


def assert_near(found: Any, expected: Any, relative: float) -> None:
    """BF16 differs where FP32 sums in another order round otherwise: rarely, by a step. FP32 sums differ a little."""
    for mine, reference in zip(flat(found), flat(expected), strict=True):
        assert (mine is None) == (reference is None)
        if mine is None or reference is None:
            continue
        assert mine.dtype == reference.dtype
        mine, reference, rounded = mine.cpu().double(), reference.double(), mine.dtype == torch.bfloat16
        # Where a row's gradient cancels, what is left has the error of what cancelled.
        largest = reference.abs().amax(-1, keepdim=True)
        bound = relative * reference.abs() + 1e-5 * largest if rounded else 1e-4 * (reference.abs() + largest)
        assert ((mine - reference).abs() <= bound).all()
        assert not rounded or (mine != reference).double().mean() < 0.01


@pytest.mark.parametrize(("case", "device"), places(CASES), indirect=["device"])
def test_a_kernel_computes_its_reference(case: Case, device: torch.device, run) -> None:
    arguments = case.arguments()
    expected = OPERATIONS[case.operation.__name__][0](*arguments)
    on_device = moved(arguments, device)
    found = run(case.operation, *on_device)
    if case.near is None:
        assert_same(found, expected)
    else:
        assert_near(found, expected, case.near)
    if device.type == "cuda":
        for _ in range(2):
            assert_same(run(case.operation, *on_device), moved(found, "cpu"))


def test_a_kernel_takes_what_its_reference_takes(device: torch.device) -> None:
    for name, (reference, module) in OPERATIONS.items():
        assert inspect.signature(kernel_of(module, name)) == inspect.signature(reference), name


def test_silu_is_the_nearest_bfloat16_to_all_but_a_few_gates(device: torch.device, run) -> None:
    gates = (torch.arange(0x10000, dtype=torch.int32) << 16).view(torch.float32).view(256, 256)
    # In the interpreter subnormals are zero.
    usual = gates.isfinite() & (gates > -87) & ((gates.abs() > 2.0**-120) | (device.type == "cuda"))
    gates = torch.where(gates.isfinite(), gates, 1.0)
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1).bfloat16()
    found, expected = run(swiglu, gate_up.to(device)).cpu(), swiglu(gate_up)
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int())[usual]
    assert int(steps.abs().max()) <= 1
    assert int(steps.count_nonzero()) <= 6, gates[usual][steps != 0]
    # Where the sigmoid is subnormal, the kernels have zero.
    assert (found[gates <= -87].float().abs() < 2.0**-118).all()


@pytest.mark.parametrize("vocabulary", [8196, 203])
def test_the_head_has_one_log_prob_of_a_token(device: torch.device, run, vocabulary: int) -> None:
    """More than one block of a row, and rows that begin anywhere; some tokens are impossible."""
    generator = torch.Generator().manual_seed(0)
    wide = 5 * torch.randn(3, vocabulary + 60, generator=generator)
    wide[1, 40:90] = -torch.inf
    wide[2, :200] = -torch.inf
    targets = torch.randint(200, vocabulary, (3,), generator=generator)
    logits = wide[:, :vocabulary]
    exact = torch.log_softmax(logits.double() / 0.7, -1)
    entropy = torch.special.entr(exact.exp()).sum(-1)
    found = run(log_softmax, wide.to(device)[:, :vocabulary], 0.7)
    assert torch.allclose(found.cpu().double(), exact, rtol=1e-6, atol=1e-5)
    on_device = logits.contiguous().to(device), targets.to(device)
    chosen, entropies = run(token_statistics, *on_device, 0.7)
    assert torch.equal(chosen, found.gather(1, on_device[1][:, None])[:, 0])
    assert torch.allclose(entropies.cpu().double(), entropy, atol=1e-5)
    upstream = torch.randn(3, generator=generator), torch.randn(3, generator=generator)
    p = exact.exp()
    one_hot = torch.zeros_like(p).scatter_(1, targets[:, None], 1.0)
    above = torch.where(p > 0, exact + entropy[:, None], 0.0)
    parts = (one_hot - p) * upstream[0][:, None] / 0.7, -p * above * upstream[1][:, None] / 0.7
    for given in ((True, False), (False, True), (True, True)):
        gradients = tuple(g.to(device) if wanted else None for g, wanted in zip(upstream, given, strict=True))
        slopes = run(logit_slopes, *on_device, entropies, 0.7, gradients, torch.float32)
        expected = sum(part for part, wanted in zip(parts, given, strict=True) if wanted)
        assert (slopes.cpu().double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("vocabulary", [8192 * 2 + 140, 203])
def test_a_token_is_drawn_where_the_number_of_its_row_falls(device: torch.device, run, vocabulary: int) -> None:
    """Of several blocks, some without any token that is possible; the numbers of two rows are next to both ends."""
    generator = torch.Generator().manual_seed(0)
    wide = 5 * torch.randn(24, vocabulary + 60, generator=generator)
    wide[1::4, : vocabulary - 100] = -torch.inf
    wide[2::4, 90:] = -torch.inf
    wide[3::4, : vocabulary - 1] = -torch.inf
    logits, temperatures = wide[:, :vocabulary], torch.rand(24, generator=generator) + 0.5
    seeds = torch.randint(-(2**63), 2**63 - 1, (24,), generator=generator)
    places = torch.randint(0, 5000, (24,), generator=generator)
    # Found by search: 1.7e-7 from 0, and 1.6e-7 from 1.
    seeds[0], seeds[4], places[0], places[4] = 1127518, 2866022, 0, 0
    expected, exact = drawn_tokens(logits, temperatures, seeds, places)
    rest = [tensor.to(device) for tensor in (temperatures, seeds, places)]
    on_device = wide.to(device)[:, :vocabulary]
    tokens, logprobs = run(drawn_tokens, on_device, *rest)
    assert torch.equal(tokens.cpu(), expected)
    assert (expected[3::4] == vocabulary - 1).all()
    assert torch.allclose(logprobs.cpu(), exact, rtol=1e-6, atol=1e-5)
    for row in (slice(0, 1), slice(5, 7)):
        alone = run(drawn_tokens, on_device[row], *(tensor[row] for tensor in rest))
        assert torch.equal(alone[0], tokens[row])
        assert torch.equal(alone[1], logprobs[row])
    on_device[0, 3] = torch.nan
    tokens, logprobs = run(drawn_tokens, on_device, *rest)
    assert logprobs[0].isnan()
    assert 0 <= int(tokens[0]) < vocabulary
    assert torch.equal(logprobs[1:].cpu(), run(drawn_tokens, wide.to(device)[:, :vocabulary], *rest)[1][1:].cpu())


FORWARD, BACKWARD = ("activations", "tokens"), ("gradients", "tokens")
REFUSING: dict[str, tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, ...]], tuple[str, ...]]] = {
    "rows": (row_codes, lambda bad: (bad,), FORWARD[:1]),
    "rows and columns": (row_and_column_codes, lambda bad: (bad,), FORWARD),
    "tiles": (tile_codes, lambda bad: (bad,), ("weights",)),
    "norm, rows": (add_norm_row_codes, lambda bad: (bad, None, torch.ones(256, device=bad.device), EPS), FORWARD[:1]),
    "norm": (add_norm_codes, lambda bad: (torch.ones_like(bad), bad, torch.ones(256, device=bad.device), EPS), FORWARD),
    "norm's weight": (add_norm_codes, lambda bad: (torch.ones_like(bad), None, bad.amax(0).float(), EPS), FORWARD),
    "swiglu, rows": (swiglu_row_codes, lambda bad: (bad,), FORWARD[:1]),
    "swiglu": (swiglu_codes, lambda bad: (bad,), FORWARD),
    "swiglu backward": (swiglu_backward_codes, lambda bad: (torch.ones_like(bad[:, :128]), bad), BACKWARD),
    "swiglu backward, gradient": (
        swiglu_backward_codes,
        lambda bad: (bad, torch.ones_like(bad).repeat(1, 2)),
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_with_nan_or_infinity_is_quantised(device: torch.device, run, name: str, value: float) -> None:
    operation, arguments, operands = REFUSING[name]
    for place in ((0, 0), (129, 255), (64, 128)) if device.type == "cuda" else ((2, 255),):
        x = torch.ones(place[0] + 1, 256, device=device).bfloat16()
        x[place] = value
        for recipe in (POW2, FP32):
            with pytest.raises(GroupNotFinite):
                run(operation, *arguments(x), *(getattr(recipe, name) for name in operands))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_updates_as_the_reference(device: torch.device, run, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([torch.ones(5000), *(torch.zeros(5000, dtype=dtype) for _ in range(2))] for _ in range(2))
    ours = [tensor.to(device) for tensor in ours]
    for number in range(1, 5):
        grad = torch.randn(5000, generator=generator) * 10.0 ** (number - 3)
        step = AdamWStep.at(number, 1e-2, (0.9, 0.95), 0.1, 0.5)
        run(adamw, ours[0], grad.to(device), *ours[1:], step)
        adamw(theirs[0], grad, theirs[1], theirs[2], step)
    # The interpreter truncates what a GPU rounds to BF16.
    relative = 0.02 if dtype == torch.bfloat16 else 1e-6
    # A GPU's quotients and roots differ in their last bit, which is one of the whole weight and not of its change.
    starts = (0, 0, 0) if device.type == "cuda" else (1, 0, 0)
    for mine, reference, start in zip(ours, theirs, starts, strict=True):
        assert (mine.cpu().float() - reference.float()).norm() < relative * (reference.float() - start).norm()


@pytest.mark.parametrize("shape", [(1, 40), (131, 33)], ids=str)
def test_every_row_of_every_column_is_added(device: torch.device, shape: tuple[int, int]) -> None:
    from fp8core.kernels.norm import column_sums

    # Integers: sums of any order are equal.
    x = torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(column_sums(x.to(device)).cpu(), x.sum(0))


def magnitudes(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Far beyond the window that registers hold, and zeros; and which tokens are valid."""
    generator = torch.Generator().manual_seed(shape[2])
    x = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
    valid = torch.rand(shape[0], shape[2], generator=generator) > 0.3
    valid[:, 0] = True
    return (x * (torch.rand(shape, generator=generator) > 0.1)).to(dtype), valid


on_gpu = pytest.mark.parametrize("device", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)


@on_gpu
@pytest.mark.parametrize("poison", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 32, 1000, 128), (2, 3, 17, 96), (3, 2, 5, 700), (1, 1, 1, 1)], ids=str)
def test_tallies_are_those_of_the_reference(device: torch.device, shape, dtype: torch.dtype, poison: float) -> None:
    x, valid = magnitudes(shape, dtype)
    x[0, 0, 0, 0] = poison
    expected, found = (torch.zeros(TALLY, dtype=torch.int64).to(place) for place in ("cpu", device))
    for limit in (math.inf, 3.5):
        tally(expected, x, valid, limit)
        tally(found, x.to(device), valid.to(device), limit)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("shape", [(300, 200, 5), (16, 128, 1), (0, 64, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_weights_have_the_bytes_of_the_reference(device: torch.device, run, shape, dtype: torch.dtype) -> None:
    rows, columns, rank = shape
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator) for size in ((rows, columns), (rows, rank), (rank, columns))]
    drawn[0] = drawn[0].to(dtype)
    found = run(merged_weight, *(each.to(device) for each in drawn), 32 / 12)
    assert torch.equal(found.cpu(), merged_weight(*drawn, 32 / 12))


@pytest.mark.parametrize("scale", [2.0**-6, 0.3])
def test_static_codes_are_quotients_rounded_once(device: torch.device, scale: float) -> None:
    """Of V inside a fused projection, some beyond 448; the scale is read where it lies."""
    from fp8core.kernels.head_codes import codes_of_scale_tensor

    qkv = drawn(5, 6 * 128, seed=9).to(device)
    values, held = qkv[:, 5 * 128 :].view(-1, 1, 128), torch.tensor([0.0, scale], device=device)[1:]
    found = codes_of_scale_tensor(values, held)
    expected = round_to_e4m3(values.float() / held).to(torch.float8_e4m3fn)
    assert found.shape == values.shape
    assert (values.float() / held).abs().max() > 448 or scale > 0.1
    assert torch.equal(found.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))
    assert codes_of_scale_tensor(values[:0], held).shape == (0, 1, 128)


@pytest.mark.parametrize(
    "cut",
    [
        Truncation(top_k=1),
        Truncation(top_k=20),
        Truncation(top_p=0.95),
        Truncation(top_p=0.9999999),
        Truncation(min_p=0.05),
        Truncation(50, 0.8, 0.001),
        Truncation(300, 0.3, 0.0),
        Truncation(top_k=1 << 20),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [8192 + 140, 203])
def test_a_support_has_the_tokens_of_the_reference(device: torch.device, run, vocabulary: int, cut: Truncation) -> None:
    """Rows that are flat, steep, of one value, rounded to many ties, around 0, and with tokens that are impossible."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(8, vocabulary + 60, generator=generator)
    wide *= torch.tensor([0.01, 0.5, 3.0, 12.0, 0.0, 2.0, 1.0, 4.0])[:, None]
    wide[3] += 30
    wide[5] = wide[5].bfloat16().float().round()
    wide[7, : vocabulary - 90] = -torch.inf
    targets = torch.randint(vocabulary - 60, vocabulary, (8,), generator=generator)
    for temperature in (0.7, 1.0):
        expected = truncated(wide[:, :vocabulary], temperature, cut, targets)
        found = run(truncated, wide.to(device)[:, :vocabulary], temperature, cut, targets.to(device))
        assert torch.equal(found.cpu(), expected)
    alone = run(truncated, wide.to(device)[2:3, :vocabulary], 1.0, cut)
    assert torch.equal(alone.cpu(), truncated(wide[2:3, :vocabulary], 1.0, cut))
    # Where the first block of a row has no token, its statistics have numbers.
    chosen, entropy = run(token_statistics, found, targets.to(device), 1.0)
    assert torch.allclose(chosen.cpu(), token_statistics(expected, targets, 1.0)[0], rtol=1e-5, atol=1e-5)
    assert entropy.isfinite().all()
