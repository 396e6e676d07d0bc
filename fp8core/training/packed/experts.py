"""A packed layer whose MLP is a router and experts: `models.experts` with the blocks of this trainer.

Router and choice are those of `models.experts`: exact FP32 logits, rounded by `KERNELS`; of equal logits the lower
index wins. Without gradients operands are quantised by row before tokens go to their experts. With them one read of an
expert's rows gives the same codes, and those by column for wgrad. Its own tokens make their groups of 128, and zeros.

    dY_e = g_e dy                          BF16
    dg_e = <dy, Y_e>, on to z              FP32, with W_router's gradient dz^T x
    dx   = sum_e dX_e + dz W_router        FP32, rounded once to BF16

An expert without tokens has a gradient of zero. The stacks hold experts one above the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8core.models.architecture import Architecture
from fp8core.models.router_losses import RouterLosses
from fp8core.numerics.elementwise import KERNELS
from fp8core.numerics.fused import add_norm
from fp8core.numerics.grouped import (
    GROUP_MULTIPLE,
    ExpertRows,
    Operand,
    choose_experts,
    expert_rows,
    forward_multiple,
    gate_gradient,
    mix_backward,
    mixed,
    token_sums,
)
from fp8core.numerics.packed import head_logits
from fp8core.training.packed.blocks import Blocks
from fp8core.training.packed.layer import Keep, LayerActivations, PackedLayer
from fp8core.training.packed.masters import Stack

_EXPERT_LINEARS = ("gate_up", "down")


class Route(NamedTuple):
    """`logits`: FP32 [tokens, experts], rounded; `experts`: int64 [tokens, k], ascending; `gates`: FP32 likewise."""

    logits: Tensor
    experts: Tensor
    gates: Tensor
    rows: ExpertRows


class ExpertActivations(NamedTuple):
    """`normed`: BF16 [tokens, hidden]. By row of an expert: operands kept for wgrad, gate and up, and the results."""

    inverse: Tensor
    normed: Tensor
    route: Route
    kept: Operand
    inner: Tensor
    kept_inner: Operand
    outputs: Tensor


class SparseLayer(PackedLayer):
    def __init__(
        self,
        arch: Architecture,
        index: int,
        blocks: Blocks,
        stacks: Mapping[str, Stack],
        device: torch.device,
        keep: Keep,
    ) -> None:
        super().__init__(arch, index, blocks, stacks, device, keep)
        assert arch.experts is not None, "a dense layer"
        self._experts = arch.experts
        for name in _EXPERT_LINEARS:
            if (filling := self._fillings.get(name)) is not None:
                of_one = len(filling.parts) // self._experts.count
                parts, rooms = filling.parts[:of_one], filling.rooms[:of_one]
                self._fillings[name] = filling._replace(parts=parts, rooms=rooms)

    def made(self, own: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> dict[str, tuple[Tensor, ...]]:
        return super().made(own, parts) | {"router": (own["router"].bfloat16(),)}

    def cache(self, stacks: Mapping[str, Sequence[Tensor]]) -> None:
        super().cache({name: each for name, each in stacks.items() if name not in _EXPERT_LINEARS})
        self._values["router"] = stacks["router"][0]
        for name in _EXPERT_LINEARS:
            filling = self._fillings.get(name)
            self._weights[name] = self._blocks.ready_experts(stacks[name], filling, self._experts.count)

    def _mlp(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        blocks, weights = self._blocks, self._weights
        total, normed, _inverse = add_norm(x, delta, *self._norm("post_norm"))
        slots = len(normed) * self._experts.per_token
        route = self._route(normed, forward_multiple(slots, self._experts.count))
        rows = route.rows
        inner = blocks.expert_product(blocks.expert_operand(normed, rows), weights["gate_up"], rows)
        outputs = blocks.expert_product(blocks.expert_activated(inner, rows), weights["down"], rows)
        return total, mixed(outputs, rows, route.gates)

    def _kept_mlp(self, x: Tensor, delta: Tensor | None) -> tuple[ExpertActivations, Tensor, Tensor]:
        blocks, weights = self._blocks, self._weights
        total, normed, inverse = add_norm(x, delta, *self._norm("post_norm"))
        route = self._route(normed, GROUP_MULTIPLE)
        rows = route.rows
        operand, kept = blocks.kept_expert_operand(normed, rows)
        inner = blocks.expert_product(operand, weights["gate_up"], rows)
        operand, kept_inner = blocks.kept_expert_activated(inner, rows)
        outputs = blocks.expert_product(operand, weights["down"], rows)
        activations = ExpertActivations(inverse, normed, route, kept, inner, kept_inner, outputs)
        return activations, total, mixed(outputs, rows, route.gates)

    def _mlp_backward(
        self, grad: Tensor, total: Tensor, activations: LayerActivations, losses: RouterLosses | None
    ) -> tuple[Tensor, Tensor]:
        second: ExpertActivations = activations.second or self._kept_mlp(total, None)[0]
        activations.second = None
        blocks, route, rows = self._blocks, second.route, second.route.rows
        of_outputs, of_gates = mix_backward(grad, second.outputs, rows, route.gates)
        of_logits = gate_gradient(of_gates, route.logits, route.experts, route.gates, self._experts.normalise_top_k)
        if losses is not None:
            of_logits = of_logits + losses.gradient(route.logits, route.experts)
        of_rows = self._collect_experts("down", blocks.expert_gradients, rows, of_outputs, second.kept_inner)
        gradients = blocks.inner_expert_gradients
        of_rows = self._collect_experts("gate_up", gradients, rows, of_rows, second.inner, second.kept)
        self._add_gradient("router", of_logits.t() @ second.normed.float())
        of_normed = torch.addmm(token_sums(of_rows, rows), of_logits, self._values["router"].float())
        return of_normed.bfloat16(), second.inverse

    def _route(self, normed: Tensor, multiple: int) -> Route:
        experts = self._experts
        logits = KERNELS.routed(head_logits(normed, self._values["router"]))
        chosen, gates = choose_experts(logits, experts.per_token, experts.normalise_top_k)
        return Route(logits, chosen, gates, expert_rows(chosen, experts.count, multiple))

    def _collect_experts(
        self, name: str, gradients: Callable[..., Tensor], rows: ExpertRows, *arguments: Tensor | Operand
    ) -> Tensor:
        """As `_collect`."""
        parameter: nn.Parameter = getattr(self, name)
        total = torch.zeros(parameter.shape, device=parameter.device) if parameter.grad is None else parameter.grad
        by_expert = total.view(self._experts.count, -1, parameter.shape[-1])
        grad = gradients(*arguments, self._weights[name], rows, by_expert)
        parameter.grad = self._keep(f"layers.{self.index}.{name}", total)
        return grad

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        parameter: nn.Parameter = getattr(self, name)
        total = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        parameter.grad = self._keep(f"layers.{self.index}.{name}", total)
