"""Attention of whole sequences, or of the ends of sequences, over their own FP8 keys on Hopper.

The result of `kernels.attention.DecodeAttention` for each token, byte for byte, at the speed of tensor cores. Keys and
values are widened to FP16 once a layer, in the order in which tensor cores read them. Then 128 query rows share what is
read of them. The source is CUDA C++ as the decode kernel's is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.kernels.attention import kernel, partition_of
from fp8core.numerics.attention import HEAD_DIM, LARGEST_GROUP

_SOURCE = Path(__file__).with_name("sequence_attention.cu")
# As in the source.
_TILE, _STRANDS, _ROWS, _WARPGROUPS = 32, 4, 128, 2
_APART = _STRANDS * _TILE
_STAGE_BYTES = 4 * _TILE * HEAD_DIM * 2
_MERGED_BYTES = _ROWS * HEAD_DIM * 4
_THREADS = 128 * (_WARPGROUPS + 1)
# Keys that are widened at once, if no sequence is longer: 512 bytes a KV head each.
_KEYS_AT_ONCE = 65536


class Span(NamedTuple):
    """The last tokens of a sequence, which are side by side in the query.

    Attributes:
        row: of the query, of the first of them.
        tokens: how many there are.
        keys: of the whole sequence; the last token sees them all, each before it sees one less.
    """

    row: int
    tokens: int
    keys: int


class Batch(NamedTuple):
    """What is computed at once.

    Attributes:
        pairs: int32 [pairs, 2], the row of the block table and the first key of each pair of tiles.
        work: int32 [pieces, 4], as `Work` of the source; the longest first, because they decide when all is done.
    """

    pairs: Tensor
    work: Tensor


class SequenceAttention:
    """The kernels with their workspace, for one shape of model on one device.

    The workspace is shared by all calls, which must be on one stream.
    """

    def __init__(
        self,
        device: torch.device,
        strides: tuple[int, ...],
        page: int,
        kv_heads: int,
        group: int,
        longest: int,
        partition: int | None = None,
    ) -> None:
        """Compile.

        Args:
            device: a Hopper GPU.
            strides: of the keys, and of the values: [blocks, page, kv_heads, 128]; the last is 1.
            page: keys of a block, a multiple of 16.
            kv_heads: as they are.
            group: query heads per KV head, at most `LARGEST_GROUP`.
            longest: keys of the longest sequence; with `partition` as for `DecodeAttention`.
            partition: likewise. Both decide the order of sums.
        """
        assert 1 <= group <= LARGEST_GROUP, group
        assert page % 16 == 0, page
        assert strides[-1] == 1, strides
        partition = partition or partition_of(longest)
        self._device, self._strides, self._kv_heads = device, strides, kv_heads
        self._group, self._longest, self._partition = group, longest, partition
        definitions = {"GROUP": group, "PAGE": page, "PARTITION": partition}
        partitions = -(-longest // partition)
        definitions |= {"PARTITIONS": partitions}
        definitions |= dict(zip(("BLOCK_STRIDE", "KEY_STRIDE", "HEAD_STRIDE"), strides[:3], strict=True))
        shared = 3 * _STAGE_BYTES + 2 * _MERGED_BYTES if partitions > 1 else 5 * _STAGE_BYTES + _MERGED_BYTES
        made = tuple(definitions.items())
        self._widen = kernel(_SOURCE, "widen_pairs", made, 0, device.index or 0)
        self._attend = kernel(_SOURCE, "sequence_attention", made, shared, device.index or 0)
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._images = torch.empty(0, dtype=torch.uint8, device=device)

    def batches(self, spans: Sequence[Span]) -> list[Batch]:
        """The work of some spans, of which number i has row i of the block table."""
        made, pairs, work = list[Batch](), list[tuple[int, int]](), list[tuple[int, int, int, int]]()

        def end() -> None:
            work.sort(key=lambda piece: -piece[2])
            tensors = (torch.tensor(each, dtype=torch.int32) for each in (pairs, work))
            made.append(Batch(*(each.to(self._device, non_blocking=True) for each in tensors)))
            pairs.clear()
            work.clear()

        together = _ROWS // self._group
        for owner, (row, tokens, keys) in enumerate(spans):
            assert keys <= self._longest, "a sequence is longer than the engine's longest request"
            if not tokens:
                continue
            own = [(owner, first) for first in self._pairs(keys)]
            if pairs and 2 * _TILE * (len(pairs) + len(own)) > _KEYS_AT_ONCE:
                end()
            for first in range(0, tokens, together):
                work.append((len(pairs), row + first, keys - tokens + first + 1, min(together, tokens - first)))
            pairs += own
        if work:
            end()
        return made

    def _pairs(self, keys: int) -> Iterator[int]:
        """The first key of each pair, in the order of `Order.image` of the source."""
        for part in range(0, keys, self._partition):
            end = min(part + self._partition, keys)
            for first in range(part, end, 2 * _APART):
                yield from range(first, min(first + _APART, end), _TILE)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        work: Sequence[Batch],
        scales: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        logsumexp: Tensor,
    ) -> None:
        """Write the attention of spans to their rows of `out`; the other rows stay.

        Args:
            query: E4M3 [tokens, heads, 128].
            keys: E4M3 [blocks, page, kv_heads, 128] of the strides that were given.
            values: likewise.
            block_table: int32 [spans, blocks of the longest].
            lengths: int32 [spans], keys of each.
            work: of `batches`.
            scales: of Q, K and V, FP32 scalars on the device: value = code * scale.
            out: BF16 [tokens, heads, 128].
            logsumexp: FP32 [heads, tokens], of the scaled scores in nats, where P is as it was rounded.
        """
        assert keys.stride() == values.stride() == self._strides
        assert query.stride()[1:] == (HEAD_DIM, 1)
        for pairs, pieces in work:
            size = len(pairs) * self._kv_heads * _STAGE_BYTES
            if len(self._images) < size:
                self._images = torch.empty(size, dtype=torch.uint8, device=query.device)
            read = keys, values, block_table, block_table.stride(0), lengths, pairs, self._images
            self._widen.launch((self._kv_heads, len(pairs), 1), 256, read)
            arguments = (
                *(query, query.stride(0), self._images, len(pairs), pieces, len(pieces), self._kv_heads),
                *(*scales, HEAD_DIM**-0.5, out, out.stride(0), logsumexp, logsumexp.stride(0)),
            )
            grid = min(self._blocks, len(pieces) * self._kv_heads)
            self._attend.launch((grid, 1, 1), _THREADS, arguments)
