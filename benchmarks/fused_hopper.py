"""Time the fused kernels of norm, SwiGLU, rotary positions and head codes on one Hopper GPU, beside what they replace.

    python -m benchmarks.fused_hopper --out FILE.json [--tokens 16384] [--hidden 4096] [--intermediate 12288]
    python -m benchmarks.fused_hopper --out FILE.json --attention     of a decode step, beside FlashAttention 3
    python -m benchmarks.fused_hopper --out FILE.json --device cpu --tokens 8 --hidden 256 --intermediate 256

A row is one function in one form: `fused`; `two kernels`, the same kernel with a BF16 result and then the quantiser's;
`torch`, torch's own operations (and autograd's backward, without its forward), with the quantiser's kernel where there
are codes. GB/s counts in every form what the fused function has to read and write once, share_of_peak is of 4.8 TB/s.
`timed` is "graph" for GPU time from a CUDA graph, "eager" for a queue of calls with their launches, "wall" for a CPU,
where the references run and times mean nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Row, RowFile
from fp8core.kernels.decode_attention import DecodeAttention
from fp8core.numerics.attention import Queries
from fp8core.numerics.e4m3 import FiniteFlag, row_and_column_codes, row_codes
from fp8core.numerics.fused import (
    HeadLayout,
    add_norm,
    add_norm_backward,
    add_norm_codes,
    add_norm_row_codes,
    head_codes,
    head_gradients,
    head_values,
    heads_of,
    limits_of,
    norm_rotate,
    norm_rotate_backward,
    static_codes,
    swiglu,
    swiglu_backward,
    swiglu_backward_codes,
    swiglu_codes,
    swiglu_row_codes,
)
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import RECIPES, AttentionProducts, Recipe
from fp8core.numerics.rotary import inverse_frequencies

PEAK = 4.8e12
EPS = 1e-6
LAYOUT = HeadLayout(query_heads=32, kv_heads=8, head_dim=128)
SHAPE = (16_384, 4096, 12_288)

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One function, the bytes that it has to move, and its forms."""

    name: str
    bytes: int
    forms: dict[str, Call]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=SHAPE[0])
    parser.add_argument("--hidden", type=int, default=SHAPE[1])
    parser.add_argument("--intermediate", type=int, default=SHAPE[2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", action="store_true", help="the attention of a decode step instead")
    options = parser.parse_args()
    shape = options.tokens, options.hidden, options.intermediate
    device = torch.device(options.device)
    rows = RowFile(options.out)
    if options.attention:
        for row in attention_rows():
            rows.append(row)
            print(json.dumps(row), flush=True)
        return
    for case in cases(*shape, device):
        for form, call in case.forms.items():
            row = {
                "kind": "fused",
                "function": case.name,
                "form": form,
                "shape": shape,
                **speed(case, form, call, device),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)


def cases(tokens: int, hidden: int, intermediate: int, device: torch.device) -> Iterator[Case]:
    """Every fused function; the inputs of one are freed before those of the next are made."""
    for recipe in (None, *RECIPES.values()):
        yield from norm_cases(tokens, hidden, device, recipe)
    for recipe in (None, *RECIPES.values()):
        yield from swiglu_cases(tokens, intermediate, device, recipe)
    yield from rotary_cases(tokens, device)
    yield from head_cases(tokens, device)


def norm_cases(tokens: int, hidden: int, device: torch.device, recipe: Recipe | None) -> Iterator[Case]:
    x, added, grad, around = (randn(tokens, hidden, device=device) for _ in range(4))
    weight, elements = torch.ones(hidden, device=device), tokens * hidden
    narrow = weight.bfloat16()

    def torch_norm() -> tuple[Tensor, Tensor]:
        total = x + added
        return total, functional.rms_norm(total, (hidden,), narrow, EPS)

    if recipe is None:
        total, _normed, inverse = add_norm(x, added, weight, EPS)
        leaves = [total.detach().requires_grad_(), narrow.detach().clone().requires_grad_()]
        out = functional.rms_norm(leaves[0], (hidden,), leaves[1], EPS)
        fused = partial(add_norm, x, added, weight, EPS)
        backward = partial(add_norm_backward, grad, around, total, weight, inverse)

        def torch_backward() -> tuple[Tensor, Tensor]:
            of_total, of_weight = torch.autograd.grad(out, leaves, grad, retain_graph=True)
            return of_total + around, of_weight

        yield Case("add_norm", 8 * elements, {"fused": fused, "torch": torch_norm})
        yield Case("add_norm_backward", 8 * elements, {"fused": backward, "torch": torch_backward})
        return
    flag, rows, both = FiniteFlag(device), recipe.activations, (recipe.activations, recipe.tokens)
    arguments = x, added, weight, EPS
    forms: dict[str, Call] = {
        "fused": lambda: add_norm_row_codes(*arguments, rows, flag),
        "two kernels": lambda: row_codes(add_norm(*arguments)[1], rows, flag),
        "torch": lambda: row_codes(torch_norm()[1], rows, flag),
    }
    yield Case(f"add_norm_row_codes {recipe.name}", 7 * elements, forms)
    forms = {
        "fused": lambda: add_norm_codes(*arguments, *both, flag),
        "two kernels": lambda: row_and_column_codes(add_norm(*arguments)[1], *both, flag),
        "torch": lambda: row_and_column_codes(torch_norm()[1], *both, flag),
    }
    yield Case(f"add_norm_codes {recipe.name}", 8 * elements, forms)
    flag.check()


def swiglu_cases(tokens: int, columns: int, device: torch.device, recipe: Recipe | None) -> Iterator[Case]:
    gate_up, grad = randn(tokens, 2 * columns, device=device), randn(tokens, columns, device=device)
    elements = tokens * columns

    def torch_swiglu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    leaf = gate_up.detach().requires_grad_()
    out = torch_swiglu(leaf)

    def torch_backward() -> Tensor:
        return torch.autograd.grad(out, leaf, grad, retain_graph=True)[0]

    if recipe is None:
        fused = partial(swiglu, gate_up)
        yield Case("swiglu", 6 * elements, {"fused": fused, "torch": lambda: torch_swiglu(gate_up)})
        backward = partial(swiglu_backward, grad, gate_up)
        yield Case("swiglu_backward", 10 * elements, {"fused": backward, "torch": torch_backward})
        return
    flag, rows, both = FiniteFlag(device), recipe.activations, (recipe.activations, recipe.tokens)
    of_gradients = recipe.gradients, recipe.tokens
    forms: dict[str, Call] = {
        "fused": lambda: swiglu_row_codes(gate_up, rows, flag),
        "two kernels": lambda: row_codes(swiglu(gate_up), rows, flag),
        "torch": lambda: row_codes(torch_swiglu(gate_up), rows, flag),
    }
    yield Case(f"swiglu_row_codes {recipe.name}", 5 * elements, forms)
    forms = {
        "fused": lambda: swiglu_codes(gate_up, *both, flag),
        "two kernels": lambda: row_and_column_codes(swiglu(gate_up), *both, flag),
        "torch": lambda: row_and_column_codes(torch_swiglu(gate_up), *both, flag),
    }
    yield Case(f"swiglu_codes {recipe.name}", 6 * elements, forms)
    forms = {
        "fused": lambda: swiglu_backward_codes(grad, gate_up, *of_gradients, flag),
        "two kernels": lambda: row_and_column_codes(swiglu_backward(grad, gate_up), *of_gradients, flag),
        "torch": lambda: row_and_column_codes(torch_backward(), *of_gradients, flag),
    }
    yield Case(f"swiglu_backward_codes {recipe.name}", 10 * elements, forms)
    flag.check()


def rotary_cases(tokens: int, device: torch.device) -> Iterator[Case]:
    width = (LAYOUT.query_heads + 2 * LAYOUT.kv_heads) * LAYOUT.head_dim
    qkv, grad = randn(tokens, width, device=device), randn(tokens, width, device=device)
    angles = torch.arange(4096).float()[:, None] * inverse_frequencies(LAYOUT.head_dim, 1e6)
    cos, sin = (table.bfloat16().float().to(device) for table in (angles.cos(), angles.sin()))
    positions = torch.arange(tokens, device=device) % 4096
    weight = torch.ones(LAYOUT.head_dim, device=device)
    rest = (weight, weight.clone()), cos, sin, positions, LAYOUT, EPS

    def torch_rotate(x: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        heads = x.view(tokens, -1, LAYOUT.head_dim)
        q, k, v = heads.split([LAYOUT.query_heads, LAYOUT.kv_heads, LAYOUT.kv_heads], dim=1)
        c, s = (torch.cat((table, table), dim=-1).bfloat16()[positions][:, None] for table in (cos, sin))
        turned = []
        for part, norm in ((q, q_norm), (k, k_norm)):
            normed = functional.rms_norm(part, (LAYOUT.head_dim,), norm, EPS)
            first, second = normed.chunk(2, dim=-1)
            turned.append(normed * c + torch.cat((-second, first), dim=-1) * s)
        return torch.cat((*turned, v), dim=1).flatten(1)

    leaves = [qkv.detach().requires_grad_(), *(weight.bfloat16().requires_grad_() for _ in range(2))]
    out = torch_rotate(*leaves)
    forms: dict[str, Call] = {
        "fused": lambda: norm_rotate(qkv, *rest),
        "torch": lambda: torch_rotate(*(leaf.detach() for leaf in leaves)),
    }
    yield Case("norm_rotate", 4 * qkv.numel(), forms)
    forms = {
        "fused": lambda: norm_rotate_backward(grad, qkv, *rest),
        "torch": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
    }
    # The values' part of qkv is not read.
    values = tokens * LAYOUT.kv_heads * LAYOUT.head_dim
    yield Case("norm_rotate_backward", 6 * qkv.numel() - 2 * values, forms)


def head_cases(tokens: int, device: torch.device) -> Iterator[Case]:
    width = (LAYOUT.query_heads + 2 * LAYOUT.kv_heads) * LAYOUT.head_dim
    qkv, scales = randn(tokens, width, device=device), LayerScales(1 / 64, 1 / 64, 1 / 64)
    heads, each = heads_of(qkv, LAYOUT), (scales.q, scales.k, scales.v)
    q, k, v = (x.clone() for x in heads_of(randn(tokens, width, device=device), LAYOUT))

    def torch_codes() -> list[Tensor]:
        return [static_codes(x, scale) for x, scale in zip(heads, each, strict=True)]

    def torch_values() -> list[Tensor]:
        return [(codes.float() * scale).bfloat16() for codes, scale in zip(torch_codes(), each, strict=True)]

    def torch_gradients() -> Tensor:
        parts = zip((q, k, v), heads, limits_of(scales, "fp8"), strict=True)
        return torch.cat([grad * (x.abs() <= limit) for grad, x, limit in parts], dim=1)

    forms: dict[str, Call] = {"fused": partial(head_codes, qkv, LAYOUT, scales, "fp8"), "torch": torch_codes}
    yield Case("head_codes", 3 * qkv.numel(), forms)
    forms = {"fused": partial(head_values, qkv, LAYOUT, scales, "fp8"), "torch": torch_values}
    yield Case("head_values", 4 * qkv.numel(), forms)
    forms = {"fused": partial(head_gradients, (q, k, v), qkv, LAYOUT, scales, "fp8"), "torch": torch_gradients}
    yield Case("head_gradients", 6 * qkv.numel(), forms)


def randn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def speed(case: Case, form: str, call: Call, device: torch.device) -> Row:
    """Every input is larger than the L2 cache at the default shape, so that calls on the same ones read memory."""
    if device.type == "cpu":
        microseconds, timed = wall_microseconds(call), "wall"
    elif form == "torch":
        microseconds, timed = event_microseconds(call, calls=20), "eager"
    else:
        microseconds, timed = graph_microseconds(call), "graph"
    per_second = case.bytes / microseconds * 1e6
    return {
        "microseconds": round(microseconds, 2),
        "gb_per_s": round(per_second / 1e9, 1),
        "share_of_peak": round(per_second / PEAK, 3),
        "timed": timed,
    }


def graph_microseconds(call: Call, calls: int = 10) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return event_microseconds(graph.replay, calls=1) / calls


def event_microseconds(call: Call, calls: int) -> float:
    """Median over seven repeats, a call."""
    call()
    found = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * float(start.elapsed_time(end)) / calls)
    return statistics.median(found)


def wall_microseconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 8
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
ATTENTION_SHAPES = ((256, 1024), (256, 2048), (512, 1536), (64, 8192), (16, 2048), (4, 8192))
# Keys of a partition, blocks of a multiprocessor, stages.
VARIANTS = ((1024, 3, 2), (2048, 3, 2), (4096, 3, 2), (4096, 2, 3))
Attend = Callable[[Tensor, Tensor], None]


def attention_rows() -> Iterator[Row]:
    """A decode step's attention at every shape: our kernel's variants, then FlashAttention 3 in BF16 and FP8.

    Every call reads a cache of its own from memory (what one layer of Qwen3-8B's shape reads), within a CUDA graph of
    eight layers. GB/s counts keys and values once.
    """
    for requests, context in ATTENTION_SHAPES:
        for partition, resident, stages in VARIANTS:
            yield attention_speed(requests, context, E4M3, 16, f"ours {partition} {resident} {stages}")
        yield attention_speed(requests, context, E4M3, 16, "fp16 4096 3 2")
        for dtype in (BF16, E4M3):
            yield attention_speed(requests, context, dtype, 16, "flash")


def attention_speed(requests: int, context: int, dtype: torch.dtype, page: int, kernel: str) -> Row:
    """Microseconds of one layer's attention for one token of each request."""
    pages = requests * context // page
    # As vLLM lays it out: the values of a token's head beside its keys.
    caches = [torch.empty(pages, page, KV_HEADS, 2 * HEAD_DIM, device="cuda", dtype=dtype) for _ in range(LAYERS)]
    for cache in caches:
        cache.view(torch.uint8).random_(0, 64)  # small finite values in either type
    of_query = BF16 if kernel.startswith("fp16") else dtype
    query = torch.randn(requests, HEADS, HEAD_DIM, device="cuda", dtype=BF16).to(of_query)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(requests, -1)
    lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)
    out = torch.empty(requests, HEADS, HEAD_DIM, device="cuda", dtype=BF16)
    make = flash if kernel == "flash" else ours
    attend = make(query, caches[0][..., :HEAD_DIM], table, lengths, context, out, kernel)

    def step() -> None:
        for cache in caches:
            attend(*cache.split(HEAD_DIM, dim=-1))

    microseconds = graph_microseconds(step, calls=1) / LAYERS
    size = sum(cache.nbytes for cache in caches) / LAYERS
    row: Row = {
        "kind": "attention_decode",
        "kernel": kernel,
        "dtype": str(dtype),
        "requests": requests,
        "context": context,
        "page": page,
    }
    row |= {"microseconds": round(microseconds, 1), "gb_per_s": round(size / microseconds / 1e3)}
    return row


def ours(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, longest: int, out: Tensor, name: str) -> Attend:
    """The kernel of kernels/decode_attention.py; its name holds products, partition, resident blocks and stages."""
    form, *settings = name.split()
    products: AttentionProducts = "fp16_over_fp8_cache" if form == "fp16" else "fp8"
    shape = cache.shape, cache.stride(), HEADS // KV_HEADS
    attention = DecodeAttention(cache.device, *shape, longest, len(lengths), products, *map(int, settings))
    scales = (torch.ones((), device="cuda"),) * 3
    starts = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32)
    queries = Queries(table, starts, lengths)
    return lambda keys, values: attention(query, keys, values, queries, scales, out)


def flash(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, longest: int, out: Tensor, name: str) -> Attend:
    """FlashAttention 3 as vLLM calls it, its splits left to it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    starts = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32)
    metadata = get_scheduler_metadata(
        batch_size=len(lengths),
        max_seqlen_q=1,
        max_seqlen_k=longest,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=HEAD_DIM,
        cache_seqlens=lengths,
        qkv_dtype=query.dtype,
        cu_seqlens_q=starts,
        page_size=cache.shape[1],
        causal=True,
        window_size=(-1, -1),
        num_splits=0,
    )
    scale = torch.ones(1, device="cuda").expand(len(lengths), KV_HEADS)
    descales = {f"{name}_descale": scale for name in "qkv"} if query.dtype == E4M3 else {}
    fixed = {"cu_seqlens_q": starts, "max_seqlen_q": 1, "seqused_k": lengths, "max_seqlen_k": longest, "causal": True}
    fixed |= {"softmax_scale": HEAD_DIM**-0.5, "block_table": table, "scheduler_metadata": metadata, "fa_version": 3}
    return lambda keys, values: flash_attn_varlen_func(q=query, k=keys, v=values, out=out, **fixed, **descales)


if __name__ == "__main__":
    main()
