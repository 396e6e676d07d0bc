"""Attention of whole sequences, or of their ends, over their own FP8 keys on Hopper.

The result of `DecodeAttention` byte for byte, on tensor cores. Keys and values are widened to FP16 once a layer, in the
order in which tensor cores read them. Then 192 query rows share what is read of them."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.kernels.cuda import cuda_kernel
from fp8core.kernels.decode_attention import cache_definitions, partition_of
from fp8core.numerics.attention import QUERY_TYPES
from fp8core.numerics.packed import copy_to
from fp8core.numerics.recipe import AttentionProducts

# As in the source.
_TILE = 32
_STRANDS = 4
_WARPGROUPS = 3
_STAGES = 5
_APART = _STRANDS * _TILE
_ROWS = 64 * _WARPGROUPS
_THREADS = 128 * (_WARPGROUPS + 1)
# Keys that are widened at once, if no sequence is longer: each takes 4 bytes of a KV head's element.
_KEYS_AT_ONCE = 65536


class Span(NamedTuple):
    """The last `tokens` of a sequence of so many `keys`, from row `row` of the query on."""

    row: int
    tokens: int
    keys: int


class Batch(NamedTuple):
    """Spans that are computed at once.

    Attributes:
        lengths: int32 [spans], keys of each.
        pairs: int32 [pairs, 2], the row of the block table and the first key of each pair of tiles.
        work: int32 [pieces, 4], as `Work` of the source, the longest first."""

    lengths: Tensor
    pairs: Tensor
    work: Tensor


def batches(
    spans: Sequence[Span], group: int, longest: int, device: torch.device, partition: int | None = None
) -> list[Batch]:
    """Number i has row i of the block table."""
    partition = partition or partition_of(longest)
    lengths = copy_to(torch.tensor([span.keys for span in spans], dtype=torch.int32), device)
    result = list[Batch]()
    pairs = list[tuple[int, int]]()
    work = list[tuple[int, int, int, int]]()

    def end() -> None:
        work.sort(key=lambda piece: -piece[2])
        tensors = (torch.tensor(each, dtype=torch.int32) for each in (pairs, work))
        result.append(Batch(lengths, *(copy_to(each, device) for each in tensors)))
        pairs.clear()
        work.clear()

    together = _ROWS // group
    for owner, (row, tokens, keys) in enumerate(spans):
        assert keys <= longest, "a sequence is longer than the engine's longest request"
        if not tokens:
            continue
        own = [(owner, first) for first in _pairs(keys, partition)]
        if pairs and 2 * _TILE * (len(pairs) + len(own)) > _KEYS_AT_ONCE:
            end()
        for first in range(0, tokens, together):
            work.append((len(pairs), row + first, keys - tokens + first + 1, min(together, tokens - first)))
        pairs += own
    if work:
        end()
    return result


def _pairs(keys: int, partition: int) -> Iterator[int]:
    """First keys, in the order of `Order.image` of the source."""
    for part in range(0, keys, partition):
        end = min(part + partition, keys)
        for first in range(part, end, 2 * _APART):
            yield from range(first, min(first + _APART, end), _TILE)


class SequenceAttention:
    """With its workspace, for one shape of model on one device; all calls must be on one stream."""

    def __init__(
        self,
        device: torch.device,
        shape: torch.Size,
        strides: tuple[int, ...],
        group: int,
        longest: int,
        products: AttentionProducts,
        partition: int | None = None,
    ) -> None:
        """Arguments are `DecodeAttention`'s."""
        definitions = cache_definitions(shape, strides, group, partition or partition_of(longest), products)
        self._kv_heads = shape[2]
        self._head_dim = shape[3]
        self._strides = strides
        self._query_type = QUERY_TYPES[products]
        self._image = 2 * _TILE * self._head_dim * 2
        shared_bytes = _STAGES * self._image + _ROWS * self._head_dim * (2 + 4)
        definition_items = tuple(definitions.items())
        self._widen = cuda_kernel("sequence_attention", "widen_pairs", definition_items, 0, device)
        self._attend = cuda_kernel("sequence_attention", "sequence_attention", definition_items, shared_bytes, device)
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._images = torch.empty(0, dtype=torch.uint8, device=device)
        size = self._blocks * _ROWS * self._head_dim if longest > definitions["PARTITION"] else 0
        self._of_partitions = torch.empty(size, device=device)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        work: Sequence[Batch],
        scales: tuple[Tensor, ...],
        out: Tensor,
        logsumexp: Tensor | None = None,
    ) -> None:
        """As `DecodeAttention`; the block table is int32 [spans, blocks of the longest], `logsumexp` FP32 [heads,
        tokens], in nats."""
        assert keys.stride() == values.stride() == self._strides
        assert query.stride()[1:] == (self._head_dim, 1)
        assert query.dtype == self._query_type, query.dtype
        for lengths, pairs, pieces in work:
            size = len(pairs) * self._kv_heads * 2 * self._image
            if len(self._images) < size:
                self._images = torch.empty(size, dtype=torch.uint8, device=query.device)
            read = keys, values, block_table, block_table.stride(0), lengths, pairs, self._images
            self._widen.launch((self._kv_heads, len(pairs), 1), 256, read)
            arguments = (
                *(query, query.stride(0), self._images, len(pairs), pieces, len(pieces), self._kv_heads),
                *(*scales, self._head_dim**-0.5, out, out.stride(0)),
                *((0, 0) if logsumexp is None else (logsumexp, logsumexp.stride(0))),
                self._of_partitions if len(self._of_partitions) else 0,
            )
            grid = min(self._blocks, len(pieces) * self._kv_heads)
            self._attend.launch((grid, 1, 1), _THREADS, arguments)


shared_sequence_attention = cache(SequenceAttention)
