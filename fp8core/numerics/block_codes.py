"""Block-FP8 codes and scales of a tensor on any device: the torch reference of `e4m3`, or the kernel where it runs.

Both give the same bytes. They differ in when NaN and infinity are refused: the reference refuses them at once, the
kernels set a flag on the device. Without a flag of the caller's these functions check at once as well, which waits for
the device; with one, many tensors are quantised without waiting and `FiniteFlag.check` is called at the end.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import (
    GroupNotFinite,
    ScaleRule,
    encode,
    quantise_columns,
    quantise_rows,
    quantise_tiles,
)
from fp8core.numerics.kernel_choice import has_kernels

Found = TypeVar("Found")
Codes = tuple[Tensor, Tensor]
"""float8_e4m3fn codes and FP32 scales."""


class FiniteFlag:
    """Whether anything that was quantised on a device held NaN or infinity; it stays there until it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.not_finite = torch.zeros(1, dtype=torch.int32, device=device)

    def check(self) -> None:
        """Wait for the device; raises GroupNotFinite if anything was not finite."""
        if bool(self.not_finite):
            raise GroupNotFinite("cannot quantise: the tensor holds NaN or infinity")


def row_codes(x: Tensor, rule: ScaleRule, flag: FiniteFlag | None = None) -> Codes:
    """Quantise in 1 x 128 groups along the last dimension.

    Args:
        x: BF16 or FP32 [rows, columns] with at least one element.
        rule: scale rule.
        flag: checked by the caller; None checks here.

    Returns:
        codes [rows, columns] and scales [rows, ceil(columns / 128)].

    Raises:
        GroupNotFinite: x holds NaN or infinity (without `flag`, or where the reference runs).
    """
    if not has_kernels(x):
        return _encoded(quantise_rows(x.float(), rule))
    from fp8core.numerics import triton_quantise

    return launched(partial(triton_quantise.quantise_rows, x, rule), x.device, flag)


def row_and_column_codes(x: Tensor, rule: ScaleRule, flag: FiniteFlag | None = None) -> tuple[Codes, Codes]:
    """Quantise in 1 x 128 groups for the tensor's own use and in 128 x 1 groups for that of its transpose.

    Args:
        x, rule, flag: as for `row_codes`.

    Returns:
        rows: as `row_codes`.
        columns: codes [columns, rows] and scales [columns, ceil(rows / 128)], transposed.

    Raises:
        GroupNotFinite: as for `row_codes`.
    """
    if not has_kernels(x):
        return _encoded(quantise_rows(x.float(), rule)), _encoded(quantise_columns(x.float(), rule))
    from fp8core.numerics import triton_quantise

    return launched(partial(triton_quantise.quantise_rows_and_columns, x, rule), x.device, flag)


def tile_codes(x: Tensor, rule: ScaleRule, flag: FiniteFlag | None = None) -> Codes:
    """Quantise in 128 x 128 tiles.

    Args:
        x, rule, flag: as for `row_codes`; x is [out, in].

    Returns:
        codes [out, in] and scales [ceil(out / 128), ceil(in / 128)].

    Raises:
        GroupNotFinite: as for `row_codes`.
    """
    if not has_kernels(x):
        return _encoded(quantise_tiles(x.float(), rule))
    from fp8core.numerics import triton_quantise

    return launched(partial(triton_quantise.quantise_tiles, x, rule), x.device, flag)


def launched(kernel: Callable[[Tensor], Found], device: torch.device, flag: FiniteFlag | None) -> Found:
    """Launch a kernel that sets its argument, int32 [1], where it meets NaN or infinity.

    Without a flag of the caller's, wait for it and check.

    Raises:
        GroupNotFinite: the kernel met NaN or infinity and `flag` is None.
    """
    seen = flag or FiniteFlag(device)
    found = kernel(seen.not_finite)
    if flag is None:
        seen.check()
    return found


def _encoded(quantised: tuple[Tensor, Tensor]) -> Codes:
    grid, scales = quantised
    return encode(grid), scales
