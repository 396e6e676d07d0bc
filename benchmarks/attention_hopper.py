"""Time FlashAttention 3's decode over a paged cache on a Hopper GPU, in BF16 and FP8, by size of page and of split.

    python benchmarks/attention_hopper.py --out FILE.json

Every call reads a cache of its own from memory (what one layer of Qwen3-8B's shape reads), within a CUDA graph of
eight layers. GB/s counts keys and values once.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from fp8core.store.versions import git_state, library_versions

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Time FlashAttention 3's decode.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    about = {"commit": git_state(Path(__file__).parents[1]), "versions": library_versions()}
    about["command"] = " ".join(["python benchmarks/attention_hopper.py", *sys.argv[1:]])
    rows = []
    for requests, context in ((256, 1024), (256, 2048)):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for page in (16, 64, 128):
                for splits in (0, 1, 2, 4):
                    row = measure(requests, context, dtype, page, splits)
                    print(json.dumps(row), flush=True)
                    rows.append({"kind": "attention_decode", **row, **about})
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


def measure(requests: int, context: int, dtype: torch.dtype, page: int, splits: int) -> dict[str, Any]:
    """Microseconds of one layer's attention for one token of each request."""
    pages = requests * context // page
    caches = [torch.empty(2, pages, page, KV_HEADS, HEAD_DIM, device="cuda", dtype=dtype) for _ in range(LAYERS)]
    for cache in caches:
        cache.view(torch.uint8).random_(0, 64)  # small finite values in either type
    query = torch.randn(requests, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).to(dtype)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(requests, -1)
    lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
    metadata = get_scheduler_metadata(
        batch_size=requests,
        max_seqlen_q=1,
        max_seqlen_k=context,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=HEAD_DIM,
        cache_seqlens=lengths,
        qkv_dtype=dtype,
        cu_seqlens_q=starts,
        page_size=page,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )
    scale = torch.ones(1, device="cuda").expand(requests, KV_HEADS)
    descales = {f"{name}_descale": scale for name in "qkv"} if dtype != torch.bfloat16 else {}
    out = torch.empty(requests, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for cache in caches:
            flash_attn_varlen_func(
                q=query,
                k=cache[0],
                v=cache[1],
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=context,
                softmax_scale=HEAD_DIM**-0.5,
                causal=True,
                block_table=table,
                scheduler_metadata=metadata,
                fa_version=3,
                num_splits=splits,
                **descales,
            )

    microseconds = _median_microseconds(step) / LAYERS
    size = sum(cache.nbytes for cache in caches) / LAYERS
    found = {"dtype": str(dtype), "requests": requests, "context": context, "page": page, "splits": splits}
    return found | {"microseconds": round(microseconds, 1), "gb_per_s": round(size / microseconds / 1e3)}


def _median_microseconds(step: Any) -> float:
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
