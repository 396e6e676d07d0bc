"""Time the attention of a decode step over a paged cache on a Hopper GPU: ours, and FlashAttention 3's.

    python benchmarks/attention_hopper.py --out FILE.json [--only ours|flash]

Every call reads a cache of its own from memory (what one layer of Qwen3-8B's shape reads), within a CUDA graph of
eight layers. GB/s counts keys and values once.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.decode_attention import DecodeAttention, Queries
from fp8core.store.versions import git_state, library_versions

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 8
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHAPES = ((256, 1024), (256, 2048), (512, 1536), (64, 8192), (16, 2048), (4, 8192))
# Keys of a partition, blocks of a multiprocessor, stages.
VARIANTS = ((1024, 3, 2), (2048, 3, 2), (4096, 3, 2), (4096, 2, 3))
Attend = Callable[[Tensor, Tensor], None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the attention of a decode step.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["ours", "flash"])
    options = parser.parse_args()
    about = {"commit": git_state(Path(__file__).parents[1]), "versions": library_versions()}
    about["command"] = " ".join(["python benchmarks/attention_hopper.py", *sys.argv[1:]])
    rows: list[dict[str, Any]] = []
    for requests, context in SHAPES:
        for page in (16,):
            if options.only != "flash":
                rows += [measure(requests, context, E4M3, page, f"ours {p} {r} {s}") for p, r, s in VARIANTS]
            if options.only != "ours":
                rows += [measure(requests, context, dtype, page, "flash") for dtype in (BF16, E4M3)]
    options.out.write_text(json.dumps([{"kind": "attention_decode", **row, **about} for row in rows], indent=1) + "\n")


def measure(requests: int, context: int, dtype: torch.dtype, page: int, kernel: str) -> dict[str, Any]:
    """Microseconds of one layer's attention for one token of each request."""
    pages = requests * context // page
    # As vLLM lays it out: the values of a token's head beside its keys.
    caches = [torch.empty(pages, page, KV_HEADS, 2 * HEAD_DIM, device="cuda", dtype=dtype) for _ in range(LAYERS)]
    for cache in caches:
        cache.view(torch.uint8).random_(0, 64)  # small finite values in either type
    query = torch.randn(requests, HEADS, HEAD_DIM, device="cuda", dtype=BF16).to(dtype)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(requests, -1)
    lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)
    out = torch.empty(requests, HEADS, HEAD_DIM, device="cuda", dtype=BF16)
    make = flash if kernel == "flash" else ours
    attend = make(query, caches[0][..., :HEAD_DIM], table, lengths, context, out, kernel)

    def step() -> None:
        for cache in caches:
            attend(*cache.split(HEAD_DIM, dim=-1))

    microseconds = _median_microseconds(step) / LAYERS
    size = sum(cache.nbytes for cache in caches) / LAYERS
    row = {"kernel": kernel, "dtype": str(dtype), "requests": requests, "context": context, "page": page}
    row |= {"microseconds": round(microseconds, 1), "gb_per_s": round(size / microseconds / 1e3)}
    print(json.dumps(row), flush=True)
    return row


def ours(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, longest: int, out: Tensor, name: str) -> Attend:
    """The kernel of fp8core/numerics/decode_attention.py; its name holds partition, resident blocks and stages."""
    settings = map(int, name.split()[1:])
    attention = DecodeAttention(
        cache.device, cache.shape, cache.stride(), HEADS // KV_HEADS, longest, len(lengths), *settings
    )
    scales = (torch.ones((), device="cuda"),) * 3
    starts = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32)
    queries = Queries(table, starts[:-1], starts, lengths)
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


def _median_microseconds(step: Callable[[], None]) -> float:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[Tensor] = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(torch.tensor(begin.elapsed_time(end) * 1e3))
    return float(torch.stack(times).median())


if __name__ == "__main__":
    main()
