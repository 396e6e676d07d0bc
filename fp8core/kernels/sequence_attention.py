"""Attention of whole sequences, or of the ends of sequences, over their own FP8 keys on Hopper.

The result of `kernels.attention.DecodeAttention` for each token, byte for byte, at the speed of tensor cores. Keys and
values are widened to FP16 once a layer, in the order in which tensor cores read them. Then 128 query rows share what is
read of them. The source is CUDA C++ as the decode kernel's is.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.kernels.attention import kernel, partition_of
from fp8core.numerics.attention import HEAD_DIM, LARGEST_GROUP

_SOURCE = Path(__file__).with_name("sequence_attention.cu")
_TILE, _ROWS, _WARPGROUPS, _STAGES = 32, 128, 2, 6
_STAGE_BYTES = 2 * _TILE * HEAD_DIM * 2
_MERGED_BYTES = _ROWS * HEAD_DIM * 4
_THREADS = 128 * (_WARPGROUPS + 1)
# Tiles that are widened at once, if no sequence is longer: 16 KiB a KV head each.
_TILES_AT_ONCE = 2048


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
        tiles: int32 [tiles, 2], the row of the block table and the first key of each tile.
        work: int32 [pieces, 4], as `Work` of the source; the longest first, because they decide when all is done.
    """

    tiles: Tensor
    work: Tensor


def batches(spans: Sequence[Span], group: int, device: torch.device, at_once: int = _TILES_AT_ONCE) -> list[Batch]:
    """The work of some spans, span i having row i of the block table."""
    made, tiles, work = list[Batch](), list[tuple[int, int]](), list[tuple[int, int, int, int]]()

    def end() -> None:
        work.sort(key=lambda piece: -piece[2])
        tensors = (torch.tensor(each, dtype=torch.int32) for each in (tiles, work))
        made.append(Batch(*(each.to(device, non_blocking=True) for each in tensors)))
        tiles.clear()
        work.clear()

    together = _ROWS // group
    for owner, (row, tokens, keys) in enumerate(spans):
        if not tokens:
            continue
        own = [(owner, first) for first in range(0, keys, _TILE)]
        if tiles and len(tiles) + len(own) > at_once:
            end()
        for first in range(0, tokens, together):
            seen = keys - tokens + first + 1
            work.append((len(tiles), row + first, seen, min(together, tokens - first)))
        tiles += own
    if work:
        end()
    return made


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
        self._strides, self._kv_heads, self._longest = strides, kv_heads, longest
        definitions = {"GROUP": group, "PAGE": page, "PARTITION": partition}
        definitions |= {"PARTITIONS": -(-longest // partition)}
        definitions |= dict(zip(("BLOCK_STRIDE", "KEY_STRIDE", "HEAD_STRIDE"), strides[:3], strict=True))
        shared = _STAGES * _STAGE_BYTES + (_MERGED_BYTES if longest <= partition else 2 * _MERGED_BYTES)
        made = tuple(definitions.items())
        self._widen = kernel(_SOURCE, "widen_tiles", made, 0, device.index or 0)
        self._attend = kernel(_SOURCE, "sequence_attention", made, shared, device.index or 0)
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._images = torch.empty(0, dtype=torch.uint8, device=device)

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
            work: from `batches`.
            scales: of Q, K and V, FP32 scalars on the device: value = code * scale.
            out: BF16 [tokens, heads, 128].
            logsumexp: FP32 [heads, tokens], of the scaled scores in nats, where P is as it was rounded.
        """
        assert keys.stride() == values.stride() == self._strides
        assert query.stride()[1:] == (HEAD_DIM, 1)
        for tiles, pieces in work:
            size = len(tiles) * self._kv_heads * _STAGE_BYTES
            if len(self._images) < size:
                self._images = torch.empty(size, dtype=torch.uint8, device=query.device)
            read = keys, values, block_table, block_table.stride(0), lengths, tiles, self._images
            self._widen.launch((self._kv_heads, len(tiles), 1), 128, read)
            arguments = (
                *(query, query.stride(0), self._images, len(tiles), pieces, len(pieces), self._kv_heads),
                *(*scales, HEAD_DIM**-0.5, out, out.stride(0), logsumexp, logsumexp.stride(0)),
            )
            grid = min(self._blocks, len(pieces) * self._kv_heads)
            self._attend.launch((grid, 1, 1), _THREADS, arguments)
