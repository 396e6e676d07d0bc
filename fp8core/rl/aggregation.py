"""From per-token loss terms to one scalar: five aggregations over one denominator.

The denominator counts the tokens and non-empty sequences of the whole optimiser batch after rejection. Rejected
tokens therefore never shrink the gradient, and the sum over micro-batches and ranks is the loss of the batch.
An aggregation of an empty batch is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominator:
    """Counts of the whole optimiser batch; counts of its parts add."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, mask: Tensor) -> "Denominator":
        """Counts of a bool mask [B, T]: true tokens, and rows with at least one."""
        return cls(tokens=int(mask.sum()), sequences=int(mask.any(dim=1).sum()))

    def __add__(self, other: "Denominator") -> "Denominator":
        return Denominator(self.tokens + other.tokens, self.sequences + other.sequences)


Aggregate = Callable[[Tensor, Tensor, Denominator], Tensor]
"""(terms [B, T], mask bool [B, T], denominator) -> scalar."""


def token_mean(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Sum over tokens / tokens: every token weighs the same (DAPO, arXiv 2503.14476, eq. 12)."""
    return token_sum(terms, mask, denominator) / max(denominator.tokens, 1)


def token_sum(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Sum over tokens."""
    return torch.where(mask, terms, 0.0).sum()


def sequence_mean_token_sum(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Sum over tokens / sequences: long sequences weigh more."""
    return token_sum(terms, mask, denominator) / max(denominator.sequences, 1)


def sequence_mean_token_mean(terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """Mean over sequences of their token means: every sequence weighs the same (GRPO, arXiv 2402.03300, eq. 3)."""
    lengths = mask.sum(dim=1).clamp_min(1)
    return (torch.where(mask, terms, 0.0).sum(dim=1) / lengths).sum() / max(denominator.sequences, 1)


def constant_length(length: int) -> Aggregate:
    """Sum over tokens / (sequences * length), `length` a constant such as the generation budget (Dr. GRPO,
    arXiv 2503.20783, section 3.2; `seq-mean-token-sum-norm` in verl)."""
    return partial(_over_constant, length)


def _over_constant(length: int, terms: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    return sequence_mean_token_sum(terms, mask, denominator) / length


AGGREGATIONS: dict[str, Aggregate] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": sequence_mean_token_sum,
    "seq-mean-token-mean": sequence_mean_token_mean,
}
"""By the names of verl's `loss_agg_mode`."""
