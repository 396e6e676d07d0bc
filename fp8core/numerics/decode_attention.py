"""Attention of one new token per request over a paged FP8 cache: a kernel for Hopper, and its reference.

FlashAttention 3 decodes from an FP8 cache at little more than half of the memory's bandwidth, because FP8 tensor cores
want V transposed. Decoding is bound by memory, so this kernel widens codes to FP16 instead, which is exact, and
multiplies with FP32 accumulation. What it computes is what the contract says: Q, K, V and P are E4M3, P is scaled by
256 and its row sum taken before it is rounded.

The maximum that P is relative to is rounded up to a power of two. Moving on to a higher maximum is then exact, and P is
rounded to the same value whichever keys were seen before (as long as it is a normal number). Nothing depends on the
batch: keys are split by their position alone, and partitions are added in their order.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from fp8core.numerics.cuda_module import kernel
from fp8core.numerics.rounding import to_e4m3_grid

HEAD_DIM = 128
# More query heads per KV head do not fit a fragment's columns.
LARGEST_GROUP = 8
_SHORTEST_PARTITION, _MOST_PARTITIONS = 4096, 4
_SOURCE = Path(__file__).with_name("decode_attention.cu")
_WARPS, _TILE = 4, 32
_TILE_BYTES = _TILE * 2 * HEAD_DIM
_P_RANGE = 256.0


class DecodeAttention:
    """The kernel with its workspace, for one shape of model on one device.

    The workspace is shared by all calls, which must be on one stream.
    """

    def __init__(
        self,
        device: torch.device,
        shape: torch.Size,
        strides: tuple[int, ...],
        group: int,
        longest: int,
        requests: int,
        partition: int | None = None,
        resident: int = 3,
        stages: int = 2,
    ) -> None:
        """Compile, and take the workspace.

        Args:
            device: a GPU of compute capability 8.9 or higher.
            shape: of the keys, and of the values: [blocks, page, kv_heads, 128]; a page is a multiple of 16.
            strides: of both; the last is 1.
            group: query heads per KV head, at most `LARGEST_GROUP`.
            longest: keys of the longest request.
            requests: of the largest batch.
            partition: keys that one block of threads goes through, a multiple of 32; None takes what suits `longest`.
            resident: blocks of one multiprocessor that registers are shared out for.
            stages: tiles of 32 keys that a warp has in shared memory.
        """
        _, page, kv_heads, head_dim = shape
        assert 1 <= group <= LARGEST_GROUP, group
        assert page % 16 == 0, page
        assert (head_dim, strides[-1]) == (HEAD_DIM, 1), (shape, strides)
        partition = partition or partition_of(longest)
        self._strides, self.kv_heads, self.partitions = strides, kv_heads, -(-longest // partition)
        names = ("BLOCK_STRIDE", "KEY_STRIDE", "HEAD_STRIDE")
        definitions = {"GROUP": group, "PAGE": page, "PARTITION": partition, "RESIDENT": resident, "STAGES": stages}
        definitions |= dict(zip(names, self._strides[:3], strict=True))
        queue = _WARPS * stages * _TILE_BYTES
        self._kernel = kernel(_SOURCE, "decode_attention", tuple(definitions.items()), queue, device.index or 0)
        size = requests * kv_heads * self.partitions * group * (HEAD_DIM + 2) if self.partitions > 1 else 1
        self._partial = torch.empty(size, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(requests * kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        starts: Tensor,
        lengths: Tensor,
        scales: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
    ) -> None:
        """Write the attention of requests with one new token to their rows of `out`; the other rows stay.

        Args:
            query: E4M3 [tokens, heads, 128].
            keys: E4M3 [blocks, page, kv_heads, 128] of the strides that were given.
            values: likewise.
            block_table: int32 [requests, blocks of the longest].
            starts: int32 [requests + 1], the first of each request's new tokens.
            lengths: int32 [requests], the new tokens counted; a request of length 0 gets zeros.
            scales: of Q, K and V, FP32 scalars on the device: value = code * scale.
            out: BF16 [tokens, heads, 128].
        """
        requests = lengths.shape[0]
        assert keys.stride() == values.stride() == self._strides
        assert query.stride()[1:] == (HEAD_DIM, 1)
        arguments = (
            *(query, query.stride(0), keys, values, block_table, block_table.stride(0), starts, lengths),
            *(*scales, HEAD_DIM**-0.5, out, out.stride(0), self._partial, self._arrived),
        )
        self._kernel.launch((self.kv_heads, requests, self.partitions), 32 * _WARPS, arguments)


def partition_of(longest: int) -> int:
    """Keys of a partition: few partitions, since most of them are empty when most requests are short."""
    return max(_SHORTEST_PARTITION, -(-longest // (_MOST_PARTITIONS * _TILE)) * _TILE)


def decode_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """What the kernel computes for one token of each request, in FP64 with the roundings of the contract.

    Args:
        query, keys, values, block_table, lengths, scales: as there; any device.

    Returns:
        FP64 [requests, heads, 128], not rounded to BF16.
    """
    q_scale, k_scale, v_scale = (float(scale) for scale in scales)
    group = query.shape[1] // keys.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for i, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        blocks = block_table[i, : -(-length // keys.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", query[i].double(), k)
        scores = scores * (q_scale * k_scale / math.sqrt(HEAD_DIM) / math.log(2))  # in powers of two
        p = torch.exp2(scores - scores.amax(-1, keepdim=True).ceil()) * _P_RANGE
        out[i] = torch.einsum("hk,khd->hd", to_e4m3_grid(p, 1.0).double(), v) * v_scale / p.sum(-1, keepdim=True)
    return out
