"""Rows of a batch laid one after another: what the packed trainer and Megatron compute at once."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from fp8core.numerics.packed import PackedSequences, copy_to
from fp8core.rl.batch import TokenBatch


def row_groups(lengths: Sequence[int], micro_batch_tokens: int) -> Iterator[slice]:
    """Consecutive rows of at most so many tokens together; a longer row is alone."""
    start = 0
    tokens = 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > micro_batch_tokens:
            yield slice(start, row)
            start = row
            tokens = 0
        tokens += length
    if lengths:
        yield slice(start, len(lengths))


def even_groups(lengths: Sequence[int], micro_batch_tokens: int, ranks: int) -> list[slice]:
    """`row_groups` of no more groups a rank than fit, each as small as it can be."""
    groups = list(row_groups(lengths, micro_batch_tokens))
    if len(groups) % ranks == 0:
        return groups
    most = math.ceil(len(groups) / ranks) * ranks
    sizes = range(1, micro_batch_tokens)
    # A smaller size never makes fewer groups.
    offset = bisect_left(sizes, True, key=lambda size: sum(1 for _ in row_groups(lengths, size)) <= most)
    return list(row_groups(lengths, sizes.start + offset))


def end_to_end(lengths: Sequence[int], multiple: int) -> PackedSequences:
    """Sequences without padding between them, and a last one of padding up to a multiple of tokens."""
    starts = list(accumulate(lengths, initial=0))
    if padding := -starts[-1] % multiple:
        return PackedSequences((*lengths, 0), (*starts, starts[-1] + padding))
    return PackedSequences(tuple(lengths), tuple(starts))


@dataclass(frozen=True)
class Pack:
    """The tokens of one forward pass.

    Attributes:
        rows: of the batch it was made from.
        tokens: int64 [T], 0 on padding.
        target_positions: int64 [targets], of tokens in `response_mask`, row by row; the one before predicts it.
        experts: int16 [T, sparse layers, k] as in `TokenBatch`, -1 on padding, or None."""

    rows: slice
    sequences: PackedSequences
    tokens: Tensor
    target_positions: Tensor
    experts: Tensor | None

    @classmethod
    def of(cls, batch: TokenBatch, rows: slice, sequences: PackedSequences) -> "Pack":
        valid = batch.valid[rows]

        def laid_out(values: Tensor, padding: int) -> Tensor:
            row = values.new_full((sequences.tokens, *values.shape[2:]), padding)
            row[sequences.valid] = values[rows][valid]
            return row

        target_positions = laid_out(batch.response_mask, False).nonzero().squeeze(-1)
        experts = None if batch.experts is None else laid_out(batch.experts, -1)
        return cls(rows, sequences, laid_out(batch.tokens, 0), target_positions, experts)

    def to(self, device: torch.device) -> "Pack":
        tokens, target_positions = (copy_to(part, device) for part in (self.tokens, self.target_positions))
        experts = None if self.experts is None else self.experts.to(device)
        return replace(self, tokens=tokens, target_positions=target_positions, experts=experts)


def packs(batch: TokenBatch, micro_batch_tokens: int, multiple: int) -> Iterator[Pack]:
    lengths = batch.valid.sum(-1).tolist()
    for rows in row_groups(lengths, micro_batch_tokens):
        yield Pack.of(batch, rows, end_to_end(lengths[rows], multiple))
