"""Logits and log-probabilities that do not depend on the batch they are computed in.

The head multiplies BF16 hidden states by BF16 weights on fixed-point grids (`gemm.align_rows`). So FP32 logits are
equal for any batch; the normaliser is a sum of fixed-point numbers. Temperature divides the logits; tokens outside of a
support (`numerics.support`) have logits of -inf, no part in entropy and no gradient.

`chunked_logprobs` runs over the tokens in chunks, forward and backward, and never holds the logits of all."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.elementwise import to_fixed_point
from fp8core.numerics.gemm import align_rows, aligned_gemm, alignment_bits
from fp8core.numerics.support import truncated
from fp8core.numerics.truncation import Truncation

_SUM_BITS = 34
# For -inf in a product with a probability of 0; no log-prob of FP32 logits is so low.
_LOWEST = -1e60
# Aligned together: pieces stay in the cache.
_HEAD_ROWS = 256


@dataclass(frozen=True)
class HeadWeight:
    """`values`: FP32 [vocabulary, hidden]; `aligned`: FP64, on fixed-point grids; `master`: FP32, receives the
    gradient, or None in inference."""

    values: Tensor
    aligned: Tensor
    master: Tensor | None


@dataclass(frozen=True)
class HeadFormat:
    """A BF16 head; `output` is what logits are rounded to."""

    name: str
    output: torch.dtype

    def logits(self, hidden: Tensor, head: HeadWeight) -> Tensor:
        """FP32 [tokens, vocabulary]."""
        return aligned_gemm(hidden, head.aligned).to(self.output).float()


FP32_HEAD = HeadFormat("fp32", torch.float32)
BF16_HEAD = HeadFormat("bf16", torch.bfloat16)


def load_head(values: Tensor) -> HeadWeight:
    full = values.float()
    aligned = torch.empty(full.shape, dtype=torch.float64)
    bits = alignment_bits(full.shape[1])
    for rows, piece in zip(aligned.split(_HEAD_ROWS), full.split(_HEAD_ROWS), strict=True):
        rows.copy_(align_rows(piece.double(), bits))
    return HeadWeight(full, aligned, master=None)


@with_kernel("softmax")
def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """FP64 [tokens, vocabulary] of the tempered distribution, within vocabulary * 2^-35; on a GPU FP32, of FP32's
    accuracy."""
    scaled = logits.double() / temperature
    shifted = scaled - scaled.amax(-1, keepdim=True)
    return shifted - to_fixed_point(shifted.exp(), _SUM_BITS).sum(-1, keepdim=True).log()


@with_kernel("softmax")
def token_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, int64 [tokens], and entropy of each distribution; FP32 [tokens]."""
    logp = log_softmax(logits, temperature)
    target_logprobs = logp.gather(-1, targets[:, None]).squeeze(-1).float()
    return target_logprobs, -(logp.exp() * logp.clamp_min_(_LOWEST)).sum(-1).float()


