"""Log-probabilities of the written tokens from a head that is cut over the vocabulary, without all logits at once.

Each GPU of a tensor-parallel group multiplies its rows of the head; the largest logit, the sum of exponentials and the
chosen logit are exchanged. Temperature divides the logits, as in `numerics.logprobs`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from fp8core.config.precision import HeadFormat
from fp8core.numerics.logprobs import ChunkedHead, chunked_logprobs


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


class _ShardedHead(ChunkedHead):
    """One GPU's rows; the gradient of the hidden states is summed over the group in FP32."""

    partial_dtype = torch.float32

    def __init__(self, weight: Tensor, share: VocabularyShare, temperature: float) -> None:
        super().__init__(weight, temperature)
        self._share = share

    def logprobs(self, hidden: Tensor) -> Tensor:
        """FP32 [tokens, rows], -inf in the rows of padding."""
        share, transposed = self._share, self.weight.t()
        logits = (hidden @ transposed).float() if share.form == "bf16" else _fp32_product(hidden, transposed)
        logits[:, max(0, share.size - share.first) :] = -torch.inf
        logits.div_(self.temperature)
        top = logits.amax(-1, keepdim=True)
        all_reduce(top, ReduceOp.MAX, share.group)
        total = self.total((logits - top).exp_().sum(-1, keepdim=True))
        return logits.sub_(top + total.log())

    def chosen(self, logp: Tensor, targets: Tensor) -> Tensor:
        row, held = self._own(targets)
        return logp.gather(-1, row[:, None]).squeeze(-1).masked_fill(~held, 0.0)

    def entropy(self, logp: Tensor) -> Tensor:
        # p log p is 0 where p is, which the product of 0 and -inf is not.
        return -(logp.exp() * logp.clamp_min(-1e30)).sum(-1)

    def slope(
        self, logp: Tensor, targets: Tensor, entropy: Tensor, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> Tensor:
        flatter = None
        if grad_entropy is not None:
            # Of H by the logits, -p (log p + H); p log p is 0 where p is, as in the forward.
            above = logp.clamp_min(-1e30).add_(entropy[:, None])
            flatter = above.mul_(logp.exp()).mul_(-grad_entropy[:, None])
        p = logp.exp_()
        row, held = self._own(targets)
        p.scatter_add_(1, row[:, None], -held.float()[:, None])
        p.mul_(0.0 if grad is None else -grad[:, None] / self.temperature)
        if flatter is not None:
            p.add_(flatter, alpha=1 / self.temperature)
        return p.to(self.weight.dtype)

    def hidden_gradient(self, slope: Tensor) -> Tensor:
        return _fp32_product(slope, self.weight)

    def weight_gradient(self, slope: Tensor, hidden: Tensor) -> Tensor:
        return _fp32_product(slope.t(), hidden)

    def total(self, x: Tensor) -> Tensor:
        all_reduce(x, ReduceOp.SUM, self._share.group)
        return x

    def returned(self, grad_weight: Tensor) -> Tensor:
        """Add the gradient to the FP32 buffer that Megatron keeps, unrounded, and return what autograd is to see.

        The protocol is that of Megatron's own linear layers (`tensor_parallel/layers.py`).
        """
        buffer: Tensor | None = getattr(self.weight, "main_grad", None)
        if buffer is None:
            return grad_weight.to(self.weight.dtype)
        buffer.add_(grad_weight)
        setattr(self.weight, "grad_added_to_main_grad", True)  # noqa: B010 - Tensor declares no such attribute
        return torch.zeros_like(self.weight)

    def _own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each target, 0 where another GPU holds it, and bool: whether this one does."""
        local, rows = targets - self._share.first, len(self.weight)
        return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """FP32 sums of products of one format; on a CPU those of BF16 are rounded once more."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype == torch.bfloat16 else (a @ b).float()


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
        log-probs and entropies FP32 [tokens], in nats, both differentiable.
    """
    return chunked_logprobs(hidden, weight, _ShardedHead(weight, share, temperature), targets)
