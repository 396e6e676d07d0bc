"""Logits and log-probabilities that do not depend on the batch they are computed in.

The head multiplies BF16 hidden states by BF16 weights on fixed-point grids (`numerics.gemm.align_rows`), so FP32
logits are equal for any batch; the normaliser is a sum of fixed-point numbers. Temperature divides the logits, as in
the engine that samples.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8core.numerics.gemm import align_rows, aligned_gemm, alignment_bits
from fp8core.numerics.rounding import to_fixed_point

_SUM_BITS = 34
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class HeadWeight:
    """The output head, ready to multiply.

    Attributes:
        values: FP32 [vocabulary, hidden].
        aligned: FP64 [vocabulary, hidden] on fixed-point grids.
        master: FP32 parameter that receives the gradient, or None in inference.
    """

    values: Tensor
    aligned: Tensor
    master: Tensor | None


class HeadFormat(Protocol):
    """How the head multiplies."""

    name: str

    def logits(self, hidden: Tensor, head: HeadWeight) -> Tensor:
        """FP32 [tokens, vocabulary]."""
        ...


def load_head(values: Tensor, master: Tensor | None = None) -> HeadWeight:
    """Make a head ready; `values` is [vocabulary, hidden] of any float type."""
    full = values.float()
    return HeadWeight(full, align_rows(full.double(), alignment_bits(full.shape[1])), master)


class Fp32Head:
    """BF16 weights, FP32 output."""

    name = "fp32"

    def logits(self, hidden: Tensor, head: HeadWeight) -> Tensor:
        return aligned_gemm(hidden, head.aligned).float()


class Bf16Head:
    """BF16 weights, BF16 output (held in FP32)."""

    name = "bf16"

    def logits(self, hidden: Tensor, head: HeadWeight) -> Tensor:
        return aligned_gemm(hidden, head.aligned).to(torch.bfloat16).float()


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """FP64 log-probabilities of the tempered distribution, [tokens, vocabulary], within vocabulary * 2^-35 of exact."""
    scaled = logits.double() / temperature
    shifted = scaled - scaled.amax(-1, keepdim=True)
    return shifted - to_fixed_point(shifted.exp(), _SUM_BITS).sum(-1, keepdim=True).log()


class _TokenLogprobs(torch.autograd.Function):
    """Chunked over tokens: neither pass ever holds the logits of all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor | None,
        head: HeadWeight,
        form: HeadFormat,
        targets: Tensor,
        temp: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, targets)
        ctx.head, ctx.form, ctx.temperature = head, form, temp
        chosen, entropies = [], []
        for part in _chunks(hidden.shape[0], head.values.shape[0]):
            logp = log_softmax(form.logits(hidden[part], head), temp)
            chosen.append(logp.gather(-1, targets[part, None]).squeeze(-1).float())
            entropies.append(-(logp.exp() * logp).sum(-1).float())
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(chosen), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(ctx.head.values) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden.shape[0], ctx.head.values.shape[0]):
            p = log_softmax(ctx.form.logits(hidden[part], ctx.head), ctx.temperature).exp_()
            p[torch.arange(p.shape[0]), targets[part]] -= 1
            grad_logits = (p * (-grad[part, None].double() / ctx.temperature)).float()
            grad_hidden[part] = grad_logits @ ctx.head.values
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, grad_weight, None, None, None, None


def token_logprobs(
    hidden: Tensor, head: HeadWeight, form: HeadFormat, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        hidden: FP32 [tokens, hidden], after the final norm.
        head: ready head; gradients reach `head.master`.
        form: head format.
        targets: int64 [tokens].
        temperature: positive.

    Returns:
        log-probs FP32 [tokens] (nats, differentiable) and entropies FP32 [tokens] (nats, not differentiable).
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, head.master, head, form, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)] or [slice(0, 0)]