@with_kernel("softmax")
def logit_slopes(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    temperature: float,
    gradients: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """Gradient by the logits, [tokens, vocabulary]: (grad * (1[target] - p) - grad_entropy * p * (log p + H)) /
    temperature.

    `gradients` are those of log-probs and of entropies, [tokens] or None; `entropy`, H, is that of `token_statistics`.
    """
    grad, grad_entropy = (None if g is None else g / temperature for g in gradients)
    logp = log_softmax(logits, temperature)
    flatter = None
    if grad_entropy is not None:
        p = logp.exp()
        logp.clamp_min_(_LOWEST)
        negative_entropy = (p * logp).sum(-1, keepdim=True)
        flatter = p.mul_((logp - negative_entropy).mul_(-grad_entropy[:, None]))
    if grad is None:
        return torch.zeros_like(logp, dtype=dtype) if flatter is None else flatter.to(dtype)
    p = logp.exp_()
    p[torch.arange(len(p), device=p.device), targets] -= 1
    p.mul_(-grad[:, None])
    return (p if flatter is None else p.add_(flatter)).to(dtype)


class ChunkedHead(ABC):
    """A head as `chunked_logprobs` multiplies with it.

    Attributes:
        chunk_elements: logits that are held at once.
        partial_dtype: of the gradient of the hidden states before `total`; None for theirs.
    """

    chunk_elements = 1 << 27
    partial_dtype: torch.dtype | None = None

    def __init__(self, weight: Tensor, temperature: float, truncation: Truncation | None = None) -> None:
        self.weight = weight
        self.temperature = temperature
        self._truncation = truncation

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 [tokens, vocabulary]."""

    def statistics(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_statistics(self._support_logits(hidden, targets), targets, self.temperature)

    def slopes(
        self, hidden: Tensor, targets: Tensor, entropy: Tensor, gradients: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """As `logit_slopes`, in the format of the products."""
        logits = self._support_logits(hidden, targets)
        return logit_slopes(logits, targets, entropy, self.temperature, gradients, self.weight.dtype)

    def _support_logits(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return truncated(self.logits(hidden), self.temperature, self._truncation, targets)

    @abstractmethod
    def add_weight_gradient(self, total: Tensor, slopes: Tensor, hidden: Tensor) -> None:
        """Add slopes^T hidden to FP32 `total`."""

    def hidden_gradient(self, slopes: Tensor) -> Tensor:
        return slopes @ self.weight

    def total(self, x: Tensor) -> Tensor:
        """The sum of what the processes that share the vocabulary have found."""
        return x

    def returned(self, grad_weight: Tensor) -> Tensor:
        return grad_weight


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, master: Tensor | None, head: ChunkedHead, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprob_parts = []
        entropies = []
        for part in _chunks(head, len(targets)):
            target_logprobs, entropy = head.statistics(hidden[part], targets[part])
            logprob_parts.append(target_logprobs)
            entropies.append(entropy)
        logprobs = head.total(torch.cat(logprob_parts))
        entropy = head.total(torch.cat(entropies))
        ctx.save_for_backward(hidden, targets, entropy)
        ctx.head = head
        # Where the loss has no entropy in it, the gradient of entropies is None, and nothing is computed for it.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, targets, entropy = ctx.saved_tensors
        head: ChunkedHead = ctx.head
        grad_hidden = torch.empty_like(hidden, dtype=head.partial_dtype)
        grad_weight = torch.zeros_like(head.weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(head, len(targets)):
            gradients = (None if grad is None else grad[part], None if grad_entropy is None else grad_entropy[part])
            slopes = head.slopes(hidden[part], targets[part], entropy[part], gradients)
            grad_hidden[part] = head.hidden_gradient(slopes)
            if grad_weight is not None:
                head.add_weight_gradient(grad_weight, slopes, hidden[part])
        of_hidden = head.total(grad_hidden).to(hidden.dtype)
        return of_hidden, None if grad_weight is None else head.returned(grad_weight), None, None


def chunked_logprobs(
    hidden: Tensor, master: Tensor | None, head: ChunkedHead, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, FP32 [tokens], in nats, both differentiable.

    `hidden` is [tokens, hidden], after the final norm; `master` receives the gradient of the head's weight."""
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, master, head, targets)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class ExactHead(ChunkedHead):
    chunk_elements = 1 << 24

    def __init__(
        self, head: HeadWeight, form: HeadFormat, temperature: float, truncation: Truncation | None = None
    ) -> None:
        super().__init__(head.values, temperature, truncation)
        self._head = head
        self._form = form

    def logits(self, hidden: Tensor) -> Tensor:
        return self._form.logits(hidden, self._head)

    def slopes(
        self, hidden: Tensor, targets: Tensor, entropy: Tensor, gradients: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        grad, grad_entropy = (None if g is None else g.double() for g in gradients)
        return super().slopes(hidden, targets, entropy, (grad, grad_entropy))

    def add_weight_gradient(self, total: Tensor, slopes: Tensor, hidden: Tensor) -> None:
        total += slopes.t() @ hidden


def token_logprobs(
    hidden: Tensor,
    head: HeadWeight,
    form: HeadFormat,
    targets: Tensor,
    temperature: float,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunked_logprobs` of FP32 hidden states; gradients reach `head.master`."""
    return chunked_logprobs(hidden, head.master, ExactHead(head, form, temperature, truncation), targets)


def _chunks(head: ChunkedHead, tokens: int) -> list[slice]:
    size = max(1, head.chunk_elements // len(head.weight))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)] or [slice(0, 0)]


_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed 64-bit integer
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15


def uniform(seeds: Tensor, position: int | Tensor) -> Tensor:
    """Uniform FP64 numbers in [0, 1) with 53 random bits, by SplitMix64 (Steele et al., OOPSLA 2014). Of int64 [B] and
    the place of the token within its completion, one or int64 [B]."""
    z = seeds + (position + 1) * torch.tensor(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def sample(logprobs: Tensor, draws: Tensor) -> Tensor:
    """Inverse-CDF sampling: int64 [B] from FP64 log-probs [B, V] and draws in [0, 1) [B]."""
    cumulative = logprobs.exp().cumsum(-1)
    assert bool((cumulative[:, -1] > 0).all()), "not a distribution: NaN, or no token with any probability"
    # Even the largest draw, 1 - 2^-53, times the total rounds to less than the total. So some token is always found,
    # and one that adds to the sum.
    return torch.searchsorted(cumulative, draws.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)


@with_kernel("softmax")
def drawn_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The token of each row that `sample` chooses by the row's `uniform` number, int64 [B], and its log-prob, FP32 [B].

    Of logits, FP32 [B, V], temperatures above 0, FP32 [B], seeds and places in sequences, int64 [B]. On a GPU
    exponentials are FP32: where the number is that near to the sum that ends a token, another one is chosen."""
    logprobs = log_softmax(logits / temperatures[:, None], 1.0)
    tokens = sample(logprobs, uniform(seeds, places))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


def greedy(logprobs: Tensor) -> Tensor:
    return logprobs.argmax(-1)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, of int64; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
