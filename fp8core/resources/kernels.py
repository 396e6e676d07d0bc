"""The kernels that DeepGEMM compiles for a training, from shapes alone: nothing is loaded, and no GPU is asked.

DeepGEMM compiles a kernel for each weight's shape and each tiling of the result. The number of rows selects the tiling.
`chosen_tiling` repeats that choice for Hopper, as DeepGEMM 2.5.0 makes it (`csrc/jit_kernels/heuristics/sm90.hpp`).
Some thousands of possible numbers of rows come down to some ten kernels of a weight. Another version of DeepGEMM may
choose otherwise: then a few kernels are compiled when they are first needed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.numerics.e4m3 import round_up

Operands = Literal["fp8_block", "bf16", "fp8_gradient"]
"""Codes with scales to a BF16 result; BF16 to FP32 as the output head is multiplied; codes to a weight's gradient."""

_SHARED_MEMORY = 232_448
_MOST_STAGES = 16
_BARRIER_BYTES = 2 * 8 * _MOST_STAGES
_SCALE_BYTES, _BLOCK_BYTES = 4, 128
_LARGEST_TILE = 128 * 192
# Of an element of the operands, and of the result.
_OPERAND_BYTES: dict[Operands, int] = {"fp8_block": 1, "bf16": 2, "fp8_gradient": 1}
_RESULT_BYTES: dict[Operands, int] = {"fp8_block": 2, "bf16": 4, "fp8_gradient": 4}
# Bytes a cycle from the L2 cache: of one multiprocessor, and of all.
_L2_EACH, _L2_ALL, _L1_EACH = 64, 8e6 / 1.3e3, 128
# Everything about a number of rows that DeepGEMM looks at is the same for 16k+1 ... 16k+16.
_STEP = 16


@dataclass(frozen=True)
class Product:
    """All products with one weight, of `outputs` rows and `contraction` columns, or all that are added to its gradient.

    `rows`: numbers of rows that it may be multiplied with; of a gradient, numbers of tokens that it may be a sum of.
    """

    operands: Operands
    outputs: int
    contraction: int
    rows: range


class Tiling(NamedTuple):
    """The part of a kernel that the number of rows decides.

    Attributes:
        rows, columns: of a block's tile of the result.
        stages: of its pipeline.
        cluster_rows, cluster_columns: blocks that share what they read.
    """

    rows: int
    columns: int
    stages: int
    cluster_rows: int
    cluster_columns: int


class Sample(NamedTuple):
    """One product whose computation compiles one kernel, that of the tiling."""

    operands: Operands
    outputs: int
    contraction: int
    rows: int
    tiling: Tiling


def linear_shapes(arch: Architecture, unit: int = 1) -> list[tuple[int, int]]:
    """Outputs and contraction of a layer's fused linears, without experts; parts are padded to multiples of `unit`."""
    sizes = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size, arch.intermediate_size
    query, keys, hidden, width = (round_up(size, unit) for size in sizes)
    attention = [(query + 2 * keys, hidden), (hidden, query)]
    dense = len(arch.sparse_layers) < arch.num_layers
    return attention + ([(2 * width, hidden), (hidden, width)] if dense else [])


def samples(products: Iterable[Product], processors: int) -> list[Sample]:
    """A product for each kernel, with the fewest rows that select it; none twice."""
    found = dict[tuple[Operands, int, int, Tiling], int]()
    for product in products:
        for tiling, rows in kernels(product, processors).items():
            key = (product.operands, product.outputs, product.contraction, tiling)
            found[key] = min(rows, found.get(key, rows))
    return [Sample(operands, outputs, depth, rows, tile) for (operands, outputs, depth, tile), rows in found.items()]


def kernels(product: Product, processors: int) -> dict[Tiling, int]:
    """The tilings that a product is computed with, each with the fewest rows that select it."""
    found = dict[Tiling, int]()
    for rows, tiling in zip(_distinct(product.rows), chosen_tiling(product, processors), strict=True):
        found.setdefault(tiling, rows)
    return found


def chosen_tiling(product: Product, processors: int) -> list[Tiling]:
    """DeepGEMM's tiling for the first of each 16 numbers of rows that begin at 16k+1, in order."""
    wanted = torch.tensor(_distinct(product.rows), dtype=torch.int64)
    chosen = list[Tiling]()
    # Tiles of few rows are considered for few rows only.
    for smallest, part in ((16, wanted[wanted <= 16]), (32, wanted[(wanted > 16) & (wanted <= 32)])):
        chosen += _best(product, part, _candidates(product, processors, smallest), processors)
    return chosen + _best(product, wanted[wanted > 32], _candidates(product, processors, 64), processors)


