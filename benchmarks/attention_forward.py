"""Time attention to whole sequences on one Hopper GPU: ours in FP8 beside FlashAttention 2 and 3 in BF16.

    python -m benchmarks.attention_forward --out FILE.json

Heads are Qwen3-8B's: 32 of Q, 8 of K and V, 128 channels; 16,384 tokens, causal. `fp8` and `fp16_over_fp8_cache` are
the sequence kernel with what widens its keys; its result is compared with the decode kernel's, byte for byte, in the
same process. FlashAttention 2 is torch's, FlashAttention 3 is vLLM's. teraflops counts the products of keys that are
seen. Backward rows are those of FlashAttention 2 and of cuDNN from the kernel's log-sum-exp, and FlashAttention 2's
with a forward of its own.

PREDICTED, in milliseconds, was written after the kernel's first times and before FlashAttention 3's and those in FP16.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Row, RowFile, table
from fp8core.kernels import attention, attention_backward
from fp8core.kernels.decode_attention import DecodeAttention
from fp8core.kernels.sequence_attention import SequenceAttention, Span, batches
from fp8core.numerics.attention import QUERY_TYPES, Queries
from fp8core.numerics.fused import HeadLayout, head_codes, head_values
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import PAGE, DevicePack, PackedSequences
from fp8core.numerics.recipe import AttentionProducts

LAYOUT = HeadLayout(query_heads=32, kv_heads=8, head_dim=128)
SCALES = LayerScales(2.0**-7, 2.0**-7, 2.0**-7)
PACKS = {"16 x 1,024": [1024] * 16, "4 x 4,096": [4096] * 4, "1 x 16,384": [16_384]}
PREDICTED = {
    "16 x 1,024": {"fp8": 0.61, "fp16_over_fp8_cache": 0.63, "FlashAttention 2": 0.61, "FlashAttention 3": 0.40},
    "4 x 4,096": {"fp8": 1.51, "fp16_over_fp8_cache": 1.55, "FlashAttention 2": 1.69, "FlashAttention 3": 1.05},
    "1 x 16,384": {"fp8": 5.5, "fp16_over_fp8_cache": 5.6, "FlashAttention 2": 6.3, "FlashAttention 3": 3.8},
}
_BACKWARD = {"saved": "backward, ms", "forward again": "with a forward", "cuDNN": "by cuDNN"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    rows = RowFile(parser.parse_args().out)
    for name, lengths in PACKS.items():
        pack = DevicePack.of(PackedSequences.of(lengths), torch.device("cuda"))
        width = (LAYOUT.query_heads + 2 * LAYOUT.kv_heads) * LAYOUT.head_dim
        qkv = torch.randn(pack.sequences.tokens, width, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
        operations = 4 * LAYOUT.query_heads * LAYOUT.head_dim * sum(length * (length + 1) // 2 for length in lengths)
        for form, call in forms(qkv, pack).items():
            milliseconds = timed(call)
            rows.append(
                {
                    "kind": "attention_forward",
                    "pack": name,
                    "form": form,
                    "milliseconds": round(milliseconds, 3),
                    "teraflops": round(operations / milliseconds / 1e9),
                    "predicted": PREDICTED[name].get(form),
                }
            )
        grad = torch.randn_like(qkv[:, : LAYOUT.query_heads * LAYOUT.head_dim])
        for form, call in backwards(qkv, pack, grad).items():
            milliseconds = round(timed(call), 3)
            rows.append({"kind": "attention_backward", "pack": name, "form": form, "milliseconds": milliseconds})
        for products in QUERY_TYPES:
            differing = values_differing(qkv, pack, products)
            equal: Row = {"kind": "attention_equal", "pack": name, "form": products, "values": len(qkv) * 4096}
            rows.append({**equal, "differing": differing})
    print(whole_attention_table(rows.rows))


def whole_attention_table(rows: Sequence[Row]) -> str:
    """Attention to whole sequences, forward and backward, beside FlashAttention."""
    forward, backward, equal = (
        [row for row in rows if row["kind"] == f"attention_{kind}"] for kind in ("forward", "backward", "equal")
    )
    lines = []
    for pack in dict.fromkeys(row["pack"] for row in forward):
        by_form = {row["form"]: row for row in forward if row["pack"] == pack}
        cells = [f"{row['milliseconds']:.2f} ({row['teraflops']})" for row in by_form.values()]
        back = [f"{row['milliseconds']:.2f}" for row in backward if row["pack"] == pack]
        differing = [f"{row['differing']}" for row in equal if row["pack"] == pack]
        lines.append([pack, *cells, *back, ", ".join(differing)])
    names = [f"{name}, ms (TFLOP/s)" for name in dict.fromkeys(row["form"] for row in forward)]
    shown = [_BACKWARD[form] for form in dict.fromkeys(row["form"] for row in backward)]
    return table(["sequences", *names, *shown, "values that differ"], lines)


def forms(qkv: Tensor, pack: DevicePack) -> dict[str, Callable[[], object]]:
    """The forward in each form; codes of Q, K and V are made before."""
    heads, longest = head_values(qkv, LAYOUT, SCALES, "fp8"), pack.sequences.longest
    spans = [Span(start, n, n) for start, n in zip(pack.sequences.starts, pack.sequences.lengths, strict=False)]
    work, out = batches(spans, 4, longest, qkv.device), torch.empty_like(heads[0])
    logsumexp, of_all = torch.empty(32, len(qkv), device="cuda"), scales()
    made: dict[str, Callable[[], object]] = {}
    for products in QUERY_TYPES:
        query, keys, values = codes(qkv, products)
        ours = SequenceAttention(qkv.device, keys.shape, keys.stride(), 4, longest, products)
        made[products] = partial(ours, query, keys, values, pack.pages, work, of_all, out, logsumexp)
    made["FlashAttention 2"] = lambda: attention._flash_attention(heads, pack)
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func as flash
    except ImportError:
        return made
    q, k, v = heads
    bounds = {f"cu_seqlens_{side}": pack.starts for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}
    return made | {"FlashAttention 3": lambda: flash(q, k, v, **bounds, causal=True, fa_version=3)}


def backwards(qkv: Tensor, pack: DevicePack, grad: Tensor) -> dict[str, Callable[[], object]]:
    """The backward of FP8 attention from what its forward saved, and with a forward of FlashAttention."""
    heads, longest = head_values(qkv, LAYOUT, SCALES, "fp8"), pack.sequences.longest
    saved = attention.fp8_attention(qkv, LAYOUT, pack, SCALES, "fp8", longest).for_backward
    made: dict[str, Callable[[], object]] = {
        "saved": lambda: attention_backward.flash_gradients(grad, heads, saved, pack),
        "forward again": lambda: attention_backward.flash_gradients(
            grad, heads, attention._flash_attention(heads, pack), pack
        ),
    }
    parts = attention_backward.parts_of(pack.sequences, LAYOUT)
    if attention_backward.library(LAYOUT.head_dim, qkv.device) is not None and parts:
        made["cuDNN"] = lambda: attention_backward.cudnn_gradients(grad, heads, saved, parts)
    return made


def values_differing(qkv: Tensor, pack: DevicePack, products: AttentionProducts) -> int:
    """Values of a pack that are not the decode kernel's."""
    (query, keys, values), longest = codes(qkv, products), pack.sequences.longest
    kernel = DecodeAttention(qkv.device, keys.shape, keys.stride(), 4, longest, 8192, products)
    owners, seen = pack.sequences.owners.cuda(), (pack.sequences.offsets + 1).int().cuda()
    each = torch.arange(len(query) + 1, dtype=torch.int32, device="cuda")
    expected = torch.empty(query.shape, dtype=torch.bfloat16, device="cuda")
    kernel(query, keys, values, Queries(pack.pages[owners], each, seen), scales(), expected)
    found = attention.fp8_attention(qkv, LAYOUT, pack, SCALES, products, longest).out
    return int((found.view(torch.int16) != expected.flatten(1).view(torch.int16)).sum())


def codes(qkv: Tensor, products: AttentionProducts) -> tuple[Tensor, Tensor, Tensor]:
    """Q by token, as the products take it; K and V by page."""
    query, key, value = head_codes(qkv, LAYOUT, SCALES, products)
    keys, values = (part.view(-1, PAGE, *part.shape[1:]) for part in (key, value))
    return query, keys, values


def scales() -> tuple[Tensor, Tensor, Tensor]:
    """On the device."""
    q, k, v = (torch.tensor(scale, device="cuda") for scale in (SCALES.q, SCALES.k, SCALES.v))
    return q, k, v


def timed(call: Callable[[], object], calls: int = 20) -> float:
    """Milliseconds of a call, its launches included."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


if __name__ == "__main__":
    main()
