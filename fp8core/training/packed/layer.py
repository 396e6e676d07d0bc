"""A layer of the packed decoder: attention and an MLP, forward and backward.

Its parameters are q, k and v stacked, gate and up stacked. They only collect gradients; passes multiply with what was
made of the masters (`cache`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.models.architecture import Architecture, with_whole_tiles
from fp8core.models.router_losses import RouterLosses
from fp8core.numerics.fused import HeadLayout, Heads, add_norm_backward, heads_of, norm_rotate, norm_rotate_backward
from fp8core.numerics.grouped import Operand
from fp8core.numerics.kv_scales import LayerScales, Scales
from fp8core.numerics.packed import (
    AttentionOutput,
    AttentionPack,
    PackedAttention,
    packed_attention,
    packed_attention_backward,
)
from fp8core.training.packed.blocks import Blocks, BlockWeight, Norm, TilePadding
from fp8core.training.packed.masters import Stack, layer_stacks

Observer = Callable[[int, Heads], None]
Keep = Callable[[str, Tensor], Tensor | None]
"""From a linear's name in the decoder and its gradient to what the collector keeps of it (`Masters.kept`)."""
LINEARS = ("qkv", "output", "gate_up", "down")
_HEAD_NORMS = ("q_norm", "k_norm")
_VECTORS = ("input_norm", "qkv_bias", "post_norm", *_HEAD_NORMS)


@dataclass(frozen=True)
class LayerContext:
    """`cos`, `sin`: FP32 [positions, head_dim / 2] of BF16 values. `observe`: called per layer with q, k and v as they
    are cached, not again where a layer is computed again."""

    pack: AttentionPack
    attention: PackedAttention
    cos: Tensor
    sin: Tensor
    scales: Scales
    observe: Observer | None
    losses: RouterLosses | None = None

    def scales_of(self, layer: int) -> LayerScales | None:
        return self.scales[layer] if self.scales else None