def _distinct(rows: range) -> list[int]:
    """The first number of each group of `_STEP`, of those that occur."""
    found = dict[int, int]()
    for number in rows:
        found.setdefault((number - 1) // _STEP, number)
    return list(found.values())


def _candidates(product: Product, processors: int, smallest: int) -> list[Tiling]:
    """Tilings in DeepGEMM's order, of which the first of several equal ones is taken."""
    codes = product.operands == "fp8_block"
    heights = [64, 128, *(height for height in (16, 32) if smallest <= height), *([256] if codes else [])]
    widths = list(range(16, (192 if codes else 256) + 1, 16))
    if product.operands == "fp8_gradient":
        # The rows are the weight's, 128 at least. These widths spare an FP32 result conflicts of shared memory.
        heights, widths = [64, 128], [16, *range(24, 161, 16)]
    found = list[Tiling]()
    for across, down in ((1, 1), (1, 2), (2, 1)):
        if processors % (across * down):
            continue
        for height in heights:
            for width in widths:
                if not _fits(height, width, codes=codes):
                    continue
                stages = _stages(product, height, width)
                if stages >= 4 or (stages == 3 and height * width >= _LARGEST_TILE):
                    found.append(Tiling(height, width, stages, across, down))
    return found


def _fits(height: int, width: int, *, codes: bool) -> bool:
    """Registers hold the tile, and scales of a weight's tile divide its columns."""
    depth, over = 128, width - 128
    if codes and over > 0 and width % over and depth % over:
        return False
    return height <= 128 or width <= 128


def _stages(product: Product, height: int, width: int) -> int:
    # A row of a stage is always 128 bytes.
    result = round_up(height * width * _RESULT_BYTES[product.operands], 1024)
    scales = 0
    stage = (height + width) * _BLOCK_BYTES
    if product.operands == "fp8_block":
        one_tile = _BLOCK_BYTES % width == 0
        scales = round_up(-(-product.contraction // 128) * _SCALE_BYTES * (1 if one_tile else 2), 8)
        stage += round_up(height * _SCALE_BYTES, 128)
    elif product.operands == "fp8_gradient":
        stage += round_up(height * _SCALE_BYTES, 128) + round_up(width * _SCALE_BYTES, 128)
    return min((_SHARED_MEMORY - result - _BARRIER_BYTES - scales) // stage, _MOST_STAGES)


def _best(product: Product, rows: Tensor, candidates: list[Tiling], processors: int) -> list[Tiling]:
    if not len(rows):
        return []
    cycles = torch.stack([_cycles(product, rows, tiling, processors) for tiling in candidates])
    # The first of the smallest: `argmin` may return any.
    order = torch.arange(len(candidates)).unsqueeze(1).expand_as(cycles)
    first = torch.where(cycles == cycles.amin(0), order, len(candidates)).amin(0)
    return [candidates[index] for index in first.tolist()]


def _cycles(product: Product, rows: Tensor, tiling: Tiling, processors: int) -> Tensor:
    """DeepGEMM's estimate, with its integer divisions and its FP32 quotients."""
    size = _OPERAND_BYTES[product.operands]
    height, width, _, across, down = tiling
    whole = moved = height * width * _RESULT_BYTES[product.operands]
    lines, columns, depth = rows, product.outputs, torch.full_like(rows, product.contraction)
    if product.operands == "fp8_gradient":
        lines, columns, depth = torch.full_like(rows, product.outputs), product.contraction, rows
        moved = 2 * whole  # What it is added to is read.
    blocks = -(-lines // height) * -(-columns // width)
    waves = -(-blocks // processors)
    from_l2 = depth * (height // down + width // across) * size + moved
    through_l1 = depth * (height + width + max(64, height) + width) * size + whole + moved
    l2 = from_l2 * blocks // int(min(_L2_EACH * processors, _L2_ALL))
    l1 = through_l1 * blocks // (_L1_EACH * processors)
    used = blocks.float() / (waves * processors).float()
    cycles = (torch.maximum(l1, l2).float() / used).to(torch.int64)
    if across * down > 1:
        # Blocks share nothing where one wave computes all.
        cycles[waves <= 1] = torch.iinfo(torch.int64).max
    return cycles


def layer_products(arch: Architecture, rows: range, unit: int = 1) -> Iterator[Product]:
    """Forward products of a layer's linears in block FP8; `unit` as `linear_shapes` takes it."""
    for outputs, contraction in linear_shapes(arch, unit):
        yield Product("fp8_block", outputs, contraction, rows)


def gradient_products(arch: Architecture, rows: range) -> Iterator[Product]:
    for outputs, contraction in linear_shapes(arch):
        yield Product("fp8_block", contraction, outputs, rows)


def weight_gradient_products(arch: Architecture, tokens: range) -> Iterator[Product]:
    """Gradients of the linears' weights: sums over so many tokens, which no kernel is compiled for."""
    for outputs, contraction in linear_shapes(arch):
        yield Product("fp8_gradient", outputs, contraction, tokens)
