"""The output head over packed tokens: BF16 weights, FP32 logits, never those of all tokens at once.

On Hopper the product is DeepGEMM's BF16 GEMM with FP32 output, whose accumulation does not depend on how many rows
there are; engine and trainer call it alike. Normaliser and choice are torch's own `log_softmax`, row by row, which the
aligned model calls as well: vLLM's own sampler sums in another order. On a CPU both are the exact forms of
`numerics.logprobs`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8core.numerics import logprobs
from fp8core.numerics.gemm import align_rows, aligned_gemm, alignment_bits
from fp8core.numerics.hopper_gemm import deep_gemm, fp32_product
from fp8core.numerics.kernel_choice import has_kernels

_CHUNK_ELEMENTS = 1 << 27


class HeadOptions(NamedTuple):
    """`output` is the format of the logits, FP32 or BF16; `temperature` divides them."""

    output: torch.dtype
    temperature: float


def head_logits(hidden: Tensor, weight: Tensor, output: torch.dtype = torch.float32) -> Tensor:
    """Logits.

    Args:
        hidden: BF16 [tokens, hidden].
        weight: BF16 [vocabulary, hidden].
        output: float32, or bfloat16, to which logits are rounded.

    Returns:
        FP32 [tokens, vocabulary], values of `output`.
    """
    if not has_kernels(hidden):
        aligned = align_rows(weight.double(), alignment_bits(weight.shape[1]))
        return aligned_gemm(hidden, aligned).to(output).float()
    if (library := deep_gemm()) is None:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32).to(output).float()
    logits = torch.empty(hidden.shape[0], weight.shape[0], device=hidden.device)
    library.bf16_gemm_nt(hidden, weight, logits)
    return logits.to(output).float()


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the tempered distribution, row by row; FP32 on a GPU, FP64 on a CPU."""
    if not has_kernels(logits):
        return logprobs.log_softmax(logits, temperature)
    return torch.log_softmax(logits / temperature, dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, master: Tensor | None, weight: Tensor, targets: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.options = options
        chosen, entropies = [], []
        for part in _chunks(len(targets), len(weight)):
            logp = log_softmax(head_logits(hidden[part], weight, options.output), options.temperature)
            chosen.append(logp.gather(-1, targets[part, None]).squeeze(-1).float())
            entropies.append(-(logp.exp() * logp).sum(-1).float())
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(chosen), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(targets), len(weight)):
            logits = head_logits(hidden[part], weight, ctx.options.output)
            slope = log_softmax(logits, ctx.options.temperature).exp_()
            slope[torch.arange(len(slope), device=slope.device), targets[part]] -= 1
            slope = slope.mul_(-grad[part, None] / ctx.options.temperature).to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                grad_weight += fp32_product(slope.t(), hidden[part])
        return grad_hidden, grad_weight, None, None, None


def token_logprobs(
    hidden: Tensor, master: Tensor | None, weight: Tensor, targets: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        hidden: BF16 [tokens, hidden], after the final norm.
        master: FP32 [vocabulary, hidden] that receives the gradient, or None.
        weight: BF16 [vocabulary, hidden], what is multiplied with.
        targets: int64 [tokens].
        options: format and temperature.

    Returns:
        log-probs FP32 [tokens] (nats, differentiable) and entropies FP32 [tokens] (nats, not differentiable).
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, master, weight, targets, options)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)] or [slice(0, 0)]
