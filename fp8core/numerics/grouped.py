"""Tokens, their experts, and products of rows that are grouped by expert.

    choice    the k largest router logits, of equal ones the lower index, and their gates
    rows      a token once for each of its experts; those of an expert in the order of the tokens, then zeros up to a
              multiple
    product   Y_e = X_e W_e^T for each expert e, by the product of a single weight
    sum       y = sum_{e in S, ascending} g_e Y_e, in FP64 and in this order

So a row is the product of one row: it does not depend on what else goes to its expert. With `GROUP_MULTIPLE` the rows
are those of DeepGEMM's contiguous grouped form, and no group of wgrad (128 rows) has tokens of two experts. Operands
are BF16, or codes with one scale per group.

Kernels have as many rows as the worst case needs; those beyond all experts belong to `NO_EXPERT`. Their gates and
gradients equal the reference to FP32 rounding, everything else byte for byte."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import Codes, FiniteFlag, column_parts, row_and_column_codes
from fp8core.numerics.gemm import bf16_gemm, forward_gemm, fp32_product, weight_gradient_gemm
from fp8core.numerics.logprobs import log_softmax
from fp8core.numerics.recipe import TILE, Grouping

GROUP_MULTIPLE = TILE
FEWEST = 64
"""Rows of the smallest tile that DeepGEMM multiplies."""
NO_EXPERT = -1
Operand = Tensor | Codes
"""Values, or codes with their scales."""
Rows = TypeVar("Rows")
Weight = TypeVar("Weight")


def top_k(logits: Tensor, k: int) -> Tensor:
    """Indices of the k largest FP32 logits of a row, ascending, int64 [tokens, k]; of equal ones the lower index."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values


def gate_weights(logits: Tensor, experts: Tensor, normalise_top_k: bool) -> Tensor:
    """Weight of each chosen expert, FP32 [tokens, k]; `normalise_top_k`: softmax over the chosen, else over all."""
    if normalise_top_k:
        return log_softmax(logits.gather(-1, experts), temperature=1.0).exp().float()
    return log_softmax(logits, temperature=1.0).gather(-1, experts).exp().float()


@with_kernel("experts")
def choose_experts(logits: Tensor, k: int, normalise_top_k: bool) -> tuple[Tensor, Tensor]:
    """`top_k` of FP32 [tokens, experts], and their `gate_weights`."""
    experts = top_k(logits, k)
    return experts, gate_weights(logits, experts, normalise_top_k)


def gate_gradient(of_gates: Tensor, logits: Tensor, experts: Tensor, gates: Tensor, normalise_top_k: bool) -> Tensor:
    """FP32 [tokens, experts], of the logits, of that of the gates, FP32 [tokens, k]."""
    mean = (of_gates * gates).sum(-1, keepdim=True)
    if normalise_top_k:
        return torch.zeros_like(logits).scatter_(-1, experts, gates * (of_gates - mean))
    return (logits.softmax(-1) * -mean).scatter_add_(-1, experts, gates * of_gates)


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all experts, one expert after another.

    Attributes:
        sizes: int32 [experts], rows of each, with its zeros.
        owners: int32 [rows], the expert of each.
        slots: int32 [rows], token * k + choice; tokens * k where there is no token.
        places: int64 [tokens, k], the rows of a token, by expert.
        spans: int32 [rows / multiple, 2]: the first group of the expert that a group of rows belongs to, and how many
            it has.
    """

    sizes: Tensor
    owners: Tensor
    slots: Tensor
    places: Tensor
    spans: Tensor

    @property
    def k(self) -> int:
        return self.places.shape[1]

    @property
    def multiple(self) -> int:
        return len(self.owners) // len(self.spans)

    @cached_property
    def counts(self) -> list[int]:
        """`sizes`; waits for the device."""
        counts: list[int] = self.sizes.tolist()
        return counts

    @property
    def tokens(self) -> Tensor:
        """Of each row; the number of tokens where there is none."""
        return self.slots // self.k


def forward_multiple(slots: int, count: int) -> int:
    """Of the rows of an expert where nothing is kept for wgrad. When few tokens decode, most of larger groups would be
    zeros. No byte depends on it."""
    return FEWEST if slots <= FEWEST * count else GROUP_MULTIPLE


def most_rows(slots: int, count: int, multiple: int) -> int:
    """Of any routes of so many tokens times experts of each: in every expert that is chosen all groups but one are
    full."""
    return (slots + min(slots, count) * (multiple - 1)) // multiple * multiple


@with_kernel("experts")
def expert_rows(experts: Tensor, count: int, multiple: int) -> ExpertRows:
    """From the experts of each token, of so many, ascending: int64 [tokens, k]."""
    tokens, k = experts.shape
    slots = experts.flatten()
    by_expert = slots.argsort(stable=True)
    filled = slots.bincount(minlength=count)
    sizes = -(-filled // multiple) * multiple
    zeros_before = (sizes - filled).cumsum(0) - (sizes - filled)
    rows = torch.arange(len(slots)) + zeros_before[slots[by_expert]]
    sources = torch.full((int(sizes.sum()),), tokens * k, dtype=torch.int32)
    sources[rows] = by_expert.int()
    places = torch.empty_like(slots)
    places[by_expert] = rows
    groups = sizes // multiple
    spans = torch.stack([groups.cumsum(0) - groups, groups], dim=-1).int().repeat_interleave(groups, dim=0)
    owners = torch.arange(count, dtype=torch.int32).repeat_interleave(sizes)
    return ExpertRows(sizes.int(), owners, sources, places.view(tokens, k), spans)


@with_kernel("experts")
def gathered(x: Tensor, rows: ExpertRows) -> Tensor:
    """[rows, hidden] of [tokens, hidden], differentiable; zeros where there is no token."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[rows.tokens]


