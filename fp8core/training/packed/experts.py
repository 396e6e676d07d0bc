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
from fp8core.models.experts import gate_weights, router_logits, top_k
from fp8core.numerics.elementwise import KERNELS
from fp8core.numerics.fused import add_norm
from fp8core.numerics.grouped import GROUP_MULTIPLE, ExpertRows, Operand, grouped_product, weighted_sum
from fp8core.numerics.logprobs import HeadWeight, load_head
from fp8core.training.packed.blocks import Blocks, BlockWeight
from fp8core.training.packed.layer import Keep, LayerActivations, PackedLayer
from fp8core.training.packed.masters import Stack

_EXPERT_LINEARS = ("gate_up", "down")


class Route(NamedTuple):
    """`logits`: FP32 [tokens, experts], rounded; `experts`: int64 [tokens, k], ascending."""

    logits: Tensor
    experts: Tensor
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
        self._router: HeadWeight | None = None
        self._expert_weights: dict[str, list[BlockWeight]] = {}

    def made(self, own: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> dict[str, tuple[Tensor, ...]]:
        return super().made(own, parts) | {"router": (own["router"].bfloat16(),)}

    def cache(self, stacks: Mapping[str, Sequence[Tensor]]) -> None:
        super().cache({name: each for name, each in stacks.items() if name not in _EXPERT_LINEARS})
        self._router = load_head(stacks["router"][0])
        count = self._experts.count
        for name in _EXPERT_LINEARS:
            of_each = zip(*(each.chunk(count) for each in stacks[name]), strict=True)
            filling = self._fillings.get(name)
            self._expert_weights[name] = [self._blocks.ready(each, filling) for each in of_each]

    def drop_weights(self) -> None:
        super().drop_weights()
        self._router = None
        self._expert_weights = {}

    def _mlp(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        blocks = self._blocks
        total, normed, _inverse = add_norm(x, delta, *self._norm("post_norm"))
        route = self._route(normed)
        inner = self._product("gate_up", route.rows.gathered_operand(blocks.operand(normed)), route.rows)
        return total, self._mixed(self._product("down", blocks.activated(inner), route.rows), route)

    def _kept_mlp(self, x: Tensor, delta: Tensor | None) -> tuple[ExpertActivations, Tensor, Tensor]:
        blocks = self._blocks
        total, normed, inverse = add_norm(x, delta, *self._norm("post_norm"))
        route = self._route(normed)
        operand, kept = blocks.kept_operand(route.rows.gathered(normed))
        inner = self._product("gate_up", operand, route.rows)
        operand, kept_inner = blocks.kept_activated(inner)
        outputs = self._product("down", operand, route.rows)
        activations = ExpertActivations(inverse, normed, route, kept, inner, kept_inner, outputs)
        return activations, total, self._mixed(outputs, route)

    def _mlp_backward(self, grad: Tensor, total: Tensor, activations: LayerActivations) -> tuple[Tensor, Tensor]:
        second: ExpertActivations = activations.second or self._kept_mlp(total, None)[0]
        activations.second = None
        blocks, rows = self._blocks, second.route.rows
        of_outputs, of_logits = self._mix_gradients(grad, second)
        of_rows = self._collect_experts("down", blocks.gradients, rows, second.kept_inner, of_outputs)
        of_rows = self._collect_experts("gate_up", blocks.inner_gradients, rows, second.kept, of_rows, second.inner)
        self._add_gradient("router", of_logits.t() @ second.normed.float())
        of_normed = of_rows[rows.places].float().sum(1) + of_logits @ self._ready_router().values
        return of_normed.bfloat16(), second.inverse

    def _route(self, normed: Tensor) -> Route:
        logits = KERNELS.routed(router_logits(normed.float(), self._ready_router()))
        experts = top_k(logits, self._experts.per_token)
        return Route(logits, experts, ExpertRows.of(experts, self._experts.count, GROUP_MULTIPLE))

    def _ready_router(self) -> HeadWeight:
        assert self._router is not None, "the weights were not made ready"
        return self._router

    def _product(self, name: str, operand: Operand, rows: ExpertRows) -> Tensor:
        return grouped_product(self._blocks.product, rows.parts(operand), self._expert_weights[name], rows.counts)

    def _mixed(self, outputs: Tensor, route: Route) -> Tensor:
        return self._sum(outputs, route.logits, route).bfloat16()

    def _sum(self, outputs: Tensor, logits: Tensor, route: Route) -> Tensor:
        gates = KERNELS.gates(gate_weights(logits, route.experts, self._experts.normalise_top_k))
        return weighted_sum(outputs[route.rows.places], gates)

    def _mix_gradients(self, grad: Tensor, second: ExpertActivations) -> tuple[Tensor, Tensor]:
        """Of the experts' results, BF16 [rows, hidden], and of the logits, FP32 [tokens, experts]."""
        leaves = second.outputs.float().requires_grad_(), second.route.logits.detach().requires_grad_()
        with torch.enable_grad():
            mixed = self._sum(*leaves, second.route)
        of_outputs, of_logits = torch.autograd.grad(mixed, leaves, grad.double())
        return of_outputs.bfloat16(), of_logits

    def _collect_experts(
        self,
        name: str,
        gradients: Callable[..., tuple[Tensor, Tensor]],
        rows: ExpertRows,
        saved_operand: Operand,
        *by_row: Tensor,
    ) -> Tensor:
        """As `_collect`, of each expert's rows with its weight."""
        parameter: nn.Parameter = getattr(self, name)
        total = torch.zeros(parameter.shape, device=parameter.device) if parameter.grad is None else parameter.grad
        weights = self._expert_weights[name]
        saved = rows.column_parts(saved_operand)
        by_expert = zip(*(each.split(rows.counts) for each in by_row), strict=True)
        grads = [
            gradients(*own, kept, weight, of_weight)[0]
            for own, kept, weight, of_weight in zip(by_expert, saved, weights, total.chunk(len(weights)), strict=True)
            if len(own[0])
        ]
        parameter.grad = self._keep(f"layers.{self.index}.{name}", total)
        return torch.cat(grads)

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        parameter: nn.Parameter = getattr(self, name)
        total = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        parameter.grad = self._keep(f"layers.{self.index}.{name}", total)
