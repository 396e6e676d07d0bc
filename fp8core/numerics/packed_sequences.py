"""Sequences of different lengths laid one behind the other, without padding between them but to whole pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import TILE

# Keys of one sequence then lie in pages as in a paged cache, and decode kernels can read them where they are.
PAGE = 16


@dataclass(frozen=True)
class PackedSequences:
    """Where each sequence of a pack lies.

    Every sequence begins at a multiple of `PAGE`, and the pack holds a multiple of 128 tokens, as block-FP8 weight
    gradients want it. What fills up a page belongs to the sequence before it, of which it is the end, so that no real
    token sees it; what fills up the pack is a sequence of its own.

    Attributes:
        lengths: real tokens of each sequence.
        starts: where each begins, and the number of tokens of the pack (one more than there are lengths).
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "PackedSequences":
        """Lay out sequences of at least one token each, in this order."""
        assert lengths, "a pack without sequences"
        assert min(lengths) > 0, "an empty sequence"
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + _round_up(length, PAGE))
        rest = -starts[-1] % TILE
        return cls((*lengths, 0), (*starts, starts[-1] + rest)) if rest else cls(tuple(lengths), tuple(starts))

    @property
    def tokens(self) -> int:
        """Tokens of the pack, filling included."""
        return self.starts[-1]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence with its filling."""
        return max(end - start for start, end in self.spans)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of every sequence, with its filling."""
        return list(zip(self.starts[:-1], self.starts[1:], strict=True))

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [tokens]: from 0 in every sequence, filling included."""
        return torch.arange(self.tokens) - torch.tensor(self.starts)[self.owners]

    @cached_property
    def valid(self) -> Tensor:
        """bool [tokens], False where the pack is filled up."""
        return self.offsets < torch.tensor(self.lengths)[self.owners]

    @cached_property
    def positions(self) -> Tensor:
        """int64 [tokens]: from 0 in every sequence, and 0 where the pack is filled up."""
        return torch.where(self.valid, self.offsets, 0)

    @cached_property
    def owners(self) -> Tensor:
        """int64 [tokens]: the index of the sequence that each token belongs to."""
        return torch.repeat_interleave(torch.tensor(self.starts).diff())


def packed_length(length: int) -> int:
    """Tokens that a sequence takes in a pack."""
    return _round_up(length, PAGE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
