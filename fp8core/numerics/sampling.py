"""Sampling with counter-based random numbers: a draw depends on the sample's seed and the token's position only.

The batch a sample is generated in, and where generation was interrupted, therefore change nothing.
"""

import torch
from torch import Tensor

_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed 64-bit integer
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15


def uniform(seeds: Tensor, position: int) -> Tensor:
    """Uniform FP64 numbers in [0, 1) with 53 random bits, by SplitMix64 (Steele et al., OOPSLA 2014).

    Args:
        seeds: int64 [B], one per sample.
        position: index of the token within its completion.
    """
    z = seeds + (position + 1) * torch.tensor(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def sample(logprobs: Tensor, draws: Tensor) -> Tensor:
    """Inverse-CDF sampling: int64 [B] from FP64 log-probs [B, V] and uniform draws in [0, 1) [B]."""
    cumulative = logprobs.exp().cumsum(-1)
    assert bool((cumulative[:, -1] > 0).all()), "not a distribution: NaN, or no token with any probability"
    # Even the largest draw, 1 - 2^-53, times the total rounds to less than the total. So some token is always found,
    # and one that adds to the sum.
    return torch.searchsorted(cumulative, draws.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)


def greedy(logprobs: Tensor) -> Tensor:
    """The most likely token, the first of several: int64 [B] from [B, V]."""
    return logprobs.argmax(-1)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
