"""The backward of attention to packed sequences on Hopper: cuDNN's deterministic kernel, or FlashAttention 2's.

Both take the output and the log-sum-exp of any forward. cuDNN needs as much memory as the products of all queries with
all keys take in BF16. A pack that takes more than `MOST_BYTES` is computed in parts; one with a sequence that takes
more alone is left to FlashAttention. That depends on lengths alone: a replay takes the same way. cuDNN builds a graph
for a shape in about 40 ms, so packs of one class (`Shape`) share a graph."""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.fused import HeadLayout, Heads
from fp8core.numerics.packed import DevicePack, PackedSequences
from fp8core.numerics.recipe import TILE

MOST_BYTES = 3_000_000_000
"""Memory that cuDNN may take for one part of a pack."""
_HEAD_DIMS = (64, 128)
_HOPPER = (9, 0)
# Its deterministic backward of sequences of different lengths was compared with FP64 there.
_OLDEST = 91900
_LENGTHS = 512
_GRAPHS = 64
# exp(x - this) is 0, as it is for infinity, which filling has.
_NO_WEIGHTS = 1e30


class Shape(NamedTuple):
    """Packs that one graph computes: the most sequences, tokens of one, and tokens of all."""

    sequences: int
    longest: int
    tokens: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Shape":
        sequences = 1 << (len(lengths) - 1).bit_length()
        longest = round_up(max(lengths), _LENGTHS)
        tokens = sum(lengths)
        eighth = max(TILE, 1 << max(0, (tokens - 1).bit_length() - 4))
        return cls(sequences, longest, min(round_up(tokens, eighth), sequences * longest))

    def workspace(self, layout: HeadLayout) -> int:
        """Bytes: products in BF16, and in FP32 gradients of K and V by query head and a sum a row."""
        products = 2 * self.sequences * layout.query_heads * self.longest**2
        by_head = 8 * layout.head_dim if layout.query_heads > layout.kv_heads else 0
        return products + self.tokens * layout.query_heads * (by_head + 4)


class Part(NamedTuple):
    """Successive sequences that are computed at once; `starts` has where the last one ends, too."""

    shape: Shape
    starts: tuple[int, ...]


@lru_cache(maxsize=8)
def parts_of(sequences: PackedSequences, layout: HeadLayout) -> list[Part]:
    """Without the pack's own filling; none if one sequence alone is beyond `MOST_BYTES`."""
    spans = [span for span, length in zip(sequences.spans, sequences.lengths, strict=True) if length]
    parts = list[Part]()
    part = list[tuple[int, int]]()
    for span in spans:
        if _shape((*part, span)).workspace(layout) > MOST_BYTES:
            if not part or _shape((span,)).workspace(layout) > MOST_BYTES:
                return []
            parts.append(_part(part))
            part = []
        part.append(span)
    return [*parts, _part(part)]


def _shape(spans: Sequence[tuple[int, int]]) -> Shape:
    return Shape.of([end - start for start, end in spans])


def _part(spans: Sequence[tuple[int, int]]) -> Part:
    return Part(_shape(spans), (*(start for start, _ in spans), spans[-1][1]))


def attention_gradients(grad: Tensor, heads: Heads, saved: tuple[Tensor, ...], pack: DevicePack) -> Heads:
    """Of Q, K and V; `grad`, BF16, is zero in filling. `saved`: the output, and log-sum-exps, FP32 [query_heads,
    tokens]. FlashAttention takes packs with tokens that have no queries, or are all filling."""
    q, k, _ = heads
    layout = HeadLayout(q.shape[1], k.shape[1], q.shape[2])
    takes = not pack.prefix and any(pack.sequences.lengths) and library(layout.head_dim, q.device) is not None
    parts = parts_of(pack.sequences, layout) if takes else []
    return cudnn_gradients(grad, heads, saved, parts) if parts else flash_gradients(grad, heads, saved, pack)


def describe(head_dim: int, device: torch.device) -> str:
    if (module := library(head_dim, device)) is None:
        return "FlashAttention 2 of torch"
    version = module.backend_version()
    return f"cuDNN {version // 10_000}.{version // 100 % 100}.{version % 100}, frontend {module.__version__}"


def library(head_dim: int, device: torch.device) -> Any | None:
    takes = head_dim in _HEAD_DIMS and device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER
    return _frontend() if takes else None


@cache
def _frontend() -> Any | None:
    if find_spec("cudnn") is None:
        return None
    module = import_module("cudnn")
    return module if module.backend_version() >= _OLDEST else None


def flash_gradients(grad: Tensor, heads: Heads, saved: tuple[Tensor, ...], pack: DevicePack) -> Heads:
    out, logsumexp = saved
    q, k, v = heads
    # Of dropout, which there is none of.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    empty = torch.empty(0, device=q.device)
    result = grad.reshape(q.shape), q, k, v, out.view(q.shape), logsumexp.contiguous()
    bounds = pack.query_starts, pack.starts, pack.longest_query, pack.sequences.longest
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        *result, *bounds, 0.0, True, state, empty, window_size_left=-1, window_size_right=0
    )
    return grad_q, grad_k, grad_v


