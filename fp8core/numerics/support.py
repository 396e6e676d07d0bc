"""Top-k, top-p and min-p: the part of the vocabulary that a token is sampled from, its support.

One rule for rollout and training, in vLLM's order: temperature, min-p, top-k, top-p. Each takes the likeliest tokens,
and tokens of equal logits stay or go together, so a support is all logits from a threshold on:

- min-p: 2^e >= min_p, where e = (logit - largest logit) * log2(e) / temperature in FP32.
- top-k: fewer than top_k logits are larger.
- top-p: the larger logits in the support so far have less than top_p of its probability. A probability is a whole
  number of 2^-34 of the largest one, by a polynomial in FP32. So sums are exact in any order. top_p is FP32.

Log-probs are those of a softmax over the support. So a row's result depends on its bytes alone, and is the same on CPU
and GPU. Of a policy that did not sample the token, the support is its own and that token."""

import math

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.truncation import Truncation

UNIT_BITS = 34
LOWEST_EXPONENT = -60.0
"""Where a probability has become 0."""
# (2^x - 1) / x on [0, 1], the highest power first: within 2^-23 of 2^x.
POLYNOMIAL = (0.00020829191, 0.0012689353, 0.00965244, 0.055495936, 0.24022722, 0.6931472)


def exponent_factor(temperature: float) -> float:
    return math.log2(math.e) / temperature


@with_kernel("support")
def truncated(
    logits: Tensor, temperature: float, truncation: Truncation | None, targets: Tensor | None = None
) -> Tensor:
    """Logits with -inf outside of each row's support, FP32 [tokens, vocabulary]; unchanged without a truncation.

    `targets`: int64 [tokens], tokens that are in the support anyway."""
    if truncation is None:
        return logits
    ordered = logits.sort(dim=-1, descending=True).values
    exponents = (ordered - ordered[:, :1]) * exponent_factor(temperature)
    inside = exponents >= truncation.min_exponent
    if truncation.top_k is not None:
        smallest = min(truncation.top_k, logits.shape[1]) - 1
        inside &= ordered >= ordered[:, smallest : smallest + 1]
    if truncation.top_p < 1:
        masses = _masses(exponents).masked_fill_(~inside, 0.0)
        cumulative = masses.cumsum(-1)
        inside &= (
            cumulative - masses < torch.tensor(truncation.top_p, dtype=torch.float32).double() * cumulative[:, -1:]
        )
    # Without a number in the row none is inside, and what is not finite must show in the log-probs.
    last = (inside.sum(-1, keepdim=True) - 1).clamp_min(0)
    outside = logits < ordered.gather(-1, last)
    if targets is not None:
        outside.scatter_(-1, targets[:, None], False)
    return logits.masked_fill(outside, -torch.inf)


def _masses(exponents: Tensor) -> Tensor:
    """2^exponent in whole units, FP64 of FP32 exponents up to 0."""
    exponents = exponents.clamp_min(LOWEST_EXPONENT)
    whole = exponents.floor()
    rest = exponents - whole
    power = torch.full_like(rest, POLYNOMIAL[0])
    for coefficient in (*POLYNOMIAL[1:], 1.0):
        power = power * rest + coefficient
    # Of the bits of a power of two, so that nothing is rounded.
    scale = (whole.int() + (127 + UNIT_BITS) << 23).view(torch.float32)
    return (power * scale).floor().double()
