"""The products that DeepGEMM compiles kernels for in a training, from shapes alone: nothing is loaded.

DeepGEMM compiles a kernel for each weight's shape and each tiling of the result, which the number of rows selects. Its
heuristics (`csrc/jit_kernels/heuristics/sm90.hpp`) treat 16k+1 to 16k+16 rows alike, so one number of each 16 is
enough to have every kernel.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fp8core.models.architecture import Architecture, Experts
from fp8core.numerics.grouped import FEWEST, GROUP_MULTIPLE, most_rows

Operands = Literal["fp8_block", "bf16", "fp8_gradient", "experts"]
"""Codes with scales to a BF16 result; BF16 to FP32 as the output head and routers are multiplied; codes to a weight's
gradient; codes by expert."""

_ALIKE = 16
# Numbers of rows that one process computes: it compiles the few tilings of neighbours one after another.
_TOGETHER = 64


@dataclass(frozen=True)
class Product:
    """All products with one weight, of `outputs` rows and `contraction` columns, or all that are added to its gradient.

    `rows`: numbers of rows that it may be multiplied with; of a gradient, numbers of tokens that it may be a sum of.
    `experts`: how many weights there are, one above the other; the rows of each are a `multiple`.
    """

    operands: Operands
    outputs: int
    contraction: int
    rows: Sequence[int]
    experts: int = 1
    multiple: int = 1


def shared_out(products: Iterable[Product]) -> list[Product]:
    """Products of a few numbers of rows each that need every kernel of all; of one weight no number twice."""
    rows_by_product = dict[Product, dict[int, int]]()
    for product in products:
        rows_by_size = rows_by_product.setdefault(replace(product, rows=()), {})
        for rows in product.rows:
            rows_by_size.setdefault((rows - 1) // _ALIKE, rows)
    return [
        replace(product, rows=tuple(rows[first : first + _TOGETHER]))
        for product, rows in (
            (product, sorted(rows_by_size.values())) for product, rows_by_size in rows_by_product.items()
        )
        for first in range(0, len(rows), _TOGETHER)
    ]


def linear_shapes(arch: Architecture) -> list[tuple[int, int]]:
    """Outputs and contraction of a layer's fused linears, without experts."""
    sizes = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size, arch.intermediate_size
    query, keys, hidden, width = sizes
    attention = [(query + 2 * keys, hidden), (hidden, query)]
    dense = len(arch.sparse_layers) < arch.num_layers
    return attention + ([(2 * width, hidden), (hidden, width)] if dense else [])


def layer_products(arch: Architecture, rows: range) -> Iterator[Product]:
    """Forward products of a layer's linears in block FP8."""
    for outputs, contraction in linear_shapes(arch):
        yield Product("fp8_block", outputs, contraction, rows)
    if arch.experts is not None:
        yield Product("bf16", arch.experts.count, arch.hidden_size, rows)
        yield from _expert_products(arch, arch.experts, rows)


def gradient_products(arch: Architecture, rows: range) -> Iterator[Product]:
    for outputs, contraction in linear_shapes(arch):
        yield Product("fp8_block", contraction, outputs, rows)
    if arch.experts is not None:
        for product in _expert_products(arch, arch.experts, rows):
            if product.multiple == GROUP_MULTIPLE:
                yield replace(product, outputs=product.contraction, contraction=product.outputs)


def _expert_products(arch: Architecture, experts: Experts, tokens: range) -> Iterator[Product]:
    hidden, width = arch.hidden_size, experts.intermediate_size
    most = tokens[-1] * experts.per_token
    for multiple, slots in ((GROUP_MULTIPLE, most), (FEWEST, min(most, FEWEST * experts.count))):
        rows = range(multiple, most_rows(slots, experts.count, multiple) + 1, multiple)
        for outputs, contraction in ((2 * width, hidden), (hidden, width)):
            yield Product("experts", outputs, contraction, rows, experts.count, multiple)


def weight_gradient_products(arch: Architecture, tokens: range) -> Iterator[Product]:
    for outputs, contraction in linear_shapes(arch):
        yield Product("fp8_gradient", outputs, contraction, tokens)
