"""The decoder shared by the embedded engine and the torch trainer: every family, in any format.

Engine and trainer run this code on the same bytes, and no operation depends on the batch around a token. So their
log-probs are equal bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.models.experts import ReplayedRouting, Routing, TopKRouting, feed_forward
from fp8core.models.families import layer_parts
from fp8core.models.router_losses import RouterLosses
from fp8core.models.weights import Formats, LayerWeights, PolicyWeights
from fp8core.numerics.attention import AttentionFormat
from fp8core.numerics.elementwise import rms_norm, rotate
from fp8core.numerics.kv_scales import LayerScales, Scales
from fp8core.numerics.logprobs import token_logprobs
from fp8core.numerics.rotary import inverse_frequencies

if TYPE_CHECKING:
    from fp8core.rl.batch import TokenBatch


def rotary_tables(arch: Architecture) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each FP32 [max_positions, head_dim / 2], not rounded, on the CPU."""
    angles = torch.arange(arch.max_positions, device="cpu").float()[:, None] * rotary_frequencies(arch)
    scale = 1.0 if arch.rope_scaling is None else arch.rope_scaling.attention_scale
    return angles.cos() * scale, angles.sin() * scale


def rotary_frequencies(arch: Architecture) -> Tensor:
    if arch.rope_scaling is None:
        return inverse_frequencies(arch.head_dim, arch.rope_theta)
    return arch.rope_scaling.frequencies(arch.head_dim, arch.rope_theta)


Observer = Callable[[int, tuple[Tensor, Tensor, Tensor]], None]
TOP_K = TopKRouting()


class Context(Protocol):
    """The tokens that the queries of a call may attend to, by sequence: [B, heads, T, d].

    A call may have the tokens of all sequences one after the other, as one row: [1, heads, tokens, d]."""

    @property
    def mask(self) -> Tensor:
        """bool [B, 1, Tq, Tk] of the call in progress."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add this call's stored K and V and return all that may be attended to."""

    def by_sequence(self, q: Tensor) -> Tensor:
        """Queries of the call, by sequence."""

    def by_token(self, out: Tensor) -> Tensor:
        """Outputs by sequence, as the tokens of the call are."""


@dataclass(frozen=True)
class FullContext:
    """A whole sequence at once: each token sees itself and the valid tokens before it."""

    mask: Tensor

    @classmethod
    def of(cls, valid: Tensor) -> "FullContext":
        """From bool [B, T]; padding sees only itself, so that no row is empty."""
        length = valid.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        alone = torch.eye(length, dtype=torch.bool)
        return cls(((causal & valid[:, None, :]) | alone)[:, None])

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def by_sequence(self, q: Tensor) -> Tensor:
        return q

    def by_token(self, out: Tensor) -> Tensor:
        return out


class Decoder:
    def __init__(self, arch: Architecture, formats: Formats) -> None:
        self.arch = arch
        self.formats = formats
        self._parts = layer_parts(arch)
        self._sparse = {layer: index for index, layer in enumerate(arch.sparse_layers)}
        self._cos, self._sin = (formats.points.tables(table) for table in rotary_tables(arch))

    def hidden(
        self,
        weights: PolicyWeights,
        tokens: Tensor,
        positions: Tensor,
        context: Context,
        scales: Scales,
        observe: Observer | None = None,
        routing: Routing = TOP_K,
        losses: RouterLosses | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, FP32 [B, T, hidden].

        Args:
            tokens: int64 [B, T].
            positions: int64 [B, T], below `max_positions`.
            scales: scales of Q, K and V per layer; required by FP8 attention.
            observe: called per layer with q, k, v [B, heads, T, d] as they are cached."""
        cos, sin = self.rotary_tables(positions)
        x = torch.nn.functional.embedding(tokens, weights.embedding)
        delta = None
        for i, layer in enumerate(weights.layers):
            x, operand = self._input(x, delta, layer.attention_norm)
            q, k, v = self._qkv(i, layer, operand, cos, sin)
            if observe is not None:
                observe(i, (q, k, v))
            attended = _attend(self.formats.attention, i, (q, k, v), context, scales[i] if scales else None)
            delta = self._output(self.formats.linears[i](attended, layer.output), layer.attention_norm)
            x, operand = self._input(x, delta, layer.mlp_norm)
            rows, formats = operand.flatten(0, 1), self.formats.mlp(i)
            mlp_out = feed_forward(rows, layer.mlp, formats, self._sparse.get(i), routing, losses)
            delta = self._output(mlp_out, layer.mlp_norm)
        return self._add_norm(x, delta, weights.norm)[1]

    def completion_logprobs(
        self,
        weights: PolicyWeights,
        batch: "TokenBatch",
        temperature: float,
        scales: Scales = (),
        observe: Observer | None = None,
        losses: RouterLosses | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every completion token in order, FP32 [tokens] each, both differentiable (nats)."""
        if losses is not None:
            losses.place(torch.where(batch.valid, torch.arange(len(batch))[:, None], -1).flatten())
        routing = TOP_K if batch.experts is None else ReplayedRouting(batch.experts)
        context = FullContext.of(batch.valid)
        hidden = self.hidden(weights, batch.tokens, batch.positions, context, scales, observe, routing, losses)
        response_mask = batch.response_mask[:, 1:]
        states = hidden[:, :-1][response_mask]
        targets = batch.tokens[:, 1:][response_mask]
        return token_logprobs(states, weights.head, self.formats.head, targets, temperature, batch.truncation)

    def rotary_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _input(self, x: Tensor, delta: Tensor | None, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with the last block's part, and the operand of the next block."""
        if self._parts.norms == "before":
            return self._add_norm(x, delta, norm)
        total = x if delta is None else self.formats.rounding(x + delta.view_as(x))
        return total, total

    def _output(self, out: Tensor, norm: Tensor) -> Tensor:
        """The part that a block adds to the residual stream."""
        return out if self._parts.norms == "before" else self._norm(out, norm)

    def _add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta.view_as(x)
        return self.formats.rounding(total), self._norm(self.formats.points.sums(total), weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.arch.rms_norm_eps, self.formats.rounding, self.formats.points.normalised)

    def fused_qkv(self, i: int, layer: LayerWeights, x: Tensor) -> Tensor:
        product = self.formats.linears[i](x, layer.qkv)
        return product if layer.qkv_bias is None else self.formats.rounding(product + layer.qkv_bias)

    def _qkv(self, i: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, T, d] of each, normed and rotated."""
        batch, length, _ = x.shape
        arch = self.arch
        rounding = self.formats.rounding
        heads = self.fused_qkv(i, layer, x.flatten(0, 1)).view(batch, length, -1, arch.head_dim)
        q, k, v = heads.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm_heads(q, layer.q_norm)
            k = self._norm_heads(k, layer.k_norm)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return rotate(q, cos, sin, rounding), rotate(k, cos, sin, rounding), v

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Of [B, T, heads, d]."""
        whole = self._parts.qk_norm == "projection"
        return self._norm(heads.flatten(2) if whole else heads, weight).view_as(heads)


def _attend(
    attention: AttentionFormat,
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    context: Context,
    scales: LayerScales | None,
) -> Tensor:
    q, k, v = qkv
    keys, values = context.extend(layer, *attention.store(k, v, scales))
    out = context.by_token(attention.attend(context.by_sequence(q), keys, values, context.mask, scales))
    return out.transpose(1, 2).flatten(2).flatten(0, 1)
