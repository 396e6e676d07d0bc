"""Causal attention over packed sequences, in the formats of `numerics.attention`.

BF16 on a GPU is FlashAttention, as torch brings it for sequences of different lengths. FP8 on a GPU computes what the
rollout engine computes when it decodes: every token is a query of its own to `numerics.decode_attention`, whose result
depends on nothing but the keys before it. Its gradient is that of BF16 attention over the values that the codes stand
for (a straight-through estimator: E4M3 rounding of Q, K, V and P is passed through, saturated elements get nothing).

On a CPU both are the exact forms of `numerics.attention`, one sequence at a time.

Shapes: qkv BF16 [tokens, (query_heads + 2 kv_heads) * head_dim], normed and rotated; output BF16
[tokens, query_heads * head_dim].
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8core.numerics.attention import AttentionFormat, Bf16Attention, Fp8Attention
from fp8core.numerics.decode_attention import HEAD_DIM, LARGEST_GROUP, DecodeAttention, Queries
from fp8core.numerics.fused_head_codes import head_codes, head_gradients, head_values
from fp8core.numerics.fused_rotary import HeadLayout, Heads, heads_of
from fp8core.numerics.kernel_choice import has_kernels
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed_sequences import PAGE, PackedSequences

# What the kernel's workspace for long sequences is made for.
_QUERIES_AT_ONCE = 8192


class Attended(NamedTuple):
    """BF16 [tokens, query_heads * head_dim], and what the backward needs of the forward besides qkv."""

    out: Tensor
    for_backward: tuple[Tensor, ...]


class KeptAttention:
    """One layer's result from the pass without gradients on, until the layer is computed again with them."""

    def __init__(self) -> None:
        self._attended: Attended | None = None

    def keep(self, attended: Attended) -> None:
        """Hold the result."""
        self._attended = attended

    def take(self) -> Attended | None:
        """Give the result up; None where there is none, or no more."""
        attended, self._attended = self._attended, None
        return attended


class PackedAttention(Protocol):
    """How one format attends."""

    name: str

    def __call__(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        pack: "DevicePack",
        scales: LayerScales | None,
        kept: KeptAttention | None = None,
    ) -> Tensor:
        """Attention of a pack; with `kept`, a pass without gradients leaves its result for the next one with them."""
        ...


class DevicePack(NamedTuple):
    """A pack with what kernels read of it, on their device.

    Attributes:
        sequences: where each lies.
        positions: int64 [tokens].
        starts: int32 [sequences + 1].
        owners: int32 [tokens]: the sequence of each token.
        pages: int32 [sequences, pages of the longest]: which page of the pack holds keys 16 i and after.
        seen: int32 [tokens]: keys that each token sees, itself included; 0 where the pack is filled up.
    """

    sequences: PackedSequences
    positions: Tensor
    starts: Tensor
    owners: Tensor
    pages: Tensor
    seen: Tensor

    @classmethod
    def of(cls, sequences: PackedSequences, device: torch.device) -> "DevicePack":
        starts = torch.tensor(sequences.starts, dtype=torch.int32)
        pages = starts[:-1, None] // PAGE + torch.arange(-(-sequences.longest // PAGE), dtype=torch.int32)
        # Rows of shorter sequences run on into pages that nobody asks them for.
        pages = pages.clamp(max=sequences.tokens // PAGE - 1)
        seen = torch.where(sequences.valid, sequences.offsets + 1, 0).int()
        tensors = sequences.positions, starts, sequences.owners.int(), pages, seen
        return cls(sequences, *(tensor.to(device, non_blocking=True) for tensor in tensors))


class Bf16PackedAttention:
    """BF16 Q, K, V and P."""

    name = "bf16"

    def __init__(self, exact: Bf16Attention) -> None:
        self._exact = exact

    def __call__(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        pack: DevicePack,
        scales: LayerScales | None,
        kept: KeptAttention | None = None,
    ) -> Tensor:
        if not has_kernels(qkv):
            return _attended(qkv, _OneByOne(self._exact, layout, pack.sequences, None), kept)
        return _attended(qkv, _Flash(layout, pack), kept)


class Fp8PackedAttention:
    """E4M3 Q, K, V and P with static scales; `longest` is the longest request of the engine whose result it is."""

    name = "fp8"

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def __call__(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        pack: DevicePack,
        scales: LayerScales | None,
        kept: KeptAttention | None = None,
    ) -> Tensor:
        assert scales is not None, "FP8 attention without scales: calibrate first"
        if not has_kernels(qkv):
            return _attended(qkv, _OneByOne(Fp8Attention(), layout, pack.sequences, scales), kept)
        assert max(pack.sequences.lengths) <= self._longest, "a sequence is longer than the engine's longest request"
        return _attended(qkv, _AsQueries(layout, pack, scales, self._longest), kept)


class _Computation(Protocol):
    """An attention and its gradient; neither is recorded."""

    def forward(self, qkv: Tensor) -> Attended: ...

    def backward(self, grad: Tensor, qkv: Tensor, saved: tuple[Tensor, ...]) -> Tensor: ...


def _attended(qkv: Tensor, computation: _Computation, kept: KeptAttention | None) -> Tensor:
    if torch.is_grad_enabled():
        out: Tensor = _Differentiated.apply(qkv, computation, kept and kept.take())  # type: ignore[no-untyped-call]
        return out
    attended = computation.forward(qkv)
    if kept is not None:
        kept.keep(attended)
    return attended.out


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, computation: _Computation, attended: Attended | None) -> Tensor:
        attended = attended or computation.forward(qkv)
        ctx.save_for_backward(qkv, *attended.for_backward)
        ctx.computation = computation
        return attended.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, *saved = ctx.saved_tensors
        return ctx.computation.backward(grad, qkv, tuple(saved)), None, None


