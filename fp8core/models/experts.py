"""The feed-forward part of a layer: one SwiGLU block, or a router and its experts (Qwen3-MoE, arXiv 2505.09388).

For a token x and experts E_e(x) = W_down (silu(W_gate x) * W_up x):

    z_e = <x, r_e>                                  router logits, FP32 from BF16 operands
    S   = the k experts with the largest z_e        of equal logits the lower index
    g_e = exp(z_e) / sum_{j in N} exp(z_j)          N = S with `normalise_top_k`, else all experts; FP32
    y   = sum_{e in S, ascending} g_e E_e(x)        in FP64, rounded once

Where vLLM rounds z to BF16, and on a CPU g as well, so does the reference (`RoundingPoints`).

Nothing here depends on the other tokens of a call. Router logits are exact sums on fixed-point grids, like those of
the head; the sum of exponentials is one of fixed-point numbers. An expert multiplies only its own tokens, each row by
itself. The experts of a token are added in ascending order, however the tokens were grouped. The choice is not
differentiable; gradients reach the router through g. An expert without tokens gets no gradient.

Router replay: the rollout's choice can be recorded (`RecordedRouting`) and forced on the trainer (`ReplayedRouting`).
The trainer then computes z and g by itself (rollout routing replay, arXiv 2510.11370).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8core.models.router_losses import RouterLosses, with_gradient
from fp8core.numerics.elementwise import Rounding, RoundingPoints, swiglu
from fp8core.numerics.gemm import aligned_gemm
from fp8core.numerics.grouped import expert_rows, gate_weights, gathered, grouped_product, top_k, weighted_sum
from fp8core.numerics.linear import LinearFormat, LinearWeight
from fp8core.numerics.logprobs import HeadWeight

# Marks positions of a replay at which the router chooses by itself.
NO_ROUTE = -1


@dataclass(frozen=True)
class MlpWeights:
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True)
class ExpertWeights:
    """A router and its experts, ready to compute.

    Attributes:
        router: [experts, hidden], kept like the output head: BF16 values, exact FP32 logits.
        normalise_top_k: whether the k gate weights of a token sum to 1.
    """

    router: HeadWeight
    experts: tuple[MlpWeights, ...]
    per_token: int
    normalise_top_k: bool


@dataclass(frozen=True)
class MlpFormats:
    linear: LinearFormat
    rounding: Rounding
    points: RoundingPoints


class Routing(Protocol):
    def choose(self, layer: int, logits: Tensor, k: int) -> Tensor:
        """Experts of each token, ascending: int64 [tokens, k]; `logits` are FP32 [tokens, experts], `layer` counts
        sparse ones."""


class TopKRouting:
    def choose(self, layer: int, logits: Tensor, k: int) -> Tensor:
        return top_k(logits, k)


@dataclass
class RecordedRouting:
    """The router itself, remembering what it chose in the call in progress."""

    _layers: list[Tensor] = field(default_factory=list)

    def choose(self, layer: int, logits: Tensor, k: int) -> Tensor:
        if layer == 0:
            self._layers = []
        assert len(self._layers) == layer, "sparse layers must be computed in order"
        experts = top_k(logits, k)
        self._layers.append(experts)
        return experts

    def recorded(self, batch: int) -> Tensor:
        """The choice of the last call: int64 [batch, T, sparse layers, k]."""
        experts = torch.stack(self._layers, dim=1)
        return experts.view(batch, -1, *experts.shape[1:])


@dataclass(frozen=True)
class ReplayedRouting:
    """A recorded choice, forced on the router.

    Attributes:
        experts: int16 [B, T, sparse layers, k], ascending; `NO_ROUTE` where the router chooses by itself.
    """

    experts: Tensor

    def choose(self, layer: int, logits: Tensor, k: int) -> Tensor:
        layer_experts = self.experts[:, :, layer].flatten(0, 1).long()
        assert layer_experts.shape == (logits.shape[0], k), (
            f"the replay is of another shape: {tuple(self.experts.shape)}"
        )
        assert int(layer_experts.max()) < logits.shape[1], "the replay names an expert that does not exist"
        return torch.where(layer_experts == NO_ROUTE, top_k(logits, k), layer_experts)


def feed_forward(
    x: Tensor,
    weights: MlpWeights | ExpertWeights,
    formats: MlpFormats,
    layer: int | None,
    routing: Routing,
    losses: RouterLosses | None = None,
) -> Tensor:
    """FP32 [tokens, hidden] to the same; `layer` is the index among the sparse layers, None of a dense one."""
    if isinstance(weights, MlpWeights):
        return mlp(x, weights, formats, formats.points.activated)
    assert layer is not None, "experts in a dense layer"
    logits = formats.points.routed(router_logits(x, weights.router))
    experts = routing.choose(layer, logits, weights.per_token)
    gates = formats.points.gates(gate_weights(logits, experts, weights.normalise_top_k))
    if losses is not None:
        gates = with_gradient(gates, logits, losses.gradient(logits, experts))
    return mix(x, weights.experts, formats, experts, gates)


def mlp(x: Tensor, weights: MlpWeights, formats: MlpFormats, activated: Rounding) -> Tensor:
    """SwiGLU block: FP32 [tokens, hidden] to the same; `activated` rounds silu(gate)."""
    gate, up = formats.linear(x, weights.gate_up).chunk(2, dim=-1)
    return formats.linear(swiglu(gate, up, formats.rounding, activated), weights.down)


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor | None, router: HeadWeight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.router = router
        return aligned_gemm(x, router.aligned).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return grad @ ctx.router.values, grad_weight, None


def router_logits(x: Tensor, router: HeadWeight) -> Tensor:
    """FP32 [tokens, hidden] to FP32 [tokens, experts], equal for any batch; gradients reach `router.master`."""
    logits: Tensor = _RouterLogits.apply(x, router.master, router)  # type: ignore[no-untyped-call]
    return logits


def mix(x: Tensor, experts: Sequence[MlpWeights], formats: MlpFormats, expert_ids: Tensor, gates: Tensor) -> Tensor:
    """Weighted sum of each token's experts, FP32 [tokens, hidden] like `x`.

    `expert_ids` (int64, ascending) and `gates` (FP32) are [tokens, k].
    """
    rows = expert_rows(expert_ids, len(experts), multiple=1)

    def product(part: Tensor, expert: MlpWeights) -> Tensor:
        return mlp(part, expert, formats, formats.points.expert_activated)

    outputs = grouped_product(product, gathered(x, rows).split(rows.counts), experts, rows.counts)
    return formats.rounding(weighted_sum(outputs[rows.places], gates))