def cudnn_gradients(grad: Tensor, heads: Heads, saved: tuple[Tensor, ...], parts: Sequence[Part]) -> Heads:
    out, logsumexp = saved
    q, k, v = (x.contiguous() for x in heads)
    layout = HeadLayout(q.shape[1], k.shape[1], q.shape[2])
    device = q.device
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with torch.cuda.device_of(q):
        sums = torch.empty(q.shape[:2], device=device)
        torch.clamp(logsumexp.t(), max=_NO_WEIGHTS, out=sums)
        tensors = q, k, v, out.view(q.shape), grad.reshape(q.shape).contiguous(), sums, *grads
        for part in parts:
            rows = slice(part.starts[0], part.starts[-1])
            graph = _graph(part.shape, layout, device)
            graph([x[rows] for x in tensors], *_places(part, layout, device))
    for each in grads:
        each[parts[-1].starts[-1] :] = 0
    return grads


@lru_cache(maxsize=32)
def _places(part: Part, layout: HeadLayout, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Lengths of sequences, int32, and where each begins in tensors of `_widths`, int64."""
    starts = torch.tensor(part.starts) - part.starts[0]
    all_starts = torch.cat((starts, starts[-1:].expand(part.shape.sequences + 1 - len(starts))))
    return all_starts.diff().int().to(device), tuple((all_starts * width).to(device) for width in _widths(layout))


def _widths(layout: HeadLayout) -> tuple[int, int, int]:
    """Elements of a token: of Q, of K or V, and of the log-sum-exp."""
    return layout.query_heads * layout.head_dim, layout.kv_heads * layout.head_dim, layout.query_heads


@lru_cache(maxsize=_GRAPHS)
def _graph(shape: Shape, layout: HeadLayout, device: torch.device) -> "Graph":
    frontend = _frontend()
    assert frontend is not None, "cuDNN's frontend is not installed"
    graph = Graph(frontend, shape, layout, _handle(device))
    graph.plan()
    return graph


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return import_module("cudnn").create_handle()


class Graph:
    """Of Q, K, V, output, its gradient, log-sum-exps by token, and the gradients."""

    def __init__(self, frontend: Any, shape: Shape, layout: HeadLayout, handle: Any | None) -> None:
        self._frontend = frontend
        self._shape = shape
        self._handle = handle
        kinds = frontend.data_type
        forms = {"intermediate_data_type": kinds.FLOAT, "compute_data_type": kinds.FLOAT}
        self._graph = graph = frontend.pygraph(io_data_type=kinds.BFLOAT16, **forms, handle=handle)
        count = shape.sequences
        self._offsets = [self._vector(f"{name}_starts", count + 1, kinds.INT64) for name in ("q", "kv", "sum")]
        self._lengths = [self._vector(f"{name}_lengths", count, kinds.INT32) for name in ("q", "kv")]
        of_query, of_keys, of_sum = self._offsets
        query, keys, width = layout
        wide = {"data_type": kinds.BFLOAT16}
        q, out, upstream = (self._by_token(name, query, width, of_query, **wide) for name in ("q", "o", "dO"))
        k, v = (self._by_token(name, keys, width, of_keys, **wide) for name in ("k", "v"))
        sums = self._by_token("stats", query, 1, of_sum, data_type=kinds.FLOAT)
        gradients = graph.sdpa_backward(
            name="attention_backward",
            q=q,
            k=k,
            v=v,
            o=out,
            dO=upstream,
            stats=sums,
            attn_scale=1 / math.sqrt(width),
            use_padding_mask=True,
            seq_len_q=self._lengths[0],
            seq_len_kv=self._lengths[1],
            use_causal_mask=True,
            use_deterministic_algorithm=True,
            max_total_seq_len_q=shape.tokens,
            max_total_seq_len_kv=shape.tokens,
        )
        of_each = (query, of_query), (keys, of_keys), (keys, of_keys)
        for gradient, (heads, offsets) in zip(gradients, of_each, strict=True):
            place = self._place(heads, width)
            gradient.set_output(True).set_dim(place["dim"]).set_stride(place["stride"]).set_data_type(kinds.BFLOAT16)
            gradient.set_ragged_offset(offsets)
        self._tensors = [q, k, v, out, upstream, sums, *gradients]
        graph.validate()

    def plan(self) -> None:
        self._graph.build_operation_graph()
        self._graph.create_execution_plans([self._frontend.heur_mode.A])
        self._graph.check_support()
        self._graph.build_plans()

    @property
    def workspace(self) -> int:
        size: int = self._graph.get_workspace_size()
        return size

    def __call__(self, tensors: Sequence[Tensor], lengths: Tensor, offsets: Sequence[Tensor]) -> None:
        device = lengths.device
        self._frontend.set_stream(handle=self._handle, stream=torch.cuda.current_stream(device).cuda_stream)
        # Released at once, so that all layers take the same memory.
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device)
        bound = dict(zip(self._tensors, tensors, strict=True)) | dict(zip(self._offsets, offsets, strict=True))
        self._graph.execute(bound | dict.fromkeys(self._lengths, lengths), workspace, handle=self._handle)

    def _vector(self, name: str, size: int, data_type: Any) -> Any:
        return self._graph.tensor(name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type)

    def _by_token(self, name: str, heads: int, width: int, offsets: Any, data_type: Any) -> Any:
        module = self._graph.tensor(name=name, **self._place(heads, width), data_type=data_type)
        module.set_ragged_offset(offsets)
        return module

    def _place(self, heads: int, width: int) -> dict[str, list[int]]:
        sequences = self._shape.sequences
        longest = self._shape.longest
        sizes = [sequences, heads, longest, width]
        return {"dim": sizes, "stride": [longest * heads * width, width, heads * width, 1]}
