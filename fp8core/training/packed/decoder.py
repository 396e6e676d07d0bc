"""The dense decoder as modules over packed sequences.

One module a layer, whose parameters are what a GEMM reads: q, k and v stacked, gate and up stacked. Nothing is
concatenated in a step. Parameters only collect gradients. Their values are in `masters.Masters`, of which each rank has
some rows; passes multiply with what was made of all rows (`cache_weights`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8core.models.architecture import Architecture
from fp8core.models.decoder import rotary_tables
from fp8core.numerics.fused import HeadLayout, Heads, heads_of, norm_rotate, norm_rotate_backward
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import DevicePack, KeptAttention, PackedAttention
from fp8core.training.packed.blocks import Blocks, BlockWeight, Norm, norm_only
from fp8core.training.packed.masters import Masters, units_of

Observer = Callable[[int, Heads], None]
_LINEARS = ("qkv", "output", "gate_up", "down")
_VECTORS = ("input_norm", "qkv_bias", "post_norm", "q_norm", "k_norm")


@dataclass(frozen=True)
class LayerContext:
    """The values that all layers of one pass share.

    Attributes:
        pack: the sequences.
        attention: its format, in every layer.
        cos, sin: FP32 [positions, head_dim / 2] of BF16 values.
        scales: of Q, K and V by layer, where attention is FP8.
        observe: called per layer with q, k and v as they are cached, not again where a layer is computed again.
    """

    pack: DevicePack
    attention: PackedAttention
    cos: Tensor
    sin: Tensor
    scales: Sequence[LayerScales] | None
    observe: Observer | None


class PackedLayer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        arch: Architecture,
        index: int,
        blocks: Blocks,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.index, self._blocks, self._eps = index, blocks, arch.rms_norm_eps
        self._layout = HeadLayout(arch.num_heads, arch.num_kv_heads, arch.head_dim)
        for name in _VECTORS + _LINEARS:
            shape = shapes.get(f"layers.{index}.{name}")
            self.register_parameter(name, None if shape is None else _collector(device, shape))
        self._weights: dict[str, BlockWeight] = {}
        self._values: dict[str, Tensor] = {}

    def made(self, own: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
        """The operands and vectors of this layer, from own rows of its masters, by name."""
        linears = {name: self._blocks.made(own[name]) for name in _LINEARS}
        return linears | {name: (_rounded(own[name]),) for name in _VECTORS if name in own}

    def cache(self, made: Mapping[str, Sequence[Tensor]]) -> None:
        """Compute with what was made of all rows, until `drop_weights`."""
        self._weights = {name: self._blocks.ready(getattr(self, name), made[name]) for name in _LINEARS}
        self._values = {name: made[name][0] for name in _VECTORS if name in made}

    def drop_weights(self) -> None:
        """The masters are about to change."""
        self._weights, self._values = {}, {}

    def forward(
        self, x: Tensor, added: Tensor | None, shared: LayerContext, kept: KeptAttention | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream before the layer's second half, and what that adds to it; each BF16 [tokens, hidden]."""
        blocks, layout, weights = self._blocks, self._layout, self._weights
        assert weights, "the weights were not made ready"
        x, qkv = blocks.norm_linear(x, added, Norm(self._vector("input_norm"), self._eps), weights["qkv"])
        if "qkv_bias" in self._values:
            qkv = _AddBias.apply(qkv, self._vector("qkv_bias"))  # type: ignore[no-untyped-call]
        norms = (self._vector(name) if name in self._values else None for name in ("q_norm", "k_norm"))
        qkv = _NormRotate.apply(qkv, *norms, shared, layout, self._eps)  # type: ignore[no-untyped-call]
        if shared.observe is not None and not (kept and kept.held):
            shared.observe(self.index, heads_of(qkv, layout))
        scales = shared.scales[self.index] if shared.scales else None
        attended = shared.attention(qkv, layout, shared.pack, scales, kept)
        added = blocks.linear(attended, weights["output"])
        return blocks.mlp(x, added, Norm(self._vector("post_norm"), self._eps), weights["gate_up"], weights["down"])

    def _vector(self, name: str) -> Tensor:
        return _given(getattr(self, name), self._values[name])