class PackedLayer(nn.Module):
    def __init__(
        self,
        arch: Architecture,
        index: int,
        blocks: Blocks,
        stacks: Mapping[str, Stack],
        device: torch.device,
        keep: Keep,
    ) -> None:
        super().__init__()
        self.index = index
        self._blocks = blocks
        self._eps = arch.rms_norm_eps
        self._keep = keep
        tile_arch = with_whole_tiles(arch) if blocks.name == "fp8_block" else arch
        self._layout = HeadLayout(tile_arch.num_heads, tile_arch.num_kv_heads, tile_arch.head_dim)
        for name, stack in stacks.items():
            self.register_parameter(name, collector(device, stack.shape))
        self._fillings = {} if tile_arch == arch else _fillings(stacks, layer_stacks(tile_arch, index))
        self._weights: dict[str, BlockWeight] = {}
        self._values: dict[str, Tensor] = {}

    def made(self, own: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> dict[str, tuple[Tensor, ...]]:
        """Operands and vectors from own rows of the masters, so many of each part, by name."""
        linears = {name: self._blocks.made(own[name], parts[name]) for name in LINEARS}
        return linears | {name: (to_bf16(own[name]),) for name in _VECTORS if name in own}

    def cache(self, stacks: Mapping[str, Sequence[Tensor]]) -> None:
        self._weights = {
            name: self._blocks.ready(stacks[name], self._fillings.get(name)) for name in LINEARS if name in stacks
        }
        self._values = {name: stacks[name][0] for name in _VECTORS if name in stacks}
        if (filling := self._fillings.get("qkv_bias")) is not None:
            self._values["qkv_bias"] = filling.fill(self._values["qkv_bias"])

    def drop_weights(self) -> None:
        self._weights = {}
        self._values = {}

    def forward(
        self, x: Tensor, delta: Tensor | None, context: LayerContext, activations: "LayerActivations | None" = None
    ) -> tuple[Tensor, Tensor]:
        """The stream before the layer's second half, and what that adds to it; each BF16 [tokens, hidden].
        `activations` keeps only the minimum."""
        blocks = self._blocks
        weights = self._weights
        assert weights, "the weights were not made ready"
        total, operand = blocks.normed(x, delta, self._norm("input_norm"))
        attended = self._attended(
            self._rotated(self._biased(blocks.product(operand, weights["qkv"])), context), context
        )
        if activations is not None:
            activations.total = total
            activations.attended = attended
        return self._mlp(total, blocks.product(blocks.operand(attended.out), weights["output"]))

    def kept_forward(
        self, x: Tensor, delta: Tensor | None, context: LayerContext, activations: "LayerActivations"
    ) -> tuple[Tensor, Tensor]:
        blocks = self._blocks
        weights = self._weights
        assert weights, "the weights were not made ready"
        activations.first = first = self._first_half(x, delta, context)
        activations.total = first.total
        activations.attended = self._attended(first.rotated, context)
        operand, activations.output = blocks.kept_operand(activations.attended.out)
        activations.second, total, more = self._kept_mlp(first.total, blocks.product(operand, weights["output"]))
        return total, more

    def backward(
        self,
        grad_total: Tensor | None,
        grad_delta: Tensor,
        total: Tensor,
        context: LayerContext,
        activations: "LayerActivations",
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of the stream that entered, and of the vectors by name; those of linears are collected here.

        `total`: the first result of the pass. `activations`: what it kept, which is given up; the
        rest is computed again."""
        blocks = self._blocks
        vectors = dict[str, Tensor]()
        grad, inverse = self._mlp_backward(grad_delta, total, activations, context.losses)
        post_norm = self._values["post_norm"]
        grad_total, vectors["post_norm"] = add_norm_backward(grad, grad_total, total, post_norm, inverse)

        output = blocks.kept_operand(activations.attended.out)[1] if activations.output is None else activations.output
        grad = self._collect("output", blocks.gradients, grad_total, output)
        first = self._first_half(activations.total, None, context) if activations.first is None else activations.first
        attention = self._layout, context.pack, context.attention, context.scales_of(self.index)
        grad = packed_attention_backward(grad, first.rotated, activations.attended.for_backward, *attention)
        grad, *of_norms = norm_rotate_backward(grad, first.qkv, *self._rotation(context))
        vectors |= {name: each for name, each in zip(_HEAD_NORMS, of_norms, strict=True) if each is not None}
        if "qkv_bias" in self._values:
            of_bias = grad.sum(0, dtype=torch.float32)
            filling = self._fillings.get("qkv_bias")
            vectors["qkv_bias"] = of_bias if filling is None else filling.cut(of_bias)
        grad = self._collect("qkv", blocks.gradients, grad, first.kept)
        input_norm = self._values["input_norm"]
        grad, vectors["input_norm"] = add_norm_backward(grad, grad_total, activations.total, input_norm, first.inverse)
        return grad, vectors

    def _collect(self, name: str, gradients: Callable[..., tuple[Tensor, Tensor]], *arguments: Any) -> Tensor:
        """The gradient of a product's input. Its weight's is added to what packs before this one left: autograd would
        read both and write a third time."""
        parameter: nn.Parameter = getattr(self, name)
        grad, of_weight = gradients(*arguments, self._weights[name], parameter.grad)
        parameter.grad = self._keep(f"layers.{self.index}.{name}", of_weight)
        return grad

    def _first_half(self, x: Tensor, delta: Tensor | None, context: LayerContext) -> "FirstHalf":
        total, inverse, operand, kept = self._blocks.kept_normed(x, delta, self._norm("input_norm"))
        qkv = self._biased(self._blocks.product(operand, self._weights["qkv"]))
        return FirstHalf(total, inverse, kept, qkv, self._rotated(qkv, context))

    def _mlp(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with `delta`, and what the layer's second half adds to it."""
        blocks = self._blocks
        total, operand = blocks.normed(x, delta, self._norm("post_norm"))
        inner = blocks.product(operand, self._weights["gate_up"])
        return total, blocks.product(blocks.activated(inner), self._weights["down"])

    def _kept_mlp(self, x: Tensor, delta: Tensor) -> tuple[Any, Tensor, Tensor]:
        """For `_mlp_backward`, and the results of `_mlp`."""
        second, total, operand = self._second_half(x, delta)
        return second, total, self._blocks.product(operand, self._weights["down"])

    def _mlp_backward(
        self, grad: Tensor, total: Tensor, activations: "LayerActivations", losses: RouterLosses | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the second norm's result, BF16, and its 1 / rms; those of linears are collected here."""
        blocks = self._blocks
        second = self._second_half(total, None)[0] if activations.second is None else activations.second
        activations.second = None
        grad = self._collect("down", blocks.gradients, grad, second.kept_inner)
        return self._collect("gate_up", blocks.inner_gradients, grad, second.inner, second.kept), second.inverse

    def _second_half(self, x: Tensor, delta: Tensor | None) -> tuple["SecondHalf", Tensor, Operand]:
        total, inverse, operand, kept = self._blocks.kept_normed(x, delta, self._norm("post_norm"))
        inner = self._blocks.product(operand, self._weights["gate_up"])
        operand, kept_inner = self._blocks.kept_activated(inner)
        return SecondHalf(inverse, kept, inner, kept_inner), total, operand

    def _norm(self, name: str) -> Norm:
        return Norm(self._values[name], self._eps)

    def _biased(self, qkv: Tensor) -> Tensor:
        """The rounding of `models.decoder.Decoder.fused_qkv`: torch adds BF16 values in FP32 and rounds once."""
        return qkv + self._values["qkv_bias"].bfloat16() if "qkv_bias" in self._values else qkv

    def _rotated(self, qkv: Tensor, context: LayerContext) -> Tensor:
        return norm_rotate(qkv, *self._rotation(context))

    def _rotation(self, context: LayerContext) -> tuple[Any, ...]:
        q_norm, k_norm = (self._values.get(name) for name in _HEAD_NORMS)
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        return norms, context.cos, context.sin, context.pack.positions, self._layout, self._eps

    def _attended(self, rotated: Tensor, context: LayerContext) -> AttentionOutput:
        if context.observe is not None:
            context.observe(self.index, heads_of(rotated, self._layout))
        return packed_attention(rotated, self._layout, context.pack, context.attention, context.scales_of(self.index))


def _fillings(stacks: Mapping[str, Stack], tile_stacks: Mapping[str, Stack]) -> dict[str, TilePadding]:
    paddings = dict[str, TilePadding]()
    for name in (*LINEARS, "qkv_bias"):
        if name in stacks and stacks[name] != tile_stacks[name]:
            parts, rooms = (tuple(rows for _, rows in each[name].parts) for each in (stacks, tile_stacks))
            columns, width = (math.prod(each[name].width) for each in (stacks, tile_stacks))
            paddings[name] = TilePadding(parts, rooms, columns, width)
    return paddings


class FirstHalf(NamedTuple):
    """Up to attention: qkv before norms and rotation, and after."""

    total: Tensor
    inverse: Tensor
    kept: Operand
    qkv: Tensor
    rotated: Tensor


class SecondHalf(NamedTuple):
    """After attention: gate and up, and what is kept of the operands of both products."""

    inverse: Tensor
    kept: Operand
    inner: Tensor
    kept_inner: Operand


@dataclass
class LayerActivations:
    """One layer's values from a pass until its backward.

    Always kept are the stream before its attention (`total`) and the attention's result, which is small and costs much.
    The others are None where the backward computes them again."""

    total: Tensor = field(init=False)
    attended: AttentionOutput = field(init=False)
    first: FirstHalf | None = None
    output: Operand | None = None
    second: Any = None


def to_bf16(vector: Tensor) -> Tensor:
    return vector.bfloat16().float()


def collector(device: torch.device, shape: Sequence[int]) -> nn.Parameter:
    """A parameter that only collects gradients: a single number in memory."""
    return nn.Parameter(torch.zeros((), device=device).expand(*shape))
