"""Rows of a batch laid one after another, as Megatron's attention takes them, with a little padding at the end."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.rl.batch import TokenBatch


@dataclass(frozen=True)
class Pack:
    """The tokens of one forward pass.

    Attributes:
        rows: of the batch it was made from.
        tokens: int64 [T], with padding at the end.
        positions: int64 [T].
        bounds: int32 [sequences + 1], where each sequence begins and the last ends; padding is a sequence of its own.
        longest: tokens of the longest sequence.
        used: tokens that are no padding.
        before: int64 [written], the place before each completion token, in row order.
        written: int64 [written], these completion tokens.
        experts: int16 [T, sparse layers, k] as in `TokenBatch`, or None.
    """

    rows: slice
    tokens: Tensor
    positions: Tensor
    bounds: Tensor
    longest: int
    used: int
    before: Tensor
    written: Tensor
    experts: Tensor | None

    @property
    def valid(self) -> Tensor:
        """bool [1, T], False on padding."""
        return (torch.arange(len(self.tokens), device=self.tokens.device) < self.used)[None]

    def to(self, device: torch.device) -> "Pack":
        """The same on a device."""
        moved = (self.tokens, self.positions, self.bounds, self.before, self.written)
        tokens, positions, bounds, before, written = (part.to(device, non_blocking=True) for part in moved)
        experts = None if self.experts is None else self.experts.to(device)
        return Pack(self.rows, tokens, positions, bounds, self.longest, self.used, before, written, experts)


@dataclass(frozen=True)
class Pass:
    """A pack as one process computes it; where it does not count, for the company of the process that counts it."""

    pack: Pack
    counts: bool

    @property
    def valid(self) -> Tensor:
        """bool [1, T]: tokens that count."""
        return self.pack.valid & self.counts

    def to(self, device: torch.device) -> "Pass":
        """The same on a device."""
        return Pass(self.pack.to(device), self.counts)


def packs(batch: TokenBatch, limit: int, multiple: int) -> Iterator[Pack]:
    """Consecutive rows of at most `limit` tokens together, padded to a multiple; a longer row is alone."""
    lengths = batch.valid.sum(-1).tolist()
    start, filled = 0, 0
    for row, length in enumerate(lengths):
        if row > start and filled + length > limit:
            yield pack(batch, slice(start, row), multiple)
            start, filled = row, 0
        filled += length
    yield pack(batch, slice(start, len(lengths)), multiple)


def pack(batch: TokenBatch, rows: slice, multiple: int) -> Pack:
    """These rows, padded to a multiple of tokens."""
    valid = batch.valid[rows]
    lengths = valid.sum(-1)
    used = int(lengths.sum())
    padding = -used % multiple
    written = batch.completion[rows][valid]
    tokens = _padded(batch.tokens[rows][valid], padding, 0)
    ends = torch.cat([lengths.cumsum(0), torch.tensor([used + padding])[: min(padding, 1)]])
    after = written.nonzero().flatten()
    experts = None if batch.experts is None else batch.experts[rows][valid]
    return Pack(
        rows=rows,
        tokens=tokens,
        positions=_padded(batch.positions[rows][valid], padding, 0),
        bounds=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        longest=max(int(lengths.max()), padding),
        used=used,
        before=after - 1,
        written=tokens[after],
        experts=None if experts is None else _padded(experts, padding, -1),
    )


def _padded(x: Tensor, padding: int, value: int) -> Tensor:
    """Along the first dimension, at the end."""
    return torch.cat([x, x.new_full((padding, *x.shape[1:]), value)])
