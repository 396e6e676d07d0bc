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
    DevicePack,
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

    pack: DevicePack
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
        computed = with_whole_tiles(arch) if blocks.name == "fp8_block" else arch
        self._layout = HeadLayout(computed.num_heads, computed.num_kv_heads, computed.head_dim)
        for name in _VECTORS + _LINEARS:
            stack = stacks.get(name)
            self.register_parameter(name, None if stack is None else _collector(device, stack.shape))
        self._fillings = {} if computed == arch else _fillings(stacks, layer_stacks(computed, index))
        self._weights: dict[str, BlockWeight] = {}
        self._values: dict[str, Tensor] = {}

    def made(self, own: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> dict[str, tuple[Tensor, ...]]:
        """Operands and vectors from own rows of the masters, so many of each part, by name."""
        linears = {name: self._blocks.made(own[name], parts[name]) for name in _LINEARS}
        return linears | {name: (_rounded(own[name]),) for name in _VECTORS if name in own}

    def cache(self, made: Mapping[str, Sequence[Tensor]]) -> None:
        self._weights = {name: self._blocks.ready(made[name], self._fillings.get(name)) for name in _LINEARS}
        self._values = {name: made[name][0] for name in _VECTORS if name in made}
        if (filling := self._fillings.get("qkv_bias")) is not None:
            self._values["qkv_bias"] = filling.fill(self._values["qkv_bias"])

    def drop_weights(self) -> None:
        self._weights = {}
        self._values = {}

    def forward(
        self, x: Tensor, added: Tensor | None, shared: LayerContext, activations: "LayerActivations | None" = None
    ) -> tuple[Tensor, Tensor]:
        """The stream before the layer's second half, and what that adds to it; each BF16 [tokens, hidden].
        `activations` keeps only the minimum."""
        blocks = self._blocks
        weights = self._weights
        assert weights, "the weights were not made ready"
        total, operand = blocks.normed(x, added, self._norm("input_norm"))
        attended = self._attended(self._rotated(self._biased(blocks.product(operand, weights["qkv"])), shared), shared)
        if activations is not None:
            activations.total = total
            activations.attended = attended
        added = blocks.product(blocks.operand(attended.out), weights["output"])
        total, operand = blocks.normed(total, added, self._norm("post_norm"))
        inner = blocks.product(operand, weights["gate_up"])
        return total, blocks.product(blocks.activated(inner), weights["down"])

    def kept_forward(
        self, x: Tensor, added: Tensor | None, shared: LayerContext, activations: "LayerActivations"
    ) -> tuple[Tensor, Tensor]:
        blocks = self._blocks
        weights = self._weights
        assert weights, "the weights were not made ready"
        activations.first = first = self._first_half(x, added, shared)
        activations.total = first.total
        activations.attended = self._attended(first.rotated, shared)
        operand, activations.output = blocks.kept_operand(activations.attended.out)
        activations.second, total, operand = self._second_half(first.total, blocks.product(operand, weights["output"]))
        return total, blocks.product(operand, weights["down"])

    def backward(
        self,
        grad_total: Tensor | None,
        grad_added: Tensor,
        total: Tensor,
        shared: LayerContext,
        activations: "LayerActivations",
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of the stream that entered, and of the vectors by name; those of linears are collected here.

        `total`: the first result of the pass. `activations`: what it kept, which is given up; the
        rest is computed again."""
        blocks = self._blocks
        vectors = dict[str, Tensor]()
        second = self._second_half(total, None)[0] if activations.second is None else activations.second
        activations.second = None
        grad = self._collect("down", blocks.gradients, grad_added, second.kept_inner)
        grad = self._collect("gate_up", blocks.inner_gradients, grad, second.inner, second.kept)
        post_norm = self._values["post_norm"]
        grad_total, vectors["post_norm"] = add_norm_backward(grad, grad_total, total, post_norm, second.inverse)
        del second

        output = blocks.kept_operand(activations.attended.out)[1] if activations.output is None else activations.output
        grad = self._collect("output", blocks.gradients, grad_total, output)
        first = self._first_half(activations.total, None, shared) if activations.first is None else activations.first
        attention = self._layout, shared.pack, shared.attention, shared.scales_of(self.index)
        grad = packed_attention_backward(grad, first.rotated, activations.attended.for_backward, *attention)
        grad, *of_norms = norm_rotate_backward(grad, first.qkv, *self._rotation(shared))
        vectors |= {name: each for name, each in zip(_HEAD_NORMS, of_norms, strict=True) if each is not None}
        if "qkv_bias" in self._values:
            of_bias = grad.sum(0, dtype=torch.float32)
            filling = self._fillings.get("qkv_bias")
            vectors["qkv_bias"] = of_bias if filling is None else filling.cut(of_bias)
        grad = self._collect("qkv", blocks.gradients, grad, first.kept)
        input_norm = self._values["input_norm"]
        grad, vectors["input_norm"] = add_norm_backward(grad, grad_total, activations.total, input_norm, first.inverse)
        return grad, vectors

    def _collect(self, name: str, gradients: Callable[..., tuple[Tensor, Tensor]], *given: Any) -> Tensor:
        """The gradient of a product's input. Its weight's is added to what packs before this one left: autograd would
        read both and write a third time."""
        collector: nn.Parameter = getattr(self, name)
        grad, of_weight = gradients(*given, self._weights[name], collector.grad)
        collector.grad = self._keep(f"layers.{self.index}.{name}", of_weight)
        return grad

    def _first_half(self, x: Tensor, added: Tensor | None, shared: LayerContext) -> "FirstHalf":
        total, inverse, operand, kept = self._blocks.kept_normed(x, added, self._norm("input_norm"))
        qkv = self._biased(self._blocks.product(operand, self._weights["qkv"]))
        return FirstHalf(total, inverse, kept, qkv, self._rotated(qkv, shared))

    def _second_half(self, x: Tensor, added: Tensor | None) -> tuple["SecondHalf", Tensor, Operand]:
        total, inverse, operand, kept = self._blocks.kept_normed(x, added, self._norm("post_norm"))
        inner = self._blocks.product(operand, self._weights["gate_up"])
        operand, kept_inner = self._blocks.kept_activated(inner)
        return SecondHalf(inverse, kept, inner, kept_inner), total, operand

    def _norm(self, name: str) -> Norm:
        return Norm(self._values[name], self._eps)

    def _biased(self, qkv: Tensor) -> Tensor:
        """The rounding of `models.decoder.Decoder.fused_qkv`: torch adds BF16 values in FP32 and rounds once."""
        return qkv + self._values["qkv_bias"].bfloat16() if "qkv_bias" in self._values else qkv

    def _rotated(self, qkv: Tensor, shared: LayerContext) -> Tensor:
        return norm_rotate(qkv, *self._rotation(shared))

    def _rotation(self, shared: LayerContext) -> tuple[Any, ...]:
        q_norm, k_norm = (self._values.get(name) for name in _HEAD_NORMS)
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        return norms, shared.cos, shared.sin, shared.pack.positions, self._layout, self._eps

    def _attended(self, rotated: Tensor, shared: LayerContext) -> AttentionOutput:
        if shared.observe is not None:
            shared.observe(self.index, heads_of(rotated, self._layout))
        return packed_attention(rotated, self._layout, shared.pack, shared.attention, shared.scales_of(self.index))


def _fillings(stacks: Mapping[str, Stack], filled: Mapping[str, Stack]) -> dict[str, TilePadding]:
    paddings = dict[str, TilePadding]()
    for name in (*_LINEARS, "qkv_bias"):
        if name in stacks and stacks[name] != filled[name]:
            parts, rooms = (tuple(rows for _, rows in each[name].parts) for each in (stacks, filled))
            columns, width = (math.prod(each[name].width) for each in (stacks, filled))
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
        added: Tensor | None,
        run: Callable[..., tuple[Tensor, Tensor]],
        layer: PackedLayer,
        shared: LayerContext,
        *collectors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        ctx.shared = shared
        ctx.kept = LayerActivations()
        total, more = run(layer, x, added, shared, ctx.kept)
        ctx.save_for_backward(total)
        return total, more

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_added: Tensor) -> tuple[Tensor | None, ...]:
        (total,) = ctx.saved_tensors
        kept = ctx.kept
        ctx.kept = None
        grad, vectors = ctx.layer.backward(grad_total, grad_added, total, ctx.shared, kept)
        # The gradient of what was added to the residual stream is the stream's own.
        of_added = grad if ctx.needs_input_grad[1] else None
        return grad, of_added, None, None, None, *(vectors.get(name) for name, _ in ctx.layer.named_parameters())


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
            made = masters.gathered({prefix + name: each for name, each in layer.made(own, parts).items()})
            layer.cache({name.removeprefix(prefix): each for name, each in made.items()})
        # A GPU with all rows looks tokens up in the masters, and needs no narrow copy beside them.
        outer = {"norm": (_rounded(masters.own("norm")),), "embedding": (masters.looked_up("embedding"),)}
        if self.head is not None:
            outer["head"] = (masters.own("head").bfloat16(),)
        self._values = {name: values for name, (values,) in masters.gathered(outer).items()}
        if self.head is None:
            self._values["head"] = self._values["embedding"].bfloat16()

    def cache_shipped(self, shipped: Mapping[str, Tensor], device: torch.device) -> None:
        """From a policy that was exported in these blocks' formats, until `drop_weights`."""

        def joined(stack: Stack, suffix: str) -> Tensor:
            parts = [shipped[name + suffix].to(device) for name, _ in stack.parts]
            # torch joins bytes, and not codes.
            bits = [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]
            return torch.cat(bits).view(parts[0].dtype)

        for index, layer in enumerate(self.packed_layers()):
            made = dict[str, Sequence[Tensor]]()
            for name, stack in layer_stacks(self.arch, index).items():
                coded = stack.parts[0][0] + SCALE_SUFFIX in shipped
                values = joined(stack, "")
                narrow = [values] if name in _LINEARS else [_rounded(values)]
                made[name] = [values, joined(stack, SCALE_SUFFIX)] if coded else narrow
            layer.cache(made)
        outer = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
        # Views would hold the memory of all that was shipped beside them.
        self._values = {name: shipped[key].to(device, copy=True) for name, key in outer.items() if key in shipped}
        self._values["norm"] = _rounded(self._values["norm"])
        self._values.setdefault("head", self._values["embedding"])

    def drop_weights(self) -> None:
        self._values = {}
        for layer in self.packed_layers():
            layer.drop_weights()

    def forward(
        self,
        tokens: Tensor,
        pack: DevicePack,
        attention: PackedAttention,
        scales: Scales,
        observe: Observer | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, BF16 [tokens, hidden], of int64 [tokens]."""
        shared = LayerContext(pack, attention, self._cos, self._sin, scales, observe)
        x: Tensor = _Lookup.apply(self.embedding, self._values["embedding"], tokens)  # type: ignore[no-untyped-call]
        added: Tensor | None = None
        run = self._with_gradients if torch.is_grad_enabled() else PackedLayer.forward
        for layer in self.packed_layers():
            x, added = run(layer, x, added, shared)
        return norm_only(x, added, Norm(_given(self.norm, self._values["norm"]), self.arch.rms_norm_eps))

    def _with_gradients(
        self, layer: PackedLayer, x: Tensor, added: Tensor | None, shared: LayerContext
    ) -> tuple[Tensor, Tensor]:
        total, more = _Layer.apply(x, added, self._run, layer, shared, *layer.parameters())  # type: ignore[no-untyped-call]
        return total, more

    def packed_layers(self) -> Iterator[PackedLayer]:
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            yield layer


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collector: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _given(collector: Tensor, values: Tensor) -> Tensor:
    given: Tensor = _Given.apply(collector, values)  # type: ignore[no-untyped-call]
    return given


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


def _rounded(vector: Tensor) -> Tensor:
    return vector.bfloat16().float()


def _collector(device: torch.device, shape: Sequence[int]) -> nn.Parameter:
    """A parameter that only collects gradients: a single number in memory."""
    return nn.Parameter(torch.zeros((), device=device).expand(*shape))
