"""Experts in block FP8 on rows that lie together by expert, as Hopper's grouped kernels take them.

Each expert's rows begin at a multiple of 128; the rest of its last block is padding. Everything has the size of the
worst case and nothing waits for the device, so CUDA graphs can capture it. A token's result depends on itself alone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import Codes, FiniteFlag, row_codes
from fp8core.numerics.fused import swiglu_row_codes
from fp8core.numerics.gemm import forward_gemm
from fp8core.numerics.recipe import TILE, Grouping

PADDING = -1
"""Expert of a row that is nobody's."""


class GroupedRows(NamedTuple):
    """`tokens`: int64 [rows], the token that a row is a copy of; 0 in padding. `experts`: int32 [rows]. `places`: int64
    [tokens, k], the row of each token and slot."""

    tokens: Tensor
    experts: Tensor
    places: Tensor


def most_rows(slots: int, experts: int) -> int:
    """Rows of the worst case, a multiple of 128: in every expert that is chosen, all blocks but one are full."""
    return (slots + min(slots, experts) * (TILE - 1)) // TILE * TILE


def group_rows(expert_ids: Tensor, experts: int) -> GroupedRows:
    """Rows by ascending expert, then token; `expert_ids` is [tokens, k], no expert twice in a row."""
    tokens, k = expert_ids.shape
    slots = tokens * k
    device = expert_ids.device
    # A router of NaN may name an expert that does not exist. Its gates are NaN, which shows in the result.
    by_expert = expert_ids.flatten().long().clamp(0, experts - 1).sort(stable=True)
    every = torch.arange(experts, device=device)
    first = torch.searchsorted(by_expert.values, every)
    count = torch.searchsorted(by_expert.values, every, right=True) - first
    padded = (count + TILE - 1) // TILE * TILE
    # From the number of a slot among all to its row: the expert's rows begin later by the padding before them.
    shift = padded.cumsum(0) - padded - first
    rows = torch.arange(slots, device=device) + shift[by_expert.values]
    size = most_rows(slots, experts)
    sources = torch.zeros(size, dtype=torch.int64, device=device).scatter(0, rows, by_expert.indices // k)
    owners = torch.full((size,), PADDING, dtype=torch.int32, device=device)
    owners.scatter_(0, rows, by_expert.values.int())
    places = torch.zeros(slots, dtype=torch.int64, device=device).scatter(0, by_expert.indices, rows)
    return GroupedRows(sources, owners, places.view(tokens, k))


def gathered_codes(x: Codes, rows: Tensor) -> Codes:
    """Codes and column-major scales of these rows, int64 [rows]."""
    codes, scales = x
    bytes_of_rows = codes.view(torch.uint8).index_select(0, rows).view(codes.dtype)
    return bytes_of_rows, scales.t().index_select(1, rows).t()


@with_kernel("hopper_gemm")
def grouped_gemm(x: Codes, weights: Codes, experts: Tensor) -> Tensor:
    """Each row times the transposed weight [experts, out, in] of its expert, BF16 [rows, out]; of padding, anything
    finite. Every 128 of `experts`, int32 [rows], begin with their expert."""
    codes, scales = weights
    product = torch.zeros(x[0].shape[0], codes.shape[1], dtype=torch.bfloat16)
    for expert in experts.unique().tolist():
        if expert != PADDING:
            rows = (experts == expert).nonzero().flatten()
            product[rows] = forward_gemm(gathered_codes(x, rows), (codes[expert], scales[expert]))
    return product


def weighted_sum(outputs: Tensor, places: Tensor, gates: Tensor) -> Tensor:
    """Sum over each token's slots, in their order, in FP32, rounded once to BF16 [tokens, hidden]."""
    total = torch.zeros(len(places), outputs.shape[1], dtype=torch.float32, device=outputs.device)
    for slot in range(places.shape[1]):
        total += outputs.index_select(0, places[:, slot]).float() * gates[:, slot, None]
    return total.to(outputs.dtype)


@dataclass(frozen=True)
class Quantisers:
    groups: Grouping
    flag: FiniteFlag | None = None

    def inputs(self, x: Tensor) -> Codes:
        return row_codes(x, self.groups, self.flag)

    def activated(self, gate_up: Tensor) -> Codes:
        return swiglu_row_codes(gate_up, self.groups, self.flag)


def grouped_experts(
    x: Tensor, expert_ids: Tensor, gates: Tensor, weights: tuple[Codes, Codes], quantisers: Quantisers
) -> Tensor:
    """Sum of g_e W_down,e (silu(W_gate,e x) * W_up,e x) over the chosen experts of each token, BF16 [tokens, hidden].

    `x` is BF16 [tokens, hidden], `expert_ids` integers and `gates` FP32 [tokens, k]. Weights: gate above up, [experts,
    2 m, hidden], and down, [experts, hidden, m], with sides of multiples of 128."""
    gate_up, down = weights
    rows = group_rows(expert_ids, len(gate_up[0]))
    inputs = gathered_codes(quantisers.inputs(x), rows.tokens)
    inner = quantisers.activated(grouped_gemm(inputs, gate_up, rows.experts))
    return weighted_sum(grouped_gemm(inner, down, rows.experts), rows.places, gates)
