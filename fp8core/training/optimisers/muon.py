"""Muon: updates along the orthogonal matrix nearest to the momentum (Keller Jordan, github.com/KellerJordan/Muon).
Weight decay and the factor of the rate are those of Moonlight, arXiv 2502.16982, section 2.2.

    M = mu M + (1 - mu) G
    W = (1 - rate * decay) W - rate * 0.2 sqrt(max(rows, columns)) * newton_schulz(mu M + (1 - mu) G)

The factor gives an update the size that AdamW's has, so both take one learning rate. Matrices of layers learn so, each
tensor of the checkpoint by itself (q, k and v apart), and adapters. Embeddings, head, norms and biases have AdamW."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fp8core.config.training import OptimiserConfig
from fp8core.models.weights import layer_of
from fp8core.numerics.gemm import fp32_product, sliced_gemm
from fp8core.training.optimisers.adamw import adamw_rule
from fp8core.training.optimisers.optimiser import OptimiserEntry, Parameter, Update, UpdateRule

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class Muon(NamedTuple):
    """One moment. Only products and sums of two tensors: fused ones round differently where threads share them out."""

    momentum: float
    weight_decay: float
    moments: tuple[str, ...] = ("momentum",)

    def update(self, master: Tensor, gradient: Tensor, moments: Sequence[Tensor], update: Update) -> None:
        (moment,) = moments
        fresh = gradient * (update.gradient_factor * (1 - self.momentum))
        momentum = moment.float() * self.momentum + fresh
        moment.copy_(momentum)
        rate = update.learning_rate * 0.2 * max(master.shape) ** 0.5
        master.mul_(1 - update.learning_rate * self.weight_decay)
        master.sub_(newton_schulz(momentum * self.momentum + fresh) * rate)


def newton_schulz(matrix: Tensor) -> Tensor:
    """An FP32 matrix with its singular values, if not tiny, moved to between 0.7 and 1.2."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT.contiguous() if is_tall else matrix
    # Sums of rows, and then their sum: no thread has a part of a row.
    norm = x.double().square().sum(-1).sum().sqrt().clamp(min=_EPS)
    x = (x.double() / norm).float()
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = _product(x, x)
        polynomial = gram * cubic + _product(gram, gram) * quintic
        x = x * linear + _product(polynomial, x.mT)
    return x.mT if is_tall else x


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right^T`, FP32. The published code has BF16 for the speed of a GPU. On a CPU sums are exact, so bytes
    depend neither on threads nor on the order of a sum, and BF16 would save nothing."""
    if left.is_cuda:
        return fp32_product(left.bfloat16(), right.bfloat16().mT)
    return sliced_gemm(left, right).float()


def _rule(settings: OptimiserConfig, parameter: Parameter) -> UpdateRule:
    if layer_of(parameter.name) is None or len(parameter.shape) != 2:
        return adamw_rule(settings, parameter)
    return Muon(settings.momentum, settings.weight_decay)


OPTIMISER = OptimiserEntry(name="Muon", rule=_rule, whole_tensors=True)
