"""Log-probabilities of the written tokens from a head that is cut over the vocabulary, without all logits at once.

Each GPU of a tensor-parallel group multiplies its rows of the head; the largest logit, the sum of exponentials and the
chosen logit are exchanged. Temperature divides the logits, as in `numerics.logprobs`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from fp8core.config.precision import HeadFormat

_CHUNK_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class VocabularyShare:
    """This GPU's rows of the head.

    Attributes:
        first: token of the first row.
        size: tokens of the whole vocabulary; rows beyond it are padding.
        group: GPUs that hold the other rows.
        form: output of the product, FP32 or BF16.
    """

    first: int
    size: int
    group: ProcessGroup
    form: HeadFormat

    def logits(self, hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
        """FP32 [tokens, rows], -inf in the rows of padding."""
        if weight.dtype == torch.float32:
            product = hidden.float() @ weight.t()
        elif self.form == "bf16" or not weight.is_cuda:
            product = (hidden @ weight.t()).float()
        else:
            product = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        product[:, max(0, self.size - self.first) :] = -torch.inf
        return product.div_(temperature)

    def normalised(self, logits: Tensor) -> Tensor:
        """Log-probs FP32 of the same shape, changed in place."""
        top = logits.amax(-1, keepdim=True)
        all_reduce(top, ReduceOp.MAX, self.group)
        total = (logits - top).exp_().sum(-1, keepdim=True)
        all_reduce(total, ReduceOp.SUM, self.group)
        return logits.sub_(top + total.log())

    def own(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Row of each target, 0 where another GPU holds it, and bool: whether this one does."""
        local = targets - self.first
        held = (local >= 0) & (local < rows)
        return local.clamp(0, rows - 1), held


class _WrittenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, share: VocabularyShare, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.share, ctx.temperature = share, temperature
        chosen = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(chosen)
        for part in _chunks(len(targets), len(weight)):
            logp = share.normalised(share.logits(hidden[part], weight, temperature))
            row, held = share.own(targets[part], len(weight))
            chosen[part] = logp.gather(-1, row[:, None]).squeeze(-1).masked_fill(~held, 0.0)
            # p log p is 0 where p is, which the product of 0 and -inf is not.
            entropy[part] = -(logp.exp() * logp.clamp_min(-1e30)).sum(-1)
        all_reduce(chosen, ReduceOp.SUM, share.group)
        all_reduce(entropy, ReduceOp.SUM, share.group)
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        share: VocabularyShare = ctx.share
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(len(targets), len(weight)):
            p = share.normalised(share.logits(hidden[part], weight, ctx.temperature)).exp_()
            row, held = share.own(targets[part], len(weight))
            p.scatter_add_(1, row[:, None], -held.float()[:, None])
            grad_logits = p.mul_(-grad[part, None] / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = (grad_logits @ weight).float()
            grad_weight += (grad_logits.t() @ hidden[part].to(weight.dtype)).float()
        all_reduce(grad_hidden, ReduceOp.SUM, share.group)
        return grad_hidden.to(hidden.dtype), _handed_over(weight, grad_weight), None, None, None


def _handed_over(weight: Tensor, grad: Tensor) -> Tensor:
    """Add a gradient to the FP32 buffer that Megatron keeps, unrounded, and return what autograd is to see.

    The protocol is that of Megatron's own linear layers (`tensor_parallel/layers.py`).
    """
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None:
        return grad.to(weight.dtype)
    buffer.add_(grad)
    setattr(weight, "grad_added_to_main_grad", True)  # noqa: B010 - Tensor declares no such attribute
    return torch.zeros_like(weight)


def written_logprobs(
    hidden: Tensor, weight: Tensor, share: VocabularyShare, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        hidden: BF16 or FP32 [tokens, hidden], equal on every GPU of the group.
        weight: this GPU's rows of the head.
        share: which rows these are.
        targets: int64 [tokens].
        temperature: positive.

    Returns:
        log-probs FP32 [tokens] (nats, differentiable) and entropies FP32 [tokens] (nats, not differentiable).
    """
    logprobs, entropy = _WrittenLogprobs.apply(hidden, weight, share, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _chunks(tokens: int, rows: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // rows)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