class PackedDecoder(nn.Module):
    """Embedding, layers, final norm; the head is `head_weight`."""

    def __init__(self, arch: Architecture, blocks: Sequence[Blocks], device: torch.device, recompute: bool) -> None:
        """`recompute` keeps the input of a layer and what it attended to; the backward computes the rest again."""
        super().__init__()
        assert not arch.sparse_layers, "experts are not packed"
        self.arch, self._differentiated = arch, _recomputed if recompute else _kept
        shapes = {name: stack.shape for unit in units_of(arch) for name, stack in unit.items()}
        self.layers = nn.ModuleList(PackedLayer(arch, i, form, shapes, device) for i, form in enumerate(blocks))
        self.embedding, self.norm = (_collector(device, shapes[name]) for name in ("embedding", "norm"))
        self.head = _collector(device, shapes["head"]) if "head" in shapes else None
        self._values: dict[str, Tensor] = {}
        cos, sin = rotary_tables(arch)
        self._cos, self._sin = (table.bfloat16().float().to(device) for table in (cos, sin))

    def head_weight(self) -> tuple[nn.Parameter, Tensor]:
        """[vocabulary, hidden]: what collects its gradient, and the BF16 values."""
        return self.embedding if self.head is None else self.head, self._values["head"]

    def cache_weights(self, masters: Masters) -> None:
        """Make all weights ready from the masters of all ranks, until `drop_weights`, if they are not."""
        if self._values:
            return
        for index, layer in enumerate(self.packed_layers()):
            prefix = f"layers.{index}."
            own = {name.removeprefix(prefix): rows for name, rows in masters.own.items() if name.startswith(prefix)}
            made = masters.gathered({prefix + name: each for name, each in layer.made(own).items()})
            layer.cache({name.removeprefix(prefix): each for name, each in made.items()})
        # A GPU with all rows looks tokens up in the masters, and needs no narrow copy beside them.
        outer = {"norm": (_rounded(masters.own["norm"]),), "embedding": (masters.looked_up("embedding"),)}
        if self.head is not None:
            outer["head"] = (masters.own["head"].bfloat16(),)
        self._values = {name: values for name, (values,) in masters.gathered(outer).items()}
        if self.head is None:
            self._values["head"] = self._values["embedding"].bfloat16()

    def drop_weights(self) -> None:
        """The masters are about to change."""
        self._values = {}
        for layer in self.packed_layers():
            layer.drop_weights()

    def forward(
        self,
        tokens: Tensor,
        pack: DevicePack,
        attention: PackedAttention,
        scales: Sequence[LayerScales] | None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: int64 [tokens of the pack].
            pack: where the sequences lie.
            attention: its format.
            scales: scales of Q, K and V per layer; required by FP8 attention.
            observe: called per layer with q, k, v [tokens, heads, head_dim] as they are cached.

        Returns:
            BF16 [tokens, hidden].
        """
        shared = LayerContext(pack, attention, self._cos, self._sin, scales, observe)
        x: Tensor = _Lookup.apply(self.embedding, self._values["embedding"], tokens)  # type: ignore[no-untyped-call]
        added: Tensor | None = None
        run = self._differentiated if torch.is_grad_enabled() else _kept
        for layer in self.packed_layers():
            x, added = run(layer, x, added, shared)
        return norm_only(x, added, Norm(_given(self.norm, self._values["norm"]), self.arch.rms_norm_eps))

    def packed_layers(self) -> Iterator[PackedLayer]:
        """The layers, typed."""
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            yield layer


class _AddBias(torch.autograd.Function):
    """bf16(x + bias), the rounding of `models.decoder.Decoder.fused_qkv`; the gradient of the bias is an FP32 sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        # Both are BF16 values: torch adds them in FP32 and rounds once.
        return x + bias.bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.sum(0, dtype=torch.float32)


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        shared: LayerContext,
        layout: HeadLayout,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(qkv, q_norm, k_norm)
        ctx.given = shared.cos, shared.sin, shared.pack.positions, layout, eps
        return norm_rotate(qkv, _both(q_norm, k_norm), *ctx.given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_norm, k_norm = ctx.saved_tensors
        grads = norm_rotate_backward(grad.contiguous(), qkv, _both(q_norm, k_norm), *ctx.given)
        return *grads, None, None, None


def _both(q_norm: Tensor | None, k_norm: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if q_norm is None or k_norm is None else (q_norm, k_norm)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collector: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _given(collector: Tensor, values: Tensor) -> Tensor:
    """FP32 values of a vector, whose gradient the collector receives."""
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
    """BF16 values of a small parameter, held in FP32."""
    return vector.bfloat16().float()


def _collector(device: torch.device, shape: Sequence[int]) -> nn.Parameter:
    """A parameter that only collects gradients: a single number in memory."""
    return nn.Parameter(torch.zeros((), device=device).expand(*shape))


def _kept(layer: PackedLayer, x: Tensor, added: Tensor | None, shared: LayerContext) -> tuple[Tensor, Tensor]:
    total, more = layer(x, added, shared)
    return total, more


def _recomputed(layer: PackedLayer, x: Tensor, added: Tensor | None, shared: LayerContext) -> tuple[Tensor, Tensor]:
    # Reentrant: the first pass then runs without gradients, where only row codes are made.
    # Attention costs more than all else that is not multiplied with weights, and its result is small.
    kept = KeptAttention()
    total, more = checkpoint(layer, x, added, shared, kept, use_reentrant=True, preserve_rng_state=False)
    return total, more
