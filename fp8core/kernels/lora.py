"""Merged weights in one pass over memory, with the bytes of the reference: its FP64 operations in its order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
_COLUMNS = 128


@triton.jit
def _merge_kernel(
    base: tl.tensor, left: tl.tensor, right: tl.tensor, factor: tl.tensor, merged: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, rank: tl.tensor, block_rows: tl.constexpr, block_columns: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    total = tl.zeros((block_rows, block_columns), dtype=tl.float64)
    for k in range(rank):
        of_rows = tl.load(left + row * rank + k, mask=row < rows, other=0.0).to(tl.float64)
        of_columns = tl.load(right + k * columns + column, mask=column < columns, other=0.0).to(tl.float64)
        total = total + of_rows[:, None] * of_columns[None, :]
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    weight = tl.load(base + at, mask=inside, other=0.0).to(tl.float64)
    tl.store(merged + at, (total * tl.load(factor) + weight).to(tl.float32), mask=inside)


def merged_weight(base: Tensor, left: Tensor, right: Tensor, factor: float) -> Tensor:
    weight = torch.empty_like(base, dtype=torch.float32)
    if not len(base):
        return weight
    for tensor in (base, left, right):
        assert tensor.is_contiguous(), "a merge goes through memory in one order"
    rows, columns = base.shape
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    # A number that is passed as one arrives in FP32.
    exact = torch.tensor(factor, dtype=torch.float64, device=base.device)
    with torch.cuda.device_of(base):
        _merge_kernel[grid](
            base, left, right, exact, weight, rows, columns, len(right), _ROWS, _COLUMNS, enable_fp_fusion=False
        )
    return weight
