"""Log-probs of the output head in Triton.

A program reads one row of logits in blocks: a row's result depends on the row alone. Nothing is contracted to an FMA.
Rows must begin on 16 bytes for fast loads; from elsewhere they are summed in another order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 8
_ALIGNED = 4
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": False}


@triton.jit
def _place(row: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, aligned: tl.constexpr) -> tl.tuple:
    """Where a row begins, and its length; both are multiples of `aligned`."""
    return row.to(tl.int64) * tl.multiple_of(pitch, aligned), tl.multiple_of(vocabulary, aligned)


@triton.jit(do_not_specialize=["pitch", "vocabulary", "inverse"])
def _statistics_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, inverse: tl.tensor, top: tl.tensor, total: tl.tensor,
    weighted: tl.tensor, aligned: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    start, size = _place(row, pitch, vocabulary, aligned)
    at = tl.arange(0, block)
    x = tl.load(logits + start + at, mask=at < size, other=float("-inf")) * inverse
    # A number also where a block has no token that is possible: -inf less itself is NaN.
    high = tl.maximum(tl.max(x, 0), _LOWEST)
    exponentials = tl.exp(x - high)
    total_now = tl.sum(exponentials, 0)
    # Where x is -inf its exponential is 0, and so is the product that it would make NaN.
    weighted_now = tl.sum(tl.where(exponentials > 0.0, exponentials * (x - high), 0.0), 0)
    for first in range(block, size, block):
        column = first + at
        x = tl.load(logits + start + column, mask=column < size, other=float("-inf")) * inverse
        before, high = high, tl.maximum(high, tl.max(x, 0))
        shrink, moved = tl.exp(before - high), before - high
        exponentials = tl.exp(x - high)
        weighted_now = shrink * (weighted_now + moved * total_now)
        weighted_now += tl.sum(tl.where(exponentials > 0.0, exponentials * (x - high), 0.0), 0)
        total_now = shrink * total_now + tl.sum(exponentials, 0)
    tl.store(top + row, high)
    tl.store(total + row, total_now)
    tl.store(weighted + row, weighted_now)


@triton.jit(do_not_specialize=["pitch", "vocabulary", "inverse"])
def _logprobs_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, inverse: tl.tensor, top: tl.tensor, log: tl.tensor,
    out: tl.tensor, aligned: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    start, size = _place(row, pitch, vocabulary, aligned)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    x = tl.load(logits + start + column, mask=inside, other=0.0) * inverse
    logp = (x - tl.load(top + row)) - tl.load(log + row)
    tl.store(out + row.to(tl.int64) * size + column, logp, mask=inside)


@triton.jit(do_not_specialize=["pitch", "vocabulary", "inverse"])
def _slopes_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, inverse: tl.tensor, top: tl.tensor, log: tl.tensor,
    targets: tl.tensor, grad: tl.tensor, entropy: tl.tensor, grad_entropy: tl.tensor, out: tl.tensor,
    aligned: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    start, size = _place(row, pitch, vocabulary, aligned)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    x = tl.load(logits + start + column, mask=inside, other=float("-inf")) * inverse
    logp = (x - tl.load(top + row)) - tl.load(log + row)
    p = tl.exp(logp)
    slope = tl.zeros_like(p)
    if grad is not None:
        of_target = (column == tl.load(targets + row)).to(tl.float32)
        slope += (of_target - p) * (tl.load(grad + row) * inverse)
    if grad_entropy is not None:
        flatter = tl.where(p > 0.0, p * (logp + tl.load(entropy + row)), 0.0)
        slope -= flatter * (tl.load(grad_entropy + row) * inverse)
    tl.store(out + row.to(tl.int64) * size + column, slope.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _uniform(seed: tl.tensor, place: tl.tensor) -> tl.tensor:
    """`numerics.logprobs.uniform`: 53 random bits by SplitMix64."""
    z = seed.to(tl.uint64, bitcast=True) + (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["pitch", "vocabulary"])
def _block_sums_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, temperatures: tl.tensor, tops: tl.tensor,
    sums: tl.tensor, aligned: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    start, size = _place(row, pitch, vocabulary, aligned)
    column = part * block + tl.arange(0, block)
    x = tl.load(logits + start + column, mask=column < size, other=float("-inf")) / tl.load(temperatures + row)
    high = tl.max(x, 0)
    at = row * tl.num_programs(1) + part
    tl.store(tops + at, high)
    # A block without any token is -inf, and its exponentials would be NaN.
    exponentials = tl.where(x == float("-inf"), 0.0, tl.exp(x - high))
    tl.store(sums + at, tl.sum(exponentials.to(tl.float64), 0))


@triton.jit(do_not_specialize=["pitch", "vocabulary"])
def _choose_kernel(
    logits: tl.tensor, pitch: tl.tensor, vocabulary: tl.tensor, temperatures: tl.tensor, tops: tl.tensor,
    sums: tl.tensor, seeds: tl.tensor, places: tl.tensor, tokens: tl.tensor, logprobs: tl.tensor, parts: tl.tensor,
    aligned: tl.constexpr, block: tl.constexpr, padded: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    start, size = _place(row, pitch, vocabulary, aligned)
    part = tl.arange(0, padded)
    there = part < parts
    high = tl.load(tops + row * parts + part, mask=there, other=float("-inf"))
    top = tl.max(high, 0)
    share = tl.load(sums + row * parts + part, mask=there, other=0.0) * tl.exp(high - top).to(tl.float64)
    total = tl.sum(share, 0)
    target = _uniform(tl.load(seeds + row), tl.load(places + row)) * total
    # The first block whose end lies beyond the target; rounding may put the target beyond the last.
    chosen = tl.min(tl.where((tl.cumsum(share, 0) > target) & (share > 0.0), part, padded), 0)
    chosen = tl.where(chosen < padded, chosen, tl.max(tl.where(share > 0.0, part, 0), 0))
    before = tl.sum(tl.where(part < chosen, share, 0.0), 0)
    column = chosen * block + tl.arange(0, block)
    x = tl.load(logits + start + column, mask=column < size, other=float("-inf")) / tl.load(temperatures + row)
    exponentials = tl.exp(x - top).to(tl.float64)
    beyond = (before + tl.cumsum(exponentials, 0) > target) & (exponentials > 0.0)
    token = tl.min(tl.where(beyond, column, vocabulary), 0)
    token = tl.where(token < vocabulary, token, tl.max(tl.where(exponentials > 0.0, column, 0), 0))
    logit = tl.sum(tl.where(column == token, x, 0.0), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, (logit - top) - tl.log(total).to(tl.float32))


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """FP32; the aligned engine calls it, because vLLM's sampler sums in another order."""
    given, top, total, _ = _statistics(logits, temperature)
    out = torch.empty(logits.shape, device=logits.device)
    with torch.cuda.device_of(logits):
        _logprobs_kernel[_blocks(logits)](*given, top, total.log(), out, _aligned(logits), _BLOCK, **_OPTIONS)
    return out


