"""Attention of single tokens over a paged FP8 cache: a kernel for Hopper, and its reference.

FlashAttention 3 decodes from an FP8 cache at little more than half of the memory's bandwidth, because FP8 tensor cores
want V transposed. Decoding is bound by memory, so this kernel widens codes to FP16 instead, which is exact, and
multiplies with FP32 accumulation. What it computes is what the contract says: Q, K, V and P are E4M3, P is scaled by
256.

The maximum that P is relative to is rounded up to a power of two. Moving on to a higher maximum is then exact, and P is
rounded to the same value whichever keys were seen before (as long as it is a normal number). The largest P is then no
power of two any more and is rounded itself, so the row sum is that of the rounded P, and a weight that dominates stays
exact all the same; FlashAttention, whose largest P is 256, sums before it rounds.

Nothing depends on the batch: keys are split by their position alone, and partitions are added in their order. So a
token attends alike whether it is decoded, part of a prompt, or part of a sequence that is scored (`token_queries`).
"""

import math
from pathlib import Path
from typing import NamedTuple

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


class Queries(NamedTuple):
    """Which tokens attend, and to what; all int32.

    Attributes:
        block_table: [sequences, blocks of the longest].
        owners: [queries], the row of `block_table` of each.
        starts: [queries + 1], the first token of each; one that does not have exactly one token is left out.
        lengths: [queries], the keys each sees, its own counted; 0 gives zeros.
    """

    block_table: Tensor
    owners: Tensor
    starts: Tensor
    lengths: Tensor


def token_queries(block_table: Tensor, starts: Tensor, lengths: Tensor, tokens: int) -> Queries:
    """Every new token as a query of its own, which sees what came before it in its sequence.

    Args:
        block_table: int32 [sequences, blocks of the longest].
        starts: int32 [sequences + 1], the first of each sequence's new tokens, ascending.
        lengths: int32 [sequences], cached and new tokens together.
        tokens: rows of the query; those after the last sequence's see nothing.
    """
    each = torch.arange(tokens + 1, dtype=torch.int32, device=starts.device)
    own = each[:-1]
    found = torch.searchsorted(starts[1:], own, right=True, out_int32=True)
    owners = found.clamp(max=len(lengths) - 1)
    behind = starts[1:][owners] - 1 - own
    return Queries(block_table, owners, each, torch.where(found < len(lengths), lengths[owners] - behind, 0))


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
        queries: int,
        partition: int | None = None,
        resident: int = 3,
        stages: int = 2,
        tokens: int = 1,
    ) -> None:
        """Compile, and take the workspace.

        Args:
            device: a GPU of compute capability 8.9 or higher.
            shape: of the keys, and of the values: [blocks, page, kv_heads, 128]; a page is a multiple of 16.
            strides: of both; the last is 1.
            group: query heads per KV head, at most `LARGEST_GROUP`.
            longest: keys of the longest sequence.
            queries: that are computed at once, which the workspace grows with; of more, as many at a time.
            partition: keys that one block of threads goes through, a multiple of 32; None takes what suits `longest`.
                It decides the order of sums.
            resident: blocks of one multiprocessor that registers are shared out for.
            stages: tiles of 32 keys that a warp has in shared memory.
            tokens: queries side by side that share what is read of the keys where they are of one sequence, as those of
                prompts are; `tokens * group` is at most `LARGEST_GROUP`. It decides no bit.
        """
        _, page, kv_heads, head_dim = shape
        assert 1 <= group * tokens <= LARGEST_GROUP, (group, tokens)
        assert page % 16 == 0, page
        assert (head_dim, strides[-1]) == (HEAD_DIM, 1), (shape, strides)
        partition = partition or partition_of(longest)
        self._strides, self.kv_heads, self.partitions = strides, kv_heads, -(-longest // partition)
        names = ("BLOCK_STRIDE", "KEY_STRIDE", "HEAD_STRIDE")
        definitions = {"GROUP": group, "TOKENS": tokens, "PAGE": page, "PARTITION": partition}
        definitions |= {"RESIDENT": resident, "STAGES": stages}
        definitions |= dict(zip(names, self._strides[:3], strict=True))
        queue = _WARPS * stages * _TILE_BYTES
        self._kernel = kernel(_SOURCE, "decode_attention", tuple(definitions.items()), queue, device.index or 0)
        self._at_once, self._tokens = queries, tokens
        size = queries * kv_heads * self.partitions * group * (HEAD_DIM + 2) if self.partitions > 1 else 1
        self._partial = torch.empty(size, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(queries * kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        queries: Queries,
        scales: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
    ) -> None:
        """Write the attention of the queries to their rows of `out`; the other rows stay.

        Args:
            query: E4M3 [tokens, heads, 128].
            keys: E4M3 [blocks, page, kv_heads, 128] of the strides that were given.
            values: likewise.
            queries: which tokens, and what they see.
            scales: of Q, K and V, FP32 scalars on the device: value = code * scale.
            out: BF16 [tokens, heads, 128].
        """
        assert keys.stride() == values.stride() == self._strides
        assert query.stride()[1:] == (HEAD_DIM, 1)
        table, owners, starts, lengths = queries
        for first in range(0, len(owners), self._at_once):
            count = min(self._at_once, len(owners) - first)
            arguments = (
                *(query, query.stride(0), keys, values, count, table, table.stride(0)),
                *(owners[first:], starts[first:], lengths[first:], *scales),
                *(HEAD_DIM**-0.5, out, out.stride(0), self._partial, self._arrived),
            )
            grid = self.kv_heads, -(-count // self._tokens), self.partitions
            self._kernel.launch(grid, 32 * _WARPS, arguments)


def partition_of(longest: int) -> int:
    """Keys of a partition: few partitions, since most of them are empty when most requests are short."""
    return max(_SHORTEST_PARTITION, -(-longest // (_MOST_PARTITIONS * _TILE)) * _TILE)


def decode_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Queries,
    scales: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """What the kernel computes for queries that are all tokens in their order, in FP64 with its roundings.

    Args:
        query, keys, values, queries, scales: as there; any device.

    Returns:
        FP64 [tokens, heads, 128], not rounded to BF16.
    """
    q_scale, k_scale, v_scale = (float(scale) for scale in scales)
    group = query.shape[1] // keys.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for i, (owner, length) in enumerate(zip(queries.owners.tolist(), queries.lengths.tolist(), strict=True)):
        if length == 0:
            continue
        blocks = queries.block_table[owner, : -(-length // keys.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", query[i].double(), k)
        scores = scores * (q_scale * k_scale / math.sqrt(HEAD_DIM) / math.log(2))  # in powers of two
        p = to_e4m3_grid(torch.exp2(scores - scores.amax(-1, keepdim=True).ceil()) * _P_RANGE, 1.0)
        out[i] = torch.einsum("hk,khd->hd", p, v) * v_scale / p.sum(-1, keepdim=True)
    return out
