"""Sums over the rows of a matrix in a fixed order: the second stage of every gradient that all tokens contribute to.

The first stage writes one row of partial sums for each of its programs. Nothing is added atomically, and which rows are
added in which order depends on the shape alone, so that a gradient is the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 64, 32


@triton.jit
def _column_sums_kernel(
    x: tl.tensor, sums: tl.tensor, rows: tl.tensor, columns: tl.tensor, block: tl.constexpr, width: tl.constexpr
) -> None:
    column = tl.program_id(0) * width + tl.arange(0, width)
    total = tl.zeros([block, width], tl.float32)
    for start in range(0, rows, block):
        row = start + tl.arange(0, block)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=column < columns)


def column_sums(x: Tensor) -> Tensor:
    """Sum over the rows of FP32 [rows, columns], contiguous and below 2^31 elements; FP32 [columns]."""
    assert x.is_contiguous()
    assert x.numel() < 2**31
    sums = torch.empty(x.shape[1], device=x.device)
    with torch.cuda.device_of(x):
        _column_sums_kernel[(triton.cdiv(x.shape[1], _COLUMNS),)](x, sums, *x.shape, _ROWS, _COLUMNS)
    return sums
