"""Products of rows that are grouped by expert, and the sum over the experts of a token.

    rows      a token once for each of its experts; those of an expert in the order of the tokens, then zeros up to a
              multiple
    product   Y_e = X_e W_e^T for each expert e, by the product of a single weight
    sum       y = sum_{e in S, ascending} g_e Y_e, in FP64 and in this order

So a row is the product of one row: it does not depend on what else goes to its expert. With `GROUP_MULTIPLE` the rows
are those of DeepGEMM's contiguous grouped form, and no group of wgrad (128 rows) has tokens of two experts. Operands
are BF16, or codes with one scale per group. This is a loop over experts; there is no kernel yet."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import Codes
from fp8core.numerics.recipe import TILE

GROUP_MULTIPLE = TILE
Operand = Tensor | Codes
"""Values, or codes with their scales."""
Rows = TypeVar("Rows")
Weight = TypeVar("Weight")


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all experts, one expert after another.

    Attributes:
        counts: rows of each expert, with its zeros.
        tokens: int64 [rows], the token of each; of zeros the number of tokens.
        places: int64 [tokens, k], the rows of a token, by expert.
    """

    counts: list[int]
    tokens: Tensor
    places: Tensor

    @classmethod
    def of(cls, experts: Tensor, count: int, multiple: int = 1) -> "ExpertRows":
        """From the experts of each token, of so many, ascending: int64 [tokens, k]."""
        tokens, k = experts.shape
        slots = experts.flatten()
        by_expert = slots.argsort(stable=True)
        filled = slots.bincount(minlength=count)
        counts = -(-filled // multiple) * multiple
        zeros_before = (counts - filled).cumsum(0) - (counts - filled)
        rows = torch.arange(len(slots), device=slots.device) + zeros_before[slots[by_expert]]
        owners = slots.new_full((int(counts.sum()),), tokens)
        owners[rows] = by_expert // k
        places = torch.empty_like(slots)
        places[by_expert] = rows
        return cls(counts.tolist(), owners, places.view(tokens, k))

    def gathered(self, x: Tensor) -> Tensor:
        """[rows, ...] of [tokens, ...], differentiable; zeros where there is no token."""
        if x.dtype == torch.float8_e4m3fn:
            # torch joins bytes, and not codes.
            return self.gathered(x.view(torch.uint8)).view(x.dtype)
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.tokens]

    def gathered_operand(self, x: Operand) -> Operand:
        """Row-wise groups stay whole, so codes of a gathered row are its gathered codes."""
        return self.gathered(x) if isinstance(x, Tensor) else (self.gathered(x[0]), self.gathered(x[1]))

    def parts(self, x: Operand) -> Sequence[Operand]:
        """By expert: values, or codes and scales, [rows, ...]."""
        if isinstance(x, Tensor):
            return list(x.split(self.counts))
        codes, scales = x
        return list(zip(codes.split(self.counts), scales.split(self.counts), strict=True))

    def column_parts(self, columns: Operand) -> Sequence[Operand]:
        """By expert: values [rows, ...], or codes [features, rows] with scales [features, rows / 128]."""
        if isinstance(columns, Tensor):
            return list(columns.split(self.counts))
        codes, scales = columns
        groups = [count // TILE for count in self.counts]
        return list(zip(codes.split(self.counts, dim=1), scales.split(groups, dim=1), strict=True))


def grouped_product(
    product: Callable[[Rows, Weight], Tensor], parts: Iterable[Rows], weights: Iterable[Weight], counts: Sequence[int]
) -> Tensor:
    """[rows, out]: the `product` of each expert's part, of so many rows, with its weight; of experts without rows
    none."""
    of_each = zip(parts, weights, counts, strict=True)
    return torch.cat([product(part, weight) for part, weight, count in of_each if count])


def weighted_sum(by_expert: Tensor, gates: Tensor) -> Tensor:
    """FP64 [tokens, hidden] of a token's results, [tokens, k, hidden], and their weights, FP32 [tokens, k]."""
    total = torch.zeros_like(by_expert[:, 0], dtype=torch.float64)
    for slot in range(gates.shape[1]):
        total = total + gates[:, slot, None].double() * by_expert[:, slot].double()
    return total
