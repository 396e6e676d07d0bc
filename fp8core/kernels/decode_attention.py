"""Attention of single tokens over a paged FP8 cache on Hopper (`numerics.attention.decode_attention_reference`).

FP8 tensor cores want V transposed; the kernel widens codes to FP16 instead, which is exact, with FP32 accumulation.
Keys are split by their position alone, and parts are merged in order. So a token attends alike whether it is decoded,
part of a prompt, or part of a sequence that is scored (`sequence_attention`)."""

from functools import cache

import torch
from torch import Tensor

from fp8core.kernels.cuda import cuda_kernel
from fp8core.numerics.attention import HEAD_DIMS, LARGEST_GROUP, QUERY_TYPES, Queries
from fp8core.numerics.recipe import AttentionProducts

_SHORTEST_PARTITION = 4096
_MOST_PARTITIONS = 4
_WARPS = 4
_TILE = 32


class DecodeAttention:
    """With its workspace, for one shape of model on one device; all calls must be on one stream."""

    def __init__(
        self,
        device: torch.device,
        shape: torch.Size,
        strides: tuple[int, ...],
        group: int,
        longest: int,
        queries: int,
        products: AttentionProducts,
        partition: int | None = None,
        resident: int = 3,
        stages: int = 2,
    ) -> None:
        """Compile, and take the workspace.

        `shape`, `strides`: of keys and of values, [blocks, page, kv_heads, head_dim]; a page is a multiple of 16.
        `group`: query heads per KV head. `longest`: keys of the longest sequence. `queries`: computed at once.
        `partition`: keys that one block of threads goes through, a multiple of 32; it decides the order of sums.
        `resident`: blocks of a multiprocessor that registers are shared out for. `stages`: tiles of 32 keys that a warp
        has in shared memory."""
        definitions = cache_definitions(shape, strides, group, partition or partition_of(longest), products)
        kv_heads = shape[2]
        self._head_dim = shape[3]
        self._strides = strides
        self._query_type = QUERY_TYPES[products]
        self.kv_heads = kv_heads
        self.partitions = -(-longest // definitions["PARTITION"])
        definitions |= {"RESIDENT": resident, "STAGES": stages}
        queue = _WARPS * stages * _TILE * 2 * self._head_dim
        self._kernel = cuda_kernel("decode_attention", "decode_attention", tuple(definitions.items()), queue, device)
        self._at_once = queries
        size = queries * kv_heads * self.partitions * group * (self._head_dim + 2) if self.partitions > 1 else 1
        self._partial = torch.empty(size, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(queries * kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        queries: Queries,
        scales: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
    ) -> None:
        """Write attention to rows of `out`, BF16 [tokens, heads, head_dim]; `query` is E4M3 or BF16 of that shape.

        Scales of Q (not read in BF16), K and V are FP32 scalars on the device."""
        assert keys.stride() == values.stride() == self._strides
        assert query.stride()[1:] == (self._head_dim, 1)
        assert query.dtype == self._query_type, query.dtype
        for first in range(0, len(queries.lengths), self._at_once):
            table, starts, lengths = (each[first:] for each in queries)
            count = min(self._at_once, len(lengths))
            arguments = (
                *(query, query.stride(0), keys, values, table, table.stride(0), starts, lengths, *scales),
                *(self._head_dim**-0.5, out, out.stride(0), self._partial, self._arrivals),
            )
            self._kernel.launch((self.kv_heads, count, self.partitions), 32 * _WARPS, arguments)


shared_decode_attention = cache(DecodeAttention)
"""One for all layers, which run one after the other."""


def cache_definitions(
    shape: torch.Size, strides: tuple[int, ...], group: int, partition: int, products: AttentionProducts
) -> dict[str, int]:
    """The macros of both attention kernels for a paged cache."""
    _, page, _, head_dim = shape
    assert 1 <= group <= LARGEST_GROUP, group
    assert page % 16 == 0, page
    assert head_dim in HEAD_DIMS, shape
    assert strides[-1] == 1, strides
    names = ("BLOCK_STRIDE", "KEY_STRIDE", "HEAD_STRIDE")
    sizes = {"HEAD_DIM": head_dim, "GROUP": group, "PAGE": page}
    sizes |= {"PARTITION": partition, "PRODUCTS_16": int(products == "fp16_over_fp8_cache")}
    return {**sizes, **dict(zip(names, strides[:3], strict=True))}


def partition_of(longest: int) -> int:
    """Keys of a partition: few partitions, since most of them are empty when most requests are short."""
    return max(_SHORTEST_PARTITION, -(-longest // (_MOST_PARTITIONS * _TILE)) * _TILE)
