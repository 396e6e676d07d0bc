"""Bytes and speed of the Triton kernels on one H200, beside other implementations of the same thing.

    python -m benchmarks.kernels_hopper --out DIR

Writes DIR/kernels_hopper.json after every part, so that what was measured is kept when a later part fails: differing
bytes over the cases of `kernel_cases.py`, then GB/s and microseconds. GB/s counts what has to be read and written once.
`microseconds` is GPU time from a CUDA graph of calls on alternating inputs larger than the L2 cache, or (`timed` is
"eager") the time per call of a queue of calls, launches included, for what cannot be captured.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Row, RowFile
from benchmarks.kernel_cases import cases
from fp8core.kernels.fingerprint import launched, programs_of
from fp8core.numerics.e4m3 import (
    FiniteFlag,
    encode,
    quantise_columns,
    quantise_rows,
    quantise_tiles,
    row_and_column_codes,
    row_codes,
    tile_codes,
)
from fp8core.numerics.fingerprint import bytes_in_order, fingerprint, fingerprints, hex_digits
from fp8core.numerics.logprobs import drawn_tokens
from fp8core.numerics.recipe import FP32, POW2, RECIPES, Recipe
from fp8core.numerics.support import truncated
from fp8core.numerics.truncation import Truncation

Calls = Sequence[Callable[[], Any]]

SHAPES = [(8192, 4096), (8192, 12288), (16384, 4096)]
COMPILED_SHAPE = (16384, 4096)
ONE_RULE = (POW2, FP32)
# One decoder layer of Qwen3-8B as vLLM holds it: qkv, o, gate and up, down.
LINEARS = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
LAYERS, VOCABULARY, HIDDEN = 36, 151_936, 4096
INPUTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", help="one of them alone, or several")
    arguments = parser.parse_args()
    rows = RowFile(arguments.out / "kernels_hopper.json")
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        ("bytes", differing_bytes),
        ("quantise", quantise_speed),
        ("fingerprint", fingerprint_speed),
        ("truncation", truncation_rows),
        ("peers", peer_speed),
        ("compile", compiled_speed),
    ]
    for name, part in parts:
        if arguments.part and name not in arguments.part:
            continue
        start = time.perf_counter()
        for row in part():
            rows.append({"kind": name, **row, "versions": versions()})
            print(json.dumps(row), flush=True)
        rows.append({"kind": "part_seconds", "part": name, "seconds": time.perf_counter() - start})


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("torch", "triton", "vllm", "transformer_engine"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# Bytes


def differing_bytes() -> list[Row]:
    """Number of codes and scales that differ from the reference on the CPU: the kernels', and torch's on the GPU."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for recipe in RECIPES.values():
            total = {"cases": 0, "elements": 0, "kernel_codes": 0, "kernel_scales": 0, "torch_codes": 0, "flags": 0}
            worst: list[str] = []
            for case in cases(dtype):
                found = _differences(case.x, recipe)
                if any(found.values()):
                    worst.append(case.name)
                for name, value in ({"cases": 1, "elements": case.x.numel()} | found).items():
                    total[name] += value
            rows.append({"dtype": str(dtype), "rule": recipe.name, **total, "differing": worst[:8]})
    return [*rows, *_fingerprint_differences()]


def _differences(x: Tensor, recipe: Recipe) -> dict[str, int]:
    flag = FiniteFlag(torch.device("cuda"))
    on_gpu, wide = x.cuda(), x.float()
    by_row, by_column = row_and_column_codes(on_gpu, recipe.activations, recipe.tokens, flag)
    pairs = [
        (quantise_rows, recipe.activations, row_codes(on_gpu, recipe.activations, flag)),
        (quantise_rows, recipe.activations, by_row),
        (quantise_columns, recipe.tokens, by_column),
        (quantise_tiles, recipe.weights, tile_codes(on_gpu, recipe.weights, flag)),
    ]
    codes = scales = other = 0
    for reference, grouping, (kernel_codes, kernel_scales) in pairs:
        grid, expected = reference(wide, grouping)
        codes += _unequal(kernel_codes, encode(grid))
        scales += int((kernel_scales.cpu() != expected).sum())
        other += _unequal(encode(reference(wide.cuda(), grouping)[0]), encode(grid))
    return {"kernel_codes": codes, "kernel_scales": scales, "torch_codes": other, "flags": int(flag.not_finite)}


