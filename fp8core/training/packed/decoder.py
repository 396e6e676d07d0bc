"""The dense decoder as modules with fused FP32 masters, over packed sequences.

One module a layer, whose parameters are what a GEMM reads: q, k and v stacked, gate and up stacked. That is what FSDP2
shards layer by layer (`fully_shard(layer)`), and why nothing is concatenated in a step. `named_masters` shows the same
memory under Hugging Face's names.
"""

from collections.abc import Callable, Iterator, Sequence
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

Observer = Callable[[int, Heads], None]
_LINEARS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True)
class LayerContext:
    """The values that all layers of one pass share.

    Attributes:
        pack: the sequences.
        attention: its format, in every layer.
        cos, sin: FP32 [positions, head_dim / 2] of BF16 values.
        scales: of Q, K and V by layer, where attention is FP8.
        observe: called per layer with q, k and v as they are cached.
    """

    pack: DevicePack
    attention: PackedAttention
    cos: Tensor
    sin: Tensor
    scales: Sequence[LayerScales] | None
    observe: Observer | None


class PackedLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, arch: Architecture, index: int, blocks: Blocks, device: torch.device) -> None:
        super().__init__()
        self.index, self._blocks, self._eps = index, blocks, arch.rms_norm_eps
        self._layout = HeadLayout(arch.num_heads, arch.num_kv_heads, arch.head_dim)
        hidden, width = arch.hidden_size, arch.intermediate_size
        query, every = arch.num_heads * arch.head_dim, (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        self.input_norm, self.post_norm = _parameter(device, hidden), _parameter(device, hidden)
        self.q_norm = _parameter(device, arch.head_dim) if arch.qk_norm else None
        self.k_norm = _parameter(device, arch.head_dim) if arch.qk_norm else None
        self.qkv, self.output = _parameter(device, every, hidden), _parameter(device, hidden, query)
        self.gate_up, self.down = _parameter(device, 2 * width, hidden), _parameter(device, hidden, width)
        self._cached: dict[str, BlockWeight] = {}

    def cache_weights(self) -> None:
        """Make the weights ready for all passes until `drop_weights`, if they are not."""
        self._cached = self._cached or self._prepared()

    def drop_weights(self) -> None:
        """The masters are about to change."""
        self._cached = {}

    def forward(
        self, x: Tensor, added: Tensor | None, shared: LayerContext, kept: KeptAttention | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream before the layer's second half, and what that adds to it; each BF16 [tokens, hidden]."""
        blocks, layout = self._blocks, self._layout
        weights = self._cached or self._prepared()
        x, qkv = blocks.norm_linear(x, added, self._norm(self.input_norm), weights["qkv"])
        norms = (None if norm is None else _bf16(norm) for norm in (self.q_norm, self.k_norm))
        qkv = _NormRotate.apply(qkv, *norms, shared, layout, self._eps)  # type: ignore[no-untyped-call]
        if shared.observe is not None:
            shared.observe(self.index, heads_of(qkv, layout))
        scales = shared.scales[self.index] if shared.scales else None
        attended = shared.attention(qkv, layout, shared.pack, scales, kept)
        added = blocks.linear(attended, weights["output"])
        return blocks.mlp(x, added, self._norm(self.post_norm), weights["gate_up"], weights["down"])

    def _prepared(self) -> dict[str, BlockWeight]:
        return {name: self._blocks.ready(getattr(self, name)) for name in _LINEARS}

    def _norm(self, master: Tensor) -> Norm:
        return Norm(_bf16(master), self._eps)


class PackedDecoder(nn.Module):
    """Embedding, layers, final norm; the head is `head_weight`."""

    def __init__(self, arch: Architecture, blocks: Sequence[Blocks], device: torch.device, recompute: bool) -> None:
        """`recompute` keeps the input of a layer and what it attended to; the backward computes the rest again."""
        super().__init__()
        assert not arch.sparse_layers, "experts are not packed"
        self.arch, self._differentiated = arch, _recomputed if recompute else _kept
        self.embedding = _parameter(device, arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(PackedLayer(arch, i, form, device) for i, form in enumerate(blocks))
        self.norm = _parameter(device, arch.hidden_size)
        self.head = None if arch.tie_embeddings else _parameter(device, arch.vocab_size, arch.hidden_size)
        cos, sin = rotary_tables(arch)
        self._cos, self._sin = (table.bfloat16().float().to(device) for table in (cos, sin))

    @property
    def head_master(self) -> nn.Parameter:
        """FP32 [vocabulary, hidden]."""
        return self.embedding if self.head is None else self.head

    def cache_weights(self) -> None:
        """Make all weights ready once, until `drop_weights`."""
        for layer in self.packed_layers():
            layer.cache_weights()

    def drop_weights(self) -> None:
        """The masters are about to change."""
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
        x: Tensor = nn.functional.embedding(tokens, self.embedding).bfloat16()
        added: Tensor | None = None
        run = self._differentiated if torch.is_grad_enabled() else _kept
        for layer in self.packed_layers():
            x, added = run(layer, x, added, shared)
        return norm_only(x, added, Norm(_bf16(self.norm), self.arch.rms_norm_eps))

    def packed_layers(self) -> Iterator[PackedLayer]:
        """The layers, typed."""
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            yield layer


def named_masters(decoder: PackedDecoder) -> dict[str, Tensor]:
    """Detached views of all masters by their Hugging Face names."""
    arch = decoder.arch
    named: dict[str, Tensor] = {"model.embed_tokens.weight": decoder.embedding}
    sizes = [arch.num_heads * arch.head_dim, *[arch.num_kv_heads * arch.head_dim] * 2]
    for i, layer in enumerate(decoder.packed_layers()):
        prefix = f"model.layers.{i}"
        named[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        for name, part in zip("qkv", layer.qkv.split(sizes), strict=True):
            named[f"{prefix}.self_attn.{name}_proj.weight"] = part
        if layer.q_norm is not None and layer.k_norm is not None:
            named[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
            named[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
        named[f"{prefix}.self_attn.o_proj.weight"] = layer.output
        named[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm
        gate, up = layer.gate_up.chunk(2)
        named |= {f"{prefix}.mlp.gate_proj.weight": gate, f"{prefix}.mlp.up_proj.weight": up}
        named[f"{prefix}.mlp.down_proj.weight"] = layer.down
    named["model.norm.weight"] = decoder.norm
    if decoder.head is not None:
        named["lm_head.weight"] = decoder.head
    return {name: master.detach() for name, master in named.items()}


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


class _Bf16Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor) -> Tensor:
        return master.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _bf16(master: Tensor) -> Tensor:
    """BF16 values of a small parameter, held in FP32; the gradient passes through."""
    values: Tensor = _Bf16Values.apply(master)  # type: ignore[no-untyped-call]
    return values


def _parameter(device: torch.device, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device))


def _kept(layer: PackedLayer, x: Tensor, added: Tensor | None, shared: LayerContext) -> tuple[Tensor, Tensor]:
    total, more = layer(x, added, shared)
    return total, more


def _recomputed(layer: PackedLayer, x: Tensor, added: Tensor | None, shared: LayerContext) -> tuple[Tensor, Tensor]:
    # Reentrant: the first pass then runs without gradients, where only row codes are made.
    # Attention costs more than all else that is not multiplied with weights, and its result is small.
    kept = KeptAttention()
    total, more = checkpoint(layer, x, added, shared, kept, use_reentrant=True, preserve_rng_state=False)
    return total, more
