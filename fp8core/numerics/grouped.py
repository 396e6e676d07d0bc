"""Experts in block FP8 on rows that lie together by expert, as Hopper's grouped kernels take them.

Each expert's rows begin at a multiple of 128, and the rest of its last block is padding. The device alone decides the
number of rows. So everything here has the size of the worst case, which follows from the number of tokens. Nothing
waits for the device: CUDA graphs can capture it.

An element of a product has one accumulator whatever rows lie beside it. The experts of a token are added in the order
of its slots. So a token's result depends on itself alone.
"""

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
    """Where the tokens of experts lie.

    Attributes:
        tokens: int64 [rows], the token that a row is a copy of; 0 in padding.
        experts: int32 [rows], its expert; `PADDING` in padding.
        places: int64 [tokens, k], the row of each token and slot.
    """

    tokens: Tensor
    experts: Tensor
    places: Tensor


def most_rows(slots: int, experts: int) -> int:
    """Rows of the worst case, a multiple of 128: in every expert that is chosen, all blocks but one are full."""
    return (slots + min(slots, experts) * (TILE - 1)) // TILE * TILE


def group_rows(chosen: Tensor, experts: int) -> GroupedRows:
    """Rows by ascending expert, those of one by ascending token; `chosen` is [tokens, k], no expert twice in a row."""
    tokens, k = chosen.shape
    slots, device = tokens * k, chosen.device
    # A router of NaN may name an expert that does not exist. Its gates are NaN, which shows in the result.
    by_expert = chosen.flatten().long().clamp(0, experts - 1).sort(stable=True)
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
    """Codes and column-major scales of these rows, int64 [rows], of which each may be taken several times."""
    codes, scales = x
    taken = codes.view(torch.uint8).index_select(0, rows).view(codes.dtype)
    return taken, scales.t().index_select(1, rows).t()


@with_kernel("hopper_gemm")
def grouped_gemm(x: Codes, weights: Codes, experts: Tensor) -> Tensor:
    """Each row times the transposed weight of its expert.

    Args:
        x: codes [rows, in] in 1 x 128 groups; scales [rows, ceil(in / 128)], column-major.
        weights: codes [experts, out, in] in 128 x 128 tiles; scales [experts, ceil(out / 128), ceil(in / 128)].
        experts: int32 [rows], as `GroupedRows` has them: every block of 128 rows begins with one of its expert's.

    Returns:
        BF16 [rows, out]; of padding, anything that is finite. On a GPU `out` is a multiple of `OUTPUT_MULTIPLE`.
    """
    codes, scales = weights
    product = torch.zeros(x[0].shape[0], codes.shape[1], dtype=torch.bfloat16)
    for expert in experts.unique().tolist():
        if expert != PADDING:
            rows = (experts == expert).nonzero().flatten()
            product[rows] = forward_gemm(gathered_codes(x, rows), (codes[expert], scales[expert]))
    return product


def weighted_sum(outputs: Tensor, places: Tensor, gates: Tensor) -> Tensor:
    """Sum over each token's slots, in their order, in FP32, rounded once to BF16 [tokens, hidden].

    Outputs are BF16 [rows, hidden], places int64 [tokens, k] and gates FP32 [tokens, k].
    """
    total = torch.zeros(len(places), outputs.shape[1], dtype=torch.float32, device=outputs.device)
    for slot in range(places.shape[1]):
        total += outputs.index_select(0, places[:, slot]).float() * gates[:, slot, None]
    return total.to(outputs.dtype)


@dataclass(frozen=True)
class Quantisers:
    """The quantisers of what the products of experts read; `flag` as for `e4m3.row_codes`."""

    groups: Grouping
    flag: FiniteFlag | None = None

    def inputs(self, x: Tensor) -> Codes:
        """Of BF16 [tokens, hidden]."""
        return row_codes(x, self.groups, self.flag)

    def activated(self, gate_up: Tensor) -> Codes:
        """Of silu(gate) * up, from BF16 [rows, 2 m]."""
        return swiglu_row_codes(gate_up, self.groups, self.flag)


def grouped_experts(
    x: Tensor, chosen: Tensor, gates: Tensor, weights: tuple[Codes, Codes], quantisers: Quantisers
) -> Tensor:
    """Sum of g_e W_down,e (silu(W_gate,e x) * W_up,e x) over the chosen experts of each token.

    Args:
        x: BF16 [tokens, hidden].
        chosen: integers [tokens, k], no expert twice.
        gates: FP32 [tokens, k].
        weights: of gate above up, [experts, 2 m, hidden], and of down, [experts, hidden, m], as `grouped_gemm` takes
            them; both sides of each are multiples of 128.
        quantisers: of the inputs of both products.

    Returns:
        BF16 [tokens, hidden].
    """
    gate_up, down = weights
    rows = group_rows(chosen, len(gate_up[0]))
    inputs = gathered_codes(quantisers.inputs(x), rows.tokens)
    inner = quantisers.activated(grouped_gemm(inputs, gate_up, rows.experts))
    return weighted_sum(grouped_gemm(inner, down, rows.experts), rows.places, gates)
