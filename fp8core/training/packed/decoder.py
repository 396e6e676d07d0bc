"""The dense decoder as modules over packed sequences.

Parameters are q, k and v stacked, gate and up stacked. They only collect gradients; their values are in
`masters.Masters`, and passes multiply with what was made of all rows (`cache_weights`)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.models.architecture import Architecture, with_whole_tiles
from fp8core.models.decoder import rotary_tables
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.fused import HeadLayout, Heads, add_norm_backward, heads_of, norm_rotate, norm_rotate_backward
from fp8core.numerics.kv_scales import LayerScales, Scales
from fp8core.numerics.packed import (
    AttentionOutput,
    AttentionPack,
    PackedAttention,
    packed_attention,
    packed_attention_backward,
)
from fp8core.training.packed.adapted import PackedMasters
from fp8core.training.packed.blocks import Blocks, BlockWeight, Norm, Operand, TilePadding, norm_only
from fp8core.training.packed.masters import Stack, layer_stacks, units_of

Observer = Callable[[int, Heads], None]
Keep = Callable[[str, Tensor], Tensor | None]
"""From a linear's name in the decoder and its gradient to what the collector keeps of it (`Masters.kept`)."""
_LINEARS = ("qkv", "output", "gate_up", "down")
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
        for name in _VECTORS + _LINEARS:
            stack = stacks.get(name)
            self.register_parameter(name, None if stack is None else _collector(device, stack.shape))
        self._fillings = {} if tile_arch == arch else _fillings(stacks, layer_stacks(tile_arch, index))
        self._weights: dict[str, BlockWeight] = {}
        self._values: dict[str, Tensor] = {}

    def made(self, own: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> dict[str, tuple[Tensor, ...]]:
        """Operands and vectors from own rows of the masters, so many of each part, by name."""
        linears = {name: self._blocks.made(own[name], parts[name]) for name in _LINEARS}
        return linears | {name: (_to_bf16(own[name]),) for name in _VECTORS if name in own}

    def cache(self, stacks: Mapping[str, Sequence[Tensor]]) -> None:
        self._weights = {name: self._blocks.ready(stacks[name], self._fillings.get(name)) for name in _LINEARS}
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
        delta = blocks.product(blocks.operand(attended.out), weights["output"])
        total, operand = blocks.normed(total, delta, self._norm("post_norm"))
        inner = blocks.product(operand, weights["gate_up"])
        return total, blocks.product(blocks.activated(inner), weights["down"])

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
        activations.second, total, operand = self._second_half(first.total, blocks.product(operand, weights["output"]))
        return total, blocks.product(operand, weights["down"])

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
        second = self._second_half(total, None)[0] if activations.second is None else activations.second
        activations.second = None
        grad = self._collect("down", blocks.gradients, grad_delta, second.kept_inner)
        grad = self._collect("gate_up", blocks.inner_gradients, grad, second.inner, second.kept)
        post_norm = self._values["post_norm"]
        grad_total, vectors["post_norm"] = add_norm_backward(grad, grad_total, total, post_norm, second.inverse)
        del second

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
        collector: nn.Parameter = getattr(self, name)
        grad, of_weight = gradients(*arguments, self._weights[name], collector.grad)
        collector.grad = self._keep(f"layers.{self.index}.{name}", of_weight)
        return grad

    def _first_half(self, x: Tensor, delta: Tensor | None, context: LayerContext) -> "FirstHalf":
        total, inverse, operand, kept = self._blocks.kept_normed(x, delta, self._norm("input_norm"))
        qkv = self._biased(self._blocks.product(operand, self._weights["qkv"]))
        return FirstHalf(total, inverse, kept, qkv, self._rotated(qkv, context))

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
    for name in (*_LINEARS, "qkv_bias"):
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
    second: SecondHalf | None = None


class _Layer(torch.autograd.Function):
    """`save_for_backward` avoids a reference cycle that would leak `total`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        run: Callable[..., tuple[Tensor, Tensor]],
        layer: PackedLayer,
        context: LayerContext,
        *collectors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        ctx.shared = context
        ctx.kept = LayerActivations()
        total, more = run(layer, x, delta, context, ctx.kept)
        ctx.save_for_backward(total)
        return total, more

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_delta: Tensor) -> tuple[Tensor | None, ...]:
        (total,) = ctx.saved_tensors
        kept = ctx.kept
        ctx.kept = None
        grad, vectors = ctx.layer.backward(grad_total, grad_delta, total, ctx.shared, kept)
        # The gradient of what was added to the residual stream is the stream's own.
        of_delta = grad if ctx.needs_input_grad[1] else None
        return grad, of_delta, None, None, None, *(vectors.get(name) for name, _ in ctx.layer.named_parameters())


class PackedDecoder(nn.Module):
    """Embedding, layers, final norm; the head is `head_weight`."""

    def __init__(
        self, arch: Architecture, blocks: Sequence[Blocks], device: torch.device, recompute: bool, keep: Keep
    ) -> None:
        """`recompute`: the backward computes again what `LayerActivations` need not have."""
        super().__init__()
        assert not arch.sparse_layers, "experts are not packed"
        self.arch = arch
        self._run = PackedLayer.forward if recompute else PackedLayer.kept_forward
        shapes = {name: stack.shape for unit in units_of(arch) for name, stack in unit.items()}
        self.layers = nn.ModuleList(
            PackedLayer(arch, i, form, layer_stacks(arch, i), device, keep) for i, form in enumerate(blocks)
        )
        self.embedding, self.norm = (_collector(device, shapes[name]) for name in ("embedding", "norm"))
        self.head = _collector(device, shapes["head"]) if "head" in shapes else None
        self._values: dict[str, Tensor] = {}
        cos, sin = rotary_tables(arch)
        self._cos, self._sin = (table.bfloat16().float().to(device) for table in (cos, sin))

    def head_weight(self) -> tuple[nn.Parameter, Tensor]:
        """[vocabulary, hidden]: what collects its gradient, and the BF16 values."""
        return self.embedding if self.head is None else self.head, self._values["head"]

    def cache_weights(self, masters: PackedMasters) -> None:
        """From the masters of all ranks, until `drop_weights`."""
        if self._values:
            return
        for index, layer in enumerate(self.packed_layers()):
            prefix = f"layers.{index}."
            own = {name: masters.own(prefix + name) for name in layer_stacks(self.arch, index)}
            parts = {name: masters.parts(prefix + name) for name in own}
            stacks = masters.gathered({prefix + name: each for name, each in layer.made(own, parts).items()})
            layer.cache({name.removeprefix(prefix): each for name, each in stacks.items()})
        # A GPU with all rows looks tokens up in the masters, and needs no narrow copy beside them.
        outer = {"norm": (_to_bf16(masters.own("norm")),), "embedding": (masters.looked_up("embedding"),)}
        if self.head is not None:
            outer["head"] = (masters.own("head").bfloat16(),)
        self._values = {name: values for name, (values,) in masters.gathered(outer).items()}
        if self.head is None:
            self._values["head"] = self._values["embedding"].bfloat16()

    def cache_engine_weights(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """From a policy that was exported in these blocks' formats, until `drop_weights`."""

        def joined(stack: Stack, suffix: str) -> Tensor:
            parts = [tensors[name + suffix].to(device) for name, _ in stack.parts]
            # torch joins bytes, and not codes.
            bits = [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]
            return torch.cat(bits).view(parts[0].dtype)

        for index, layer in enumerate(self.packed_layers()):
            stacks = dict[str, Sequence[Tensor]]()
            for name, stack in layer_stacks(self.arch, index).items():
                has_codes = stack.parts[0][0] + SCALE_SUFFIX in tensors
                values = joined(stack, "")
                narrow = [values] if name in _LINEARS else [_to_bf16(values)]
                stacks[name] = [values, joined(stack, SCALE_SUFFIX)] if has_codes else narrow
            layer.cache(stacks)
        outer = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
        # Views would hold the memory of all that was shipped beside them.
        self._values = {name: tensors[key].to(device, copy=True) for name, key in outer.items() if key in tensors}
        self._values["norm"] = _to_bf16(self._values["norm"])
        self._values.setdefault("head", self._values["embedding"])

    def drop_weights(self) -> None:
        self._values = {}
        for layer in self.packed_layers():
            layer.drop_weights()

    def forward(
        self,
        tokens: Tensor,
        pack: AttentionPack,
        attention: PackedAttention,
        scales: Scales,
        observe: Observer | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, BF16 [tokens, hidden], of int64 [tokens]."""
        context = LayerContext(pack, attention, self._cos, self._sin, scales, observe)
        x: Tensor = _Lookup.apply(self.embedding, self._values["embedding"], tokens)  # type: ignore[no-untyped-call]
        delta: Tensor | None = None
        run = self._with_gradients if torch.is_grad_enabled() else PackedLayer.forward
        for layer in self.packed_layers():
            x, delta = run(layer, x, delta, context)
        return norm_only(x, delta, Norm(_pass_gradient(self.norm, self._values["norm"]), self.arch.rms_norm_eps))

    def _with_gradients(
        self, layer: PackedLayer, x: Tensor, delta: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor]:
        total, more = _Layer.apply(x, delta, self._run, layer, context, *layer.parameters())  # type: ignore[no-untyped-call]
        return total, more

    def packed_layers(self) -> Iterator[PackedLayer]:
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            yield layer


class _PassGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collector: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _pass_gradient(collector: Tensor, values: Tensor) -> Tensor:
    result: Tensor = _PassGradient.apply(collector, values)  # type: ignore[no-untyped-call]
    return result


class _Lookup(torch.autograd.Function):
    """Rows of the embedding in BF16, whose gradients are added in FP32."""

    @staticmethod
    def forward(ctx: Any, collector: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(values)
        return nn.functional.embedding(tokens, values).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grad.float(), tokens, ctx.rows, -1, False), None, None


def _to_bf16(vector: Tensor) -> Tensor:
    return vector.bfloat16().float()


def _collector(device: torch.device, shape: Sequence[int]) -> nn.Parameter:
    """A parameter that only collects gradients: a single number in memory."""
    return nn.Parameter(torch.zeros((), device=device).expand(*shape))