@dataclass(frozen=True)
class _Flash:
    """FlashAttention."""

    layout: HeadLayout
    pack: DevicePack

    def forward(self, qkv: Tensor) -> Attended:
        out, logsumexp = _flash_attention(heads_of(qkv, self.layout), self.pack)
        out = out.flatten(1)
        return Attended(out, (out, logsumexp))

    def backward(self, grad: Tensor, qkv: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        grads = _flash_attention_backward(grad, heads_of(qkv, self.layout), saved, self.pack)
        return torch.cat(grads, dim=1).flatten(1)


@dataclass(frozen=True)
class _AsQueries:
    """Every token as a query of its own over a pack that is its own paged cache."""

    layout: HeadLayout
    pack: DevicePack
    scales: LayerScales
    longest: int

    def forward(self, qkv: Tensor) -> Attended:
        query, key, value = head_codes(qkv, self.layout, self.scales)
        keys, values = (codes.view(-1, PAGE, *codes.shape[1:]) for codes in (key, value))
        pack, device = self.pack, qkv.device
        each = torch.arange(len(query) + 1, dtype=torch.int32, device=device)
        out = torch.empty_like(query, dtype=torch.bfloat16)
        group = self.layout.query_heads // self.layout.kv_heads
        attention = _decode_attention(device, self.layout.kv_heads, group, self.longest)
        scales = _scalar(self.scales.q, device), _scalar(self.scales.k, device), _scalar(self.scales.v, device)
        attention(query, keys, values, Queries(pack.pages, pack.owners, each, pack.seen), scales, out)
        return Attended(out.flatten(1), ())

    def backward(self, grad: Tensor, qkv: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        stood_for = head_values(qkv, self.layout, self.scales)
        grads = _flash_attention_backward(grad, stood_for, _flash_attention(stood_for, self.pack), self.pack)
        return head_gradients(grads, qkv, self.layout, self.scales)


@dataclass(frozen=True)
class _OneByOne:
    """The exact forms, one sequence at a time; the backward computes them again to differentiate them."""

    form: AttentionFormat
    layout: HeadLayout
    sequences: PackedSequences
    scales: LayerScales | None

    def forward(self, qkv: Tensor) -> Attended:
        return Attended(self._outputs(qkv), ())

    def backward(self, grad: Tensor, qkv: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        leaf = qkv.detach().requires_grad_()
        with torch.enable_grad():
            out = self._outputs(leaf)
        return torch.autograd.grad(out, leaf, grad)[0]

    def _outputs(self, qkv: Tensor) -> Tensor:
        outputs = []
        for start, end in self.sequences.spans:
            q, k, v = (part.transpose(0, 1)[None].float() for part in heads_of(qkv[start:end], self.layout))
            mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()[None, None]
            out = self.form.attend(q, *self.form.store(k, v, self.scales), mask, self.scales)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs).bfloat16()


def _flash_attention(heads: Heads, pack: DevicePack) -> tuple[Tensor, Tensor]:
    """BF16 [tokens, query_heads, head_dim], and log-sum-exp FP32 [query_heads, tokens]."""
    # What `torch.nn.attention.varlen` calls. Its own functions change from version to version, and their backward is
    # tied to their forward, whose result may be there already.
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *heads, *_bounds(pack), 0.0, True, False, window_size_left=-1, window_size_right=0
    )
    return out, logsumexp


def _flash_attention_backward(grad: Tensor, heads: Heads, saved: tuple[Tensor, ...], pack: DevicePack) -> Heads:
    """Gradients of Q, K and V; `saved` is the output, of any shape, and its log-sum-exp."""
    out, logsumexp = saved
    q, k, v = heads
    # Of dropout, which there is none of.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    result = grad.reshape(q.shape), q, k, v, out.view(q.shape), logsumexp
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        *result, *_bounds(pack), 0.0, True, state, unused, window_size_left=-1, window_size_right=0
    )
    return grad_q, grad_k, grad_v


def _bounds(pack: DevicePack) -> tuple[Tensor, Tensor, int, int]:
    """Where sequences start and how long the longest is, for queries and for keys."""
    return pack.starts, pack.starts, pack.sequences.longest, pack.sequences.longest


@cache
def _decode_attention(device: torch.device, kv_heads: int, group: int, longest: int) -> DecodeAttention:
    """One kernel and workspace for all layers, which run one after the other."""
    shape = torch.Size((1, PAGE, kv_heads, HEAD_DIM))
    strides = (PAGE * kv_heads * HEAD_DIM, kv_heads * HEAD_DIM, HEAD_DIM, 1)
    return DecodeAttention(device, shape, strides, group, longest, _QUERIES_AT_ONCE, tokens=LARGEST_GROUP // group)


@lru_cache(maxsize=4096)
def _scalar(value: float, device: torch.device) -> Tensor:
    """FP32 scalar on a device: copying one there waits for it."""
    return torch.tensor(value, device=device)
