"""Packed sequences of different lengths, causal attention over them, and the output head.

On a CPU attention is the exact form, one sequence at a time. The head multiplies BF16 weights to FP32 logits, on Hopper
by DeepGEMM's BF16 GEMM, whose accumulation does not depend on the number of rows. Engine and trainer call it alike.

Shapes: qkv BF16 [tokens, (query_heads + 2 kv_heads) * head_dim], normed and rotated; attention's output BF16 [tokens,
query_heads * head_dim]."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8core.numerics.attention import AttentionFormat
from fp8core.numerics.dispatch import with_kernel
from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.fused import HeadLayout, heads_of
from fp8core.numerics.gemm import align_rows, aligned_gemm, alignment_bits, fp32_product
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import ChunkedHead
from fp8core.numerics.recipe import TILE
from fp8core.numerics.truncation import Truncation

# Keys of one sequence then lie in pages as in a paged cache, and decode kernels can read them where they are.
PAGE = 16


@dataclass(frozen=True)
class PackedSequences:
    """Where each sequence of a pack lies: it begins at a multiple of `PAGE`.

    The pack holds a multiple of 128 tokens, as block-FP8 weight gradients require. Its filling is a sequence of its
    own.

    Attributes:
        lengths: real tokens of each sequence.
        starts: where each begins, and the number of tokens of the pack."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], multiple: int = TILE) -> "PackedSequences":
        assert lengths, "a pack without sequences"
        assert min(lengths) > 0, "an empty sequence"
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + round_up(length, PAGE))
        rest = -starts[-1] % multiple
        return cls((*lengths, 0), (*starts, starts[-1] + rest)) if rest else cls(tuple(lengths), tuple(starts))

    def context_of(self, first: int, last: int) -> tuple[int, "PackedSequences"]:
        """The place and the sequences of all that tokens from `first` to `last` attend to; the last may be cut. Both
        are multiples of `PAGE`."""
        owner = bisect_right(self.starts, first) - 1
        # Filling looks nowhere.
        begin = self.starts[owner] if self.lengths[owner] else first
        of_each = zip(self.lengths[owner:], self.starts[owner:], strict=False)
        lengths, starts = zip(*((min(n, last - start), start) for n, start in of_each if start < last), strict=True)
        return begin, PackedSequences(lengths, tuple(max(start, begin) - begin for start in (*starts, last)))

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @cached_property
    def longest(self) -> int:
        """With its filling."""
        return max(end - start for start, end in self.spans)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.starts[:-1], self.starts[1:], strict=True))

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [tokens]: from 0 in every sequence, filling included."""
        return torch.arange(self.tokens) - torch.tensor(self.starts)[self.owners]

    @cached_property
    def valid(self) -> Tensor:
        """bool [tokens], False in filling."""
        return self.offsets < torch.tensor(self.lengths)[self.owners]

    @cached_property
    def positions(self) -> Tensor:
        """int64 [tokens]: `offsets`, and 0 in filling."""
        return torch.where(self.valid, self.offsets, 0)

    @cached_property
    def owners(self) -> Tensor:
        """int64 [tokens]: the sequence of each."""
        return torch.repeat_interleave(torch.tensor(self.starts).diff())


def packed_length(length: int) -> int:
    return round_up(length, PAGE)


class AttentionOutput(NamedTuple):
    """BF16 [tokens, query_heads * head_dim], and what the backward needs besides qkv."""

    out: Tensor
    for_backward: tuple[Tensor, ...]


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Without a wait; torch keeps the pinned memory until a GPU has read it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class DevicePack(NamedTuple):
    """A pack with what kernels read of it, on their device.

    `positions` are int64 [tokens], `starts` int32 [sequences + 1]. `pages`, int32 [sequences, pages of the longest],
    has the pages of the pack with keys 16 i and after. The first `prefix` tokens of the first sequence have no queries
    here; `query_starts` counts the others."""

    sequences: PackedSequences
    positions: Tensor
    starts: Tensor
    pages: Tensor
    query_starts: Tensor
    prefix: int

    @classmethod
    def of(cls, sequences: PackedSequences, device: torch.device, prefix: int = 0) -> "DevicePack":
        starts = torch.tensor(sequences.starts, dtype=torch.int32)
        pages = starts[:-1, None] // PAGE + torch.arange(-(-sequences.longest // PAGE), dtype=torch.int32)
        # Rows of shorter sequences run on into pages that no query reads.
        pages = pages.clamp(max=sequences.tokens // PAGE - 1)
        of_queries = (starts - prefix).clamp(min=0)
        tensors = sequences.positions, starts, pages, of_queries
        positions, starts, pages, of_queries = (copy_to(tensor, device) for tensor in tensors)
        return cls(sequences, positions, starts, pages, of_queries, prefix)

    @property
    def longest_query(self) -> int:
        return max(end - max(start, self.prefix) for start, end in self.sequences.spans)

    @property
    def parts(self) -> "Sequence[AttentionPart]":
        return (AttentionPart(slice(None), slice(None), self),)

    def gathered(self, own: Tensor) -> Tensor:
        return own

    def summed(self, gradients: Tensor) -> Tensor:
        return gradients


class AttentionPart(NamedTuple):
    """Queries side by side, and what they attend to.

    Attributes:
        rows: of the queries, among those of this process.
        keys: tokens of the pack.
        pack: these tokens alone."""

    rows: slice
    keys: slice
    pack: DevicePack


class AttentionPack(Protocol):
    """A pack whose queries this process has, all or some; several then make the same calls in the same order."""

    @property
    def positions(self) -> Tensor:
        """int64 [own tokens]."""

    @property
    def parts(self) -> Sequence[AttentionPart]: ...

    def gathered(self, own: Tensor) -> Tensor:
        """[tokens of the pack, ...] from the [own tokens, ...] of all processes."""

    def summed(self, gradients: Tensor) -> Tensor:
        """[own tokens, ...]: the sums of those that each process has for [tokens of the pack, ...], in their order."""


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, pack: AttentionPack) -> Tensor:
        ctx.pack = pack
        return pack.gathered(own).view(-1, *own.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.pack.summed(grad), None


class PackedAttention(NamedTuple):
    """`exact`: its form for one sequence. `longest`: the longest request of the engine whose result it is, in FP8."""

    exact: AttentionFormat
    longest: int


@with_kernel("attention")
def packed_attention(
    qkv: Tensor, layout: HeadLayout, pack: AttentionPack, form: PackedAttention, scales: LayerScales | None
) -> AttentionOutput:
    """The exact form for each sequence; a kernel is FlashAttention, or over an FP8 cache what engines decode by."""
    return AttentionOutput(_one_by_one(qkv, layout, pack, form.exact, scales), ())


@with_kernel("attention")
def packed_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    saved: tuple[Tensor, ...],
    layout: HeadLayout,
    pack: AttentionPack,
    form: PackedAttention,
    scales: LayerScales | None,
) -> Tensor:
    """Gradient of qkv; a kernel's is that of BF16 attention over the values of the codes, nothing where saturated."""
    leaf = qkv.detach().requires_grad_()
    with torch.enable_grad():
        out = _one_by_one(leaf, layout, pack, form.exact, scales)
    return torch.autograd.grad(out, leaf, grad)[0]