@with_kernel("quantise")
def gathered_row_and_column_codes(
    x: Tensor, by_expert: ExpertRows, rows: Grouping, columns: Grouping, flag: FiniteFlag | None = None
) -> tuple[Codes, Codes]:
    """`row_and_column_codes` of `gathered` rows, column codes by expert. A kernel reads the tokens where they are."""
    return row_and_column_codes(gathered(x, by_expert), rows, columns, flag, by_expert.spans)


@with_kernel("experts")
def gathered_codes(x: Codes, rows: ExpertRows) -> Codes:
    """Groups of rows stay whole, so codes of a gathered row are its gathered codes. A kernel leaves rows without a
    token as they are."""
    codes, scales = x
    # torch joins bytes, and not codes.
    return gathered(codes.view(torch.uint8), rows).view(codes.dtype), gathered(scales, rows)


def grouped_product(
    product: Callable[[Rows, Weight], Tensor], parts: Iterable[Rows], weights: Iterable[Weight], counts: Sequence[int]
) -> Tensor:
    """[rows, out]: the `product` of each expert's part, of so many rows, with its weight; of experts without rows
    none."""
    of_each = zip(parts, weights, counts, strict=True)
    return torch.cat([product(part, weight) for part, weight, count in of_each if count])


@with_kernel("hopper_gemm")
def grouped_gemm(x: Codes, weights: Codes, rows: ExpertRows) -> Tensor:
    """`gemm.forward_gemm` of each expert's rows with its weight: codes [experts, out, in] in tiles."""
    parts = zip(*(each.split(rows.counts) for each in x), strict=True)
    return grouped_product(forward_gemm, parts, zip(*weights, strict=True), rows.counts)


@with_kernel("hopper_gemm")
def grouped_bf16_gemm(x: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
    """`gemm.bf16_gemm` of each expert's rows with its weight, BF16 [experts, out, in]."""
    return grouped_product(bf16_gemm, x.split(rows.counts), weights, rows.counts)


@with_kernel("hopper_gemm")
def grouped_bf16_input_gradient(grad: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
    """dY W, BF16 [rows, in], of BF16 [rows, out] and [experts, out, in]."""
    return grouped_product(torch.mm, grad.split(rows.counts), weights, rows.counts)


@with_kernel("experts")
def grouped_weight_gradient(grad: Codes, x: Codes, rows: ExpertRows, total: Tensor) -> Tensor:
    """`gemm.weight_gradient_gemm` of each expert's rows, added to FP32 [experts, out, in] in place. Columns of each
    expert lie together (`spans`)."""
    parts = zip(*(column_parts(each, rows.counts) for each in (grad, x)), total, strict=True)
    for own_grad, own_x, own_total in parts:
        if own_grad[0].shape[1]:
            weight_gradient_gemm(own_grad, own_x, own_total)
    return total


@with_kernel("hopper_gemm")
def grouped_bf16_weight_gradient(grad: Tensor, x: Tensor, rows: ExpertRows, total: Tensor) -> Tensor:
    """dY^T X in FP32 sums of BF16 [rows, out] and [rows, in], added to FP32 [experts, out, in] in place."""
    for own_grad, own_x, own_total in zip(grad.split(rows.counts), x.split(rows.counts), total, strict=True):
        fp32_product(own_grad.t(), own_x, own_total)
    return total


def weighted_sum(by_expert: Tensor, gates: Tensor) -> Tensor:
    """FP64 [tokens, hidden] of a token's results, [tokens, k, hidden], and their weights, FP32 [tokens, k]."""
    total = torch.zeros_like(by_expert[:, 0], dtype=torch.float64)
    for slot in range(gates.shape[1]):
        total = total + gates[:, slot, None].double() * by_expert[:, slot].double()
    return total


@with_kernel("experts")
def mixed(outputs: Tensor, rows: ExpertRows, gates: Tensor) -> Tensor:
    """`weighted_sum` of the experts' results, BF16 [rows, hidden], rounded once to BF16 [tokens, hidden]."""
    return weighted_sum(outputs[rows.places], gates).bfloat16()


@with_kernel("experts")
def mix_backward(grad: Tensor, outputs: Tensor, rows: ExpertRows, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Of `outputs`, BF16 with zeros where there is no token, and of `gates`, FP32."""
    of_rows = gathered(grad, rows).double()
    every = torch.cat([gates.flatten(), gates.new_zeros(1)])[rows.slots.long(), None]
    of_gates = (of_rows * outputs.double()).sum(-1)[rows.places].float()
    return (every.double() * of_rows).bfloat16(), of_gates


@with_kernel("experts")
def token_sums(by_row: Tensor, rows: ExpertRows) -> Tensor:
    """FP32 [tokens, hidden], sums over the rows of a token."""
    return by_row[rows.places].float().sum(1)