def _unequal(found: Tensor, expected: Tensor) -> int:
    return int((found.cpu().view(torch.uint8) != expected.cpu().view(torch.uint8)).sum())


def _fingerprint_differences() -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    lengths = [*range(18), 8191, 8192, 8193, (1 << 19) - 1, 1 << 19, (1 << 19) + 9, 3_000_001]
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in lengths]
    found = fingerprints([tensor.cuda() for tensor in tensors])
    wrong = sum(a != fingerprint(b) for a, b in zip(found, tensors, strict=True))
    return [{"fingerprints": len(tensors), "differing": wrong}]


# Time


def graph_microseconds(calls: Calls, repeats: int = 5) -> float:
    """Median GPU time per call of a CUDA graph of four rounds over the calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            for call in calls:
                call()
    graph.replay()
    return statistics.median(_elapsed(graph.replay) for _ in range(repeats)) / (4 * len(calls))


def eager_microseconds(calls: Calls, repeats: int = 5) -> float:
    """Median time per call of a queue of calls, with what the host needs to launch them."""
    for call in calls:
        call()

    def all_calls() -> None:
        for call in calls:
            call()

    return statistics.median(_elapsed(all_calls) for _ in range(repeats)) / len(calls)


def _elapsed(work: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def speed(what: Row, number_of_bytes: int, microseconds: float, timed: str = "graph") -> Row:
    return {
        **what,
        "microseconds": round(microseconds, 2),
        "gb_per_s": round(number_of_bytes / microseconds / 1e3, 1),
        "timed": timed,
    }


def inputs(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(INPUTS)]


def traffic(x: Tensor, outputs: int) -> int:
    """Bytes that have to move: the tensor once and `outputs` codes per element (scales, at most 1 % more, left out)."""
    return x.numel() * (x.element_size() + outputs)


# The kernels


def quantise_speed() -> list[Row]:
    rows = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            xs = inputs(shape, dtype)
            what: Row = {"shape": shape, "dtype": str(dtype)}
            target = torch.empty_like(xs[0])
            copies = [(lambda x=x, target=target: target.copy_(x)) for x in xs]
            rows.append(speed({"kernel": "copy", **what}, 2 * xs[0].nbytes, graph_microseconds(copies)))
            for recipe in RECIPES.values():
                rows += _kernel_rows(xs, recipe, what)
        rows += [row for recipe in ONE_RULE for row in _reference_rows(inputs(shape), recipe, shape)]
    return [*rows, *_model_rows()]


def _kernel_rows(xs: list[Tensor], recipe: Recipe, what: Row) -> list[Row]:
    flag = FiniteFlag(torch.device("cuda"))
    kernels: list[tuple[str, Any, int]] = [
        ("rows", lambda x: row_codes(x, recipe.activations, flag), 1),
        ("rows and columns", lambda x: row_and_column_codes(x, recipe.activations, recipe.tokens, flag), 2),
        ("tiles", lambda x: tile_codes(x, recipe.weights, flag), 1),
    ]
    rows = []
    for name, kernel, outputs in kernels:
        calls = [(lambda x=x, kernel=kernel: kernel(x)) for x in xs]
        row = speed({"kernel": name, "rule": recipe.name, **what}, traffic(xs[0], outputs), graph_microseconds(calls))
        rows.append({**row, "eager_microseconds": round(eager_microseconds(calls * 4), 2)})
    return rows


def reference_rows(x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    grid, scales = quantise_rows(x.float(), recipe.activations)
    return encode(grid), scales


def reference_rows_and_columns(x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grid, scales = quantise_columns(x.float(), recipe.tokens)
    return (*reference_rows(x, recipe), encode(grid), scales)


def reference_tiles(x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    grid, scales = quantise_tiles(x.float(), recipe.weights)
    return encode(grid), scales


REFERENCES: list[tuple[str, Callable[[Tensor, Recipe], tuple[Tensor, ...]], int]] = [
    ("rows", reference_rows, 1),
    ("rows and columns", reference_rows_and_columns, 2),
    ("tiles", reference_tiles, 1),
]


def _reference_rows(xs: list[Tensor], recipe: Recipe, shape: tuple[int, int]) -> list[Row]:
    rows = []
    for name, reference, outputs in REFERENCES:
        calls = [(lambda x=x, reference=reference: reference(x, recipe)) for x in xs]
        what = {"kernel": f"torch reference, {name}", "rule": recipe.name, "shape": shape, "dtype": str(xs[0].dtype)}
        rows.append(speed(what, traffic(xs[0], outputs), eager_microseconds(calls, repeats=3), "eager"))
    return rows


def _model_rows() -> list[Row]:
    """All linears of Qwen3-8B in tiles, from BF16: what a weight sync quantises."""
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in LINEARS * LAYERS]
    flag = FiniteFlag(torch.device("cuda"))
    rows = []
    for recipe in ONE_RULE:
        calls = [lambda recipe=recipe: [tile_codes(weight, recipe.weights, flag) for weight in weights]]
        what = {"kernel": "tiles of all linears of Qwen3-8B", "rule": recipe.name, "tensors": len(weights)}
        moved = sum(traffic(weight, 1) for weight in weights)
        rows.append(speed(what, moved, eager_microseconds(calls), "eager"))
    return rows


def fingerprint_speed() -> list[Row]:
    """Qwen3-8B's block-FP8 weights, scales, norms and head: 8.2 GB in 325 tensors."""
    tensors = []
    for _ in range(LAYERS):
        for out, columns in LINEARS:
            tensors.append(torch.randint(0, 256, (out, columns), dtype=torch.uint8, device="cuda"))
            tensors.append(torch.rand(out // 128, columns // 128, device="cuda"))
        tensors.append(torch.randn(2, HIDDEN, device="cuda", dtype=torch.bfloat16))
    tensors.append(torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16))
    total = sum(tensor.nbytes for tensor in tensors)
    what: Row = {"kernel": "fingerprint", "tensors": len(tensors), "bytes": total}

    pieces = [bytes_in_order(tensor) for tensor in tensors]
    table, owners = programs_of(pieces, [0] * len(pieces), [piece.numel() for piece in pieces])
    reduction = eager_microseconds([lambda: launched(table, owners)] * 4)
    wall = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = fingerprints(tensors)
        wall.append(1e6 * (time.perf_counter() - start))
    assert found == hex_digits(launched(table, owners).cpu().numpy())

    on_cpu = [fingerprint(tensor.cpu()) for tensor in tensors[:9]]
    return [
        speed(what, total, reduction, "eager"),
        speed({**what, "kernel": "fingerprint, tables and read-back"}, total, statistics.median(wall), "wall"),
        {"kernel": "fingerprint", "differ_from_torch_cpu": sum(a != b for a, b in zip(found, on_cpu, strict=False))},
    ]


def truncation_rows() -> list[Row]:
    """256 rows of Qwen3-8B's logits, flat as of random weights or steep as of a trained policy: tokens that differ from
    the reference on the CPU (of 8 rows), and time beside that of the draw and of vLLM's sort."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    rows = []
    seeds, ones = torch.arange(256, device="cuda"), torch.ones(256, device="cuda")
    for name, spread in (("flat", 0.5), ("steep", 4.0)):
        xs = [spread * x for x in inputs((256, VOCABULARY), torch.float32)[:2]]
        for cut in (Truncation(top_p=0.95), Truncation(top_k=20), Truncation(20, 0.95, 0.01), Truncation(min_p=0.05)):
            found = truncated(xs[0], 1.0, cut)
            unequal = int((found[:8].cpu() != truncated(xs[0][:8].cpu(), 1.0, cut)).sum())
            calls = [(lambda x=x, cut=cut: truncated(x, 1.0, cut)) for x in xs]
            what: Row = {"kernel": "truncation", **vars(cut), "logits": name, "differing": unequal}
            what["mean_support"] = float(found.isfinite().sum(-1).float().mean())
            row = speed(what, 2 * xs[0].nbytes, graph_microseconds(calls))
            rows.append({**row, "eager_microseconds": round(eager_microseconds(calls * 4), 2)})
        draws = [(lambda x=x: drawn_tokens(x, ones, seeds, seeds)) for x in xs]
        rows.append(speed({"kernel": "draw", "logits": name}, xs[0].nbytes, eager_microseconds(draws * 4), "eager"))
        sorts = [(lambda x=x: apply_top_k_top_p(x.clone(), (20 * ones).long(), 0.95 * ones)) for x in xs]
        rows.append(speed({"kernel": "vLLM", "logits": name}, xs[0].nbytes, eager_microseconds(sorts * 4), "eager"))
    return rows


# Others


def compiled_speed() -> list[Row]:
    """torch.compile of the reference, which stops at the check for NaN; Inductor divides approximately."""
    xs, rows = inputs(COMPILED_SHAPE), []
    for recipe in ONE_RULE:
        for name, reference, outputs in REFERENCES:
            compiled = torch.compile(reference, dynamic=False)
            what = {"kernel": f"torch.compile, {name}", "rule": recipe.name, "shape": COMPILED_SHAPE}
            unequal = sum(
                _unequal(a, b)
                for a, b in zip(compiled(xs[0], recipe), reference(xs[0], recipe), strict=True)
                if a.dtype == torch.float8_e4m3fn
            )
            calls = [(lambda x=x, recipe=recipe, compiled=compiled: compiled(x, recipe)) for x in xs]
            row = speed(what, traffic(xs[0], outputs), eager_microseconds(calls * 4), "eager")
            rows.append({**row, "dtype": str(xs[0].dtype), "codes_that_differ": unequal})
    return rows


def peer_speed() -> list[Row]:
    """vLLM's and Transformer Engine's quantisers where they can be imported; one that cannot be used is named."""
    rows: list[Row] = []
    for name, peer in (("vllm", _vllm_rows), ("transformer_engine", _transformer_engine_rows)):
        try:
            rows += peer()
        # A library of another version may lack a name or refuse an argument; the other measurements are kept.
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
            rows.append({"kernel": name, "not_measured": f"{type(error).__name__}: {error}"[:500]})
    return rows


def _vllm_rows() -> list[Row]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    rows = []
    for shape in SHAPES:
        xs = inputs(shape)
        for recipe in ONE_RULE:
            pow2 = recipe is POW2
            calls = [
                (lambda x=x, pow2=pow2: per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=pow2))
                for x in xs
            ]
            what = {"kernel": "vLLM, rows", "rule": recipe.name, "shape": shape, "dtype": str(xs[0].dtype)}
            row = speed(what, traffic(xs[0], 1), graph_microseconds(calls))
            rows.append({**row, "codes_that_differ": _unequal(calls[0]()[0], reference_rows(xs[0], recipe)[0])})
    return rows


def _transformer_engine_rows() -> list[Row]:
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    rows = []
    forms = [("rows", 1, False, 1), ("rows and columns", 1, True, 2), ("tiles", 2, False, 1)]
    for shape in SHAPES:
        xs = inputs(shape)
        for recipe in ONE_RULE:
            for (name, dimensions, columns, outputs), (_, reference, _) in zip(forms, REFERENCES, strict=True):
                quantiser = Float8BlockQuantizer(
                    tex.DType.kFloat8E4M3,
                    rowwise=True,
                    columnwise=columns,
                    amax_epsilon=0.0,
                    force_pow_2_scales=recipe is POW2,
                    block_scaling_dim=dimensions,
                )
                calls = [(lambda x=x, quantiser=quantiser: quantiser(x)) for x in xs]
                what = {
                    "kernel": f"Transformer Engine, {name}",
                    "rule": recipe.name,
                    "shape": shape,
                    "dtype": str(xs[0].dtype),
                }
                row = speed(what, traffic(xs[0], outputs), eager_microseconds(calls * 8), "eager")
                codes = calls[0]()._rowwise_data.view(torch.float8_e4m3fn)
                rows.append({**row, "codes_that_differ": _unequal(codes, reference(xs[0], recipe)[0])})
    return rows


if __name__ == "__main__":
    main()