def token_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    (_, _, _, inverse), top, total, weighted = _statistics(logits, temperature)
    log = total.log()
    chosen = (logits.gather(-1, targets[:, None]).squeeze(-1) * inverse - top) - log
    return chosen, log - weighted / total


def logit_slopes(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    temperature: float,
    gradients: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    given, top, total, _ = _statistics(logits, temperature)
    grad, grad_entropy = (None if g is None else g.contiguous() for g in gradients)
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    with torch.cuda.device_of(logits):
        _slopes_kernel[_blocks(logits)](
            *given, top, total.log(), targets, grad, entropy, grad_entropy, out, _aligned(logits), _BLOCK, **_OPTIONS
        )
    return out


def drawn_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    (rows, vocabulary), (_, parts) = logits.shape, _blocks(logits)
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1), "logits are rows of FP32"
    tops = torch.empty(rows, parts, device=logits.device)
    sums = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty_like(seeds)
    logprobs = torch.empty(rows, device=logits.device)
    given = logits, logits.stride(0), vocabulary, temperatures.contiguous(), tops, sums
    options = (_aligned(logits), _BLOCK)
    padded = triton.next_power_of_2(parts)
    if rows:
        with torch.cuda.device_of(logits):
            _block_sums_kernel[(rows, parts)](*given, *options, **_OPTIONS)
            _choose_kernel[(rows,)](*given, seeds, places, tokens, logprobs, parts, *options, padded, **_OPTIONS)
    return tokens, logprobs


def _statistics(logits: Tensor, temperature: float) -> tuple[tuple[Tensor, int, int, float], Tensor, Tensor, Tensor]:
    """The kernels' arguments, and of x = logits / temperature the maximum, the sum of exp(x - maximum), and that of
    exp(x - maximum) * (x - maximum) a row."""
    rows, vocabulary = logits.shape
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1), "logits are rows of FP32"
    given = logits, logits.stride(0), vocabulary, 1.0 / temperature
    # Apart: Triton compiles another kernel where an address is no multiple of 16 bytes.
    top, total, weighted = (torch.empty(rows, device=logits.device) for _ in range(3))
    if rows:
        with torch.cuda.device_of(logits):
            _statistics_kernel[(rows,)](*given, top, total, weighted, _aligned(logits), _BLOCK, **_OPTIONS)
    return given, top, total, weighted


def _aligned(logits: Tensor) -> int:
    return _ALIGNED if logits.stride(0) % _ALIGNED == 0 and logits.shape[1] % _ALIGNED == 0 else 1


def _blocks(logits: Tensor) -> tuple[int, int]:
    rows, vocabulary = logits.shape
    return rows, triton.cdiv(vocabulary, _BLOCK)
