"""Packed sequences of different lengths, causal attention over them, and the output head.

Attention is in the formats of `numerics.attention`. BF16 on a GPU is FlashAttention. Over an FP8 cache it computes what
the rollout engine computes when it decodes. The gradient is that of BF16 attention over the values of the codes, from
the output and the log-sum-exp of the forward. Saturated codes get nothing. On a CPU both are the exact forms, one
sequence at a time.

The head multiplies BF16 weights to FP32 logits, on Hopper by DeepGEMM's BF16 GEMM, whose accumulation does not depend
on the number of rows. Engine and trainer call it alike.

Shapes: qkv BF16 [tokens, (query_heads + 2 kv_heads) * head_dim], normed and rotated; attention's output BF16
[tokens, query_heads * head_dim].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.numerics.attention import FP8_CACHE_FORMS, AttentionFormat, Bf16Attention
from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.fused import HeadLayout, heads_of
from fp8core.numerics.gemm import align_rows, aligned_gemm, alignment_bits, fp32_product
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import (
    ChunkedHead,
    Truncation,
    chunked_logprobs,
    logit_slopes,
    token_statistics,
    truncate,
)
from fp8core.numerics.recipe import TILE, AttentionProducts

# Keys of one sequence then lie in pages as in a paged cache, and decode kernels can read them where they are.
PAGE = 16


@dataclass(frozen=True)
class PackedSequences:
    """Where each sequence of a pack lies.

    Every sequence begins at a multiple of `PAGE`, and the pack holds a multiple of 128 tokens, as block-FP8 weight
    gradients require. Filling of a page ends the sequence before it, filling of the pack is a sequence of its own.

    Attributes:
        lengths: real tokens of each sequence.
        starts: where each begins, and the number of tokens of the pack.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "PackedSequences":
        assert lengths, "a pack without sequences"
        assert min(lengths) > 0, "an empty sequence"
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + round_up(length, PAGE))
        rest = -starts[-1] % TILE
        return cls((*lengths, 0), (*starts, starts[-1] + rest)) if rest else cls(tuple(lengths), tuple(starts))

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence with its filling."""
        return max(end - start for start, end in self.spans)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of every sequence, with its filling."""
        return list(zip(self.starts[:-1], self.starts[1:], strict=True))

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [tokens]: from 0 in every sequence, filling included."""
        return torch.arange(self.tokens) - torch.tensor(self.starts)[self.owners]

    @cached_property
    def valid(self) -> Tensor:
        """bool [tokens], False where the pack is filled up."""
        return self.offsets < torch.tensor(self.lengths)[self.owners]

    @cached_property
    def positions(self) -> Tensor:
        """int64 [tokens]: `offsets`, and 0 where the pack is filled up."""
        return torch.where(self.valid, self.offsets, 0)

    @cached_property
    def owners(self) -> Tensor:
        """int64 [tokens]: the index of the sequence that each token belongs to."""
        return torch.repeat_interleave(torch.tensor(self.starts).diff())


def packed_length(length: int) -> int:
    """Tokens that a sequence takes in a pack."""
    return round_up(length, PAGE)


class Attended(NamedTuple):
    """BF16 [tokens, query_heads * head_dim], and what the backward needs of the forward besides qkv."""

    out: Tensor
    for_backward: tuple[Tensor, ...]


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, without a wait; torch keeps the pinned memory until a GPU has read it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class DevicePack(NamedTuple):
    """A pack with what kernels read of it, on their device.

    `positions` are int64 [tokens], `starts` int32 [sequences + 1]. `pages`, int32 [sequences, pages of the longest],
    has the pages of the pack with keys 16 i and after.
    """

    sequences: PackedSequences
    positions: Tensor
    starts: Tensor
    pages: Tensor

    @classmethod
    def of(cls, sequences: PackedSequences, device: torch.device) -> "DevicePack":
        starts = torch.tensor(sequences.starts, dtype=torch.int32)
        pages = starts[:-1, None] // PAGE + torch.arange(-(-sequences.longest // PAGE), dtype=torch.int32)
        # Rows of shorter sequences run on into pages that no query reads.
        pages = pages.clamp(max=sequences.tokens // PAGE - 1)
        tensors = sequences.positions, starts, pages
        return cls(sequences, *(copied(tensor, device) for tensor in tensors))


class PackedAttention(ABC):
    name: str

    @abstractmethod
    def forward(self, qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales | None) -> Attended: ...

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        qkv: Tensor,
        saved: tuple[Tensor, ...],
        layout: HeadLayout,
        pack: DevicePack,
        scales: LayerScales | None,
    ) -> Tensor:
        """Gradient of qkv; `saved` is `Attended.for_backward`."""


class Bf16PackedAttention(PackedAttention):
    name = "bf16"

    def __init__(self, exact: Bf16Attention) -> None:
        self._exact = exact

    def forward(self, qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales | None) -> Attended:
        return bf16_attention(qkv, layout, pack, self._exact)

    def backward(
        self,
        grad: Tensor,
        qkv: Tensor,
        saved: tuple[Tensor, ...],
        layout: HeadLayout,
        pack: DevicePack,
        scales: LayerScales | None,
    ) -> Tensor:
        return bf16_attention_backward(grad, qkv, saved, layout, pack, self._exact)


class Fp8PackedAttention(PackedAttention):
    """E4M3 K and V with static scales; `longest` is the longest request of the engine whose result it is."""

    def __init__(self, products: AttentionProducts, longest: int) -> None:
        self.name: AttentionProducts = products
        self._longest = longest

    def forward(self, qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales | None) -> Attended:
        assert scales is not None, "FP8 attention without scales: calibrate first"
        return fp8_attention(qkv, layout, pack, scales, self.name, self._longest)

    def backward(
        self,
        grad: Tensor,
        qkv: Tensor,
        saved: tuple[Tensor, ...],
        layout: HeadLayout,
        pack: DevicePack,
        scales: LayerScales | None,
    ) -> Tensor:
        assert scales is not None
        return fp8_attention_backward(grad, qkv, saved, layout, pack, scales, self.name)


@with_kernel("attention")
def bf16_attention(qkv: Tensor, layout: HeadLayout, pack: DevicePack, exact: Bf16Attention) -> Attended:
    """The exact form for each sequence."""
    return Attended(_one_by_one(qkv, layout, pack, exact, None), ())


@with_kernel("attention")
def bf16_attention_backward(
    grad: Tensor, qkv: Tensor, saved: tuple[Tensor, ...], layout: HeadLayout, pack: DevicePack, exact: Bf16Attention
) -> Tensor:
    """Gradient of qkv; the reference computes the forward again to differentiate it."""
    return _one_by_one_backward(grad, qkv, layout, pack, exact, None)


@with_kernel("attention")
def fp8_attention(
    qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales, products: AttentionProducts, longest: int
) -> Attended:
    """The exact form for each sequence; a kernel computes what the decode kernel does."""
    return Attended(_one_by_one(qkv, layout, pack, FP8_CACHE_FORMS[products], scales), ())


@with_kernel("attention")
def fp8_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    saved: tuple[Tensor, ...],
    layout: HeadLayout,
    pack: DevicePack,
    scales: LayerScales,
    products: AttentionProducts,
) -> Tensor:
    """Gradient of qkv, of the exact form or of BF16 attention over the values that the codes stand for."""
    return _one_by_one_backward(grad, qkv, layout, pack, FP8_CACHE_FORMS[products], scales)


def _one_by_one(
    qkv: Tensor, layout: HeadLayout, pack: DevicePack, form: AttentionFormat, scales: LayerScales | None
) -> Tensor:
    outputs = []
    for start, end in pack.sequences.spans:
        q, k, v = (part.transpose(0, 1)[None].float() for part in heads_of(qkv[start:end], layout))
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()[None, None]
        out = form.attend(q, *form.store(k, v, scales), mask, scales)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs).bfloat16()


def _one_by_one_backward(
    grad: Tensor, qkv: Tensor, layout: HeadLayout, pack: DevicePack, form: AttentionFormat, scales: LayerScales | None
) -> Tensor:
    leaf = qkv.detach().requires_grad_()
    with torch.enable_grad():
        out = _one_by_one(leaf, layout, pack, form, scales)
    return torch.autograd.grad(out, leaf, grad)[0]


class HeadOptions(NamedTuple):
    """`output` is the format of the logits, FP32 or BF16; `temperature` divides them, `truncation` leaves a part."""

    output: torch.dtype
    temperature: float
    truncation: Truncation | None = None


@with_kernel("hopper_gemm")
def head_logits(hidden: Tensor, weight: Tensor, output: torch.dtype = torch.float32) -> Tensor:
    """Logits of BF16 hidden states and weight, FP32 [tokens, vocabulary], rounded to values of `output`."""
    aligned = align_rows(weight.double(), alignment_bits(weight.shape[1]))
    return aligned_gemm(hidden, aligned).to(output).float()


class PackedHead(ChunkedHead):
    """BF16 weights [vocabulary, hidden], whose gradients are FP32 sums."""

    def __init__(self, weight: Tensor, options: HeadOptions) -> None:
        super().__init__(weight, options.temperature, options.truncation)
        self._output = options.output

    def statistics(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_statistics(self._logits(hidden), targets, self.temperature)

    def slopes(
        self, hidden: Tensor, targets: Tensor, entropy: Tensor, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> Tensor:
        gradients = grad, grad_entropy
        return logit_slopes(self._logits(hidden), targets, entropy, self.temperature, gradients, self.weight.dtype)

    def add_weight_gradient(self, total: Tensor, slopes: Tensor, hidden: Tensor) -> None:
        fp32_product(slopes.t(), hidden, total)

    def _logits(self, hidden: Tensor) -> Tensor:
        return truncate(head_logits(hidden, self.weight, self._output), self.temperature, self.truncation)


def token_logprobs(
    hidden: Tensor, master: Tensor | None, weight: Tensor, targets: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """`chunked_logprobs` of BF16 hidden states and a BF16 weight; gradients reach its FP32 `master`."""
    return chunked_logprobs(hidden, master, PackedHead(weight, options), targets)