def _one_by_one(
    qkv: Tensor, layout: HeadLayout, pack: AttentionPack, form: AttentionFormat, scales: LayerScales | None
) -> Tensor:
    q, k, v = (part.float() for part in heads_of(qkv, layout))
    k, v = (_Gathered.apply(stored, pack) for stored in form.store(k, v, scales))  # type: ignore[no-untyped-call]
    outputs = []
    for rows, keys, part in pack.parts:
        for start, end in part.sequences.spans:
            first = max(start, part.prefix)
            own = q[rows][first - part.prefix : end - part.prefix]
            each = own, k[keys][start:end], v[keys][start:end]
            queries, seen_keys, seen_values = (x.transpose(0, 1)[None] for x in each)
            mask = torch.ones(end - first, end - start, dtype=torch.bool).tril(first - start)[None, None]
            out = form.attend(queries, seen_keys, seen_values, mask, scales)
            outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs).bfloat16()


@with_kernel("hopper_gemm")
def head_logits(hidden: Tensor, weight: Tensor, output: torch.dtype = torch.float32) -> Tensor:
    """FP32 [tokens, vocabulary] of BF16 hidden states and weight, rounded to values of `output`."""
    aligned = align_rows(weight.double(), alignment_bits(weight.shape[1]))
    return aligned_gemm(hidden, aligned).to(output).float()


class PackedHead(ChunkedHead):
    """BF16 weights [vocabulary, hidden], whose gradients are FP32 sums."""

    def __init__(
        self, weight: Tensor, output: torch.dtype, temperature: float, truncation: Truncation | None = None
    ) -> None:
        super().__init__(weight, temperature, truncation)
        self._output = output

    def logits(self, hidden: Tensor) -> Tensor:
        return head_logits(hidden, self.weight, self._output)

    def add_weight_gradient(self, total: Tensor, slopes: Tensor, hidden: Tensor) -> None:
        fp32_product(slopes.t(), hidden, total)
