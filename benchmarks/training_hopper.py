"""Time full training steps of real model shapes with the torch trainer on one Hopper GPU, BF16 beside block FP8.

    python -m benchmarks.training_hopper --out FOLDER [--seconds 500] CELL [CELL ...]

A cell is a process of its own and writes FOLDER/CELL.json. A step is what `Trainer.step` does: quantising weights,
forward and backward over packed sequences of 4,096 tokens, log-probs and loss, clipping, AdamW, digest. Weights are
random, made on the GPU. Rows have kind="training"; the last step of a cell is traced by part (kind="training_trace").

Predicted before the first measurement (Qwen3-8B's shape; microseconds a token):

| part | BF16 | block FP8 | from |
| --- | --- | --- | --- |
| GEMMs of the layers, 41.7 GFLOP | 59.6 | 36.1 | 700 TFLOP/s; 1,250 (fprop, dgrad) and 1,000 (wgrad) |
| head and log-probs, 7/8 of the tokens | 6.2 | 6.2 | 5 GFLOP at 700 TFLOP/s |
| attention | 13 | 13 | FlashAttention 2: 400 TFLOP/s forward, 300 backward |
| norms, rotary, SwiGLU, quantisers | 5.4 | 7.2 | bytes at 4 TB/s |
| optimiser, weight codes, norm of gradients | 0.8 | 1.2 | 65,536 tokens a step |
| all | 85 | 64 | 1.33x; with layers computed again (as 8B needs on one GPU) 110 and 81, 1.36x |

Then measured, in seconds a step of 65,536 tokens: 7.98 in BF16, 5.95 in block FP8, 8.78 with FP8 attention. Predicted
before later changes: 7.68, 5.65 and 7.13 with attention's forward once and kernels of its codes; 7.0, 5.2 and 5.0 with
products computed once whose result joins the stream, and a fused head (it gave 7.09 in BF16, 5.19 with FP8 attention);
6.85 and 4.85 with weights' gradients added by their GEMM, and attention's backward by cuDNN.

Predicted before the first measurement with experts (`predicted`, tokens a second; 12 layers of Qwen3-30B-A3B): 1.31 s a
step in BF16, of which products take 0.75 and what rows of experts move 0.2. Codes halve some of the latter, and groups
of 128 are half full: 1.05x.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine_cases import compile_pass, qwen3_30b_a3b
from benchmarks.harness import ROOT, part_of, provenance, write_rows
from flows.environment import kernel_folders
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, OptimiserConfig, TrainingConfig
from fp8core.kernels import attention_backward
from fp8core.kernels.compilation import Job, release_memory
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.families import parameter_shapes
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics import grouped
from fp8core.numerics.grouped import GROUP_MULTIPLE, expert_rows
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import ChunkedHead
from fp8core.numerics.recipe import RecipeName
from fp8core.resources.kernels import Product, gradient_products, layer_products, weight_gradient_products
from fp8core.resources.memory import count_parameters
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.objective import Objective
from fp8core.training.packed.entry import required_environment
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

SEQUENCE, PROMPT = 4096, 512
PEAK_TFLOPS = 989.0
_QWEN3 = {"family": "qwen3", "vocab_size": 151_936, "intermediate_size": 12_288, "num_layers": 36}
_LLAMA = {"family": "llama", "vocab_size": 128_256, "intermediate_size": 14_336, "num_layers": 32}
_SHARED = {
    **{"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "max_positions": 8192, "rope_scaling": None, "tie_embeddings": False},
}
SMALL = {
    **_QWEN3,
    **{"vocab_size": 512, "hidden_size": 768, "intermediate_size": 2048, "num_layers": 12},
    **{"num_heads": 6, "num_kv_heads": 2},
}
# Eight layers of Qwen3's proportions, to find the width from which on FP8 pays.
WIDTHS = (1024, 2048, 3072, 4096)
MODELS: dict[str, dict[str, Any]] = {
    **{
        f"width-{width}": {
            **{**_SHARED, **_QWEN3, "vocab_size": 512, "num_layers": 8, "hidden_size": width},
            **{"intermediate_size": 3 * width, "num_heads": width // 128, "num_kv_heads": width // 512},
        }
        for width in WIDTHS
    },
    "qwen3-8b": {**_SHARED, **_QWEN3},
    "llama-3.1-8b": {**_SHARED, **_LLAMA},
    "small": {**_SHARED, **SMALL},
    "qwen3-30b-a3b": vars(qwen3_30b_a3b()),
}
PRECISIONS = {
    "bf16": {"linear": "bf16", "kv_cache": "bf16"},
    "fp8_block": {"linear": "fp8_block", "kv_cache": "bf16"},
    "fp8_block_kv": {"linear": "fp8_block", "kv_cache": "fp8"},
}


@dataclass(frozen=True)
class Cell:
    """A model, a precision, and how it is trained."""

    model: str
    precision: str
    layers: int | None = None
    sequences: int = 16
    tokens_per_pass: int = 16_384
    checkpointing: bool = True
    deterministic: bool = False
    rule: RecipeName = "fp32_activations"
    repeats: int = 2
    predicted: float | None = None
    """Tokens a second."""


# As many as have room: masters, moments and gradients have 12 bytes a parameter, weights of a pass 2.
SPARSE_LAYERS = 12
# Tokens of a pass, precision, tokens a second predicted.
_SPARSE = (
    (16_384, "fp8_block_kv", 52_500),
    (16_384, "bf16", 50_000),
    (32_768, "fp8_block_kv", 56_700),
    (32_768, "bf16", 54_000),
)
_BF16_PRODUCTS = ("grouped_bf16_gemm", "grouped_bf16_input_gradient", "grouped_bf16_weight_gradient")
CELLS = {
    **{f"qwen3-8b/{p}": Cell("qwen3-8b", p) for p in PRECISIONS},
    **{f"llama-3.1-8b/{p}": Cell("llama-3.1-8b", p) for p in ("bf16", "fp8_block")},
    **{f"qwen3-8b/18/{p}": Cell("qwen3-8b", p, layers=18, checkpointing=False) for p in ("bf16", "fp8_block")},
    **{
        f"qwen3-8b/kept/{p}": Cell("qwen3-8b", p, tokens_per_pass=4096, checkpointing=False)
        for p in ("bf16", "fp8_block_kv")
    },
    "qwen3-8b/fp8_block_kv/pow2": Cell("qwen3-8b", "fp8_block_kv", rule="pow2"),
    "qwen3-8b/fp8_block/deterministic": Cell("qwen3-8b", "fp8_block", deterministic=True),
    **{f"small/{p}": Cell("small", p, checkpointing=False) for p in PRECISIONS},
    **{f"width/{w}/{p}": Cell(f"width-{w}", p, checkpointing=False) for w in WIDTHS for p in ("bf16", "fp8_block")},
    **{
        f"qwen3-30b-a3b/{n}/{p}": Cell(
            "qwen3-30b-a3b", p, layers=SPARSE_LAYERS, tokens_per_pass=n, repeats=5, predicted=speed
        )
        for n, p, speed in _SPARSE
    },
}


class RandomMasters(Mapping[str, Tensor]):
    """Weights that are drawn on the device when they are read: 8 billion of them do not fit twice."""

    def __init__(self, arch: Architecture, device: torch.device) -> None:
        self._shapes, self._device = parameter_shapes(arch), device

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, device=self._device) * 0.02

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time training steps of real model shapes on one Hopper GPU.")
    parser.add_argument("cells", nargs="+", choices=list(CELLS), metavar="CELL", help=", ".join(CELLS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=560.0, help="budget; what runs longer is ended")
    parser.add_argument("--device", default="cuda", help="cpu tries the script with a model of 2 small layers")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        torch.set_num_threads(1)  # as the configurations for a GPU
        name = options.cells[0]
        measure(CELLS[name], torch.device(options.device), options.out / f"{name.replace('/', '-')}.json")
        return
    deadline = time.monotonic() + options.seconds
    for name in options.cells:
        command = [sys.executable, "-m", "benchmarks.training_hopper", name, "--inside"]
        command += [f"--out={options.out.absolute()}", f"--device={options.device}"]
        try:
            subprocess.run(command, cwd=ROOT, timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{name}: out of time", flush=True)


def architecture(cell: Cell, device: torch.device) -> Architecture:
    """The shape of a cell; on a CPU, two layers of 256."""
    shape = MODELS[cell.model] | ({} if cell.layers is None else {"num_layers": cell.layers})
    if device.type == "cpu":
        shape |= {"num_layers": 2, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 512}
        shape |= {"num_heads": 2, "num_kv_heads": 1}
        if (experts := shape.get("experts")) is not None:
            shape |= {"experts": replace(experts, intermediate_size=128)}
    return Architecture(**shape)


def trainer_of(cell: Cell, arch: Architecture, device: torch.device) -> PackedTrainer:
    """A trainer of random weights, as `training.registry` builds it."""
    side = PRECISIONS[cell.precision]
    points = {"rounding_points": "kernels", "scale_rule": cell.rule}
    contract = PrecisionContract.model_validate({"rollout": side, "training": side, **points})
    training = TrainingConfig(
        device="cuda",
        optimiser=OptimiserConfig(state="bf16"),
        tokens_per_pass=cell.tokens_per_pass,
        activation_checkpointing=cell.checkpointing,
        deterministic=cell.deterministic,
    )
    os.environ.update(required_environment(training))
    sides = (formats(contract, arch.num_layers) for formats in (training_formats, rollout_formats))
    formats = PackedFormats(*sides, longest=SEQUENCE)
    objective = Objective(LossConfig(), CorrectionConfig())
    return PackedTrainer(arch, RandomMasters(arch, device), formats, training, objective, device)


def compile_products(cell: Cell, arch: Architecture) -> None:
    """DeepGEMM's kernels of one pass, on all processors: one after another they take a minute."""
    tokens, experts = cell.tokens_per_pass, arch.experts
    rows, folder = range(tokens, tokens + 1), kernel_folders().deep_gemm
    chunk = min(tokens, ChunkedHead.chunk_elements // arch.vocab_size)
    products, jobs = [Product("bf16", arch.vocab_size, arch.hidden_size, (chunk,))], list[Job]()
    if cell.precision != "bf16":
        products += [*layer_products(arch, rows), *gradient_products(arch, rows), *weight_gradient_products(arch, rows)]
    elif experts is not None:
        products.append(Product("bf16", experts.count, arch.hidden_size, rows))
        shapes = (2 * experts.intermediate_size, arch.hidden_size), (arch.hidden_size, experts.intermediate_size)
        for arguments in [(experts, *shape, tokens, name) for shape in shapes for name in _BF16_PRODUCTS]:
            jobs.append(Job("products of experts in BF16", f"{arguments}", folder, multiply_experts, arguments))
    compile_pass(products, jobs)


def multiply_experts(experts: Experts, outputs: int, inputs: int, tokens: int, name: str) -> None:
    """A product of all experts in BF16, of zeros, by its name in `numerics.grouped`."""
    places = torch.arange(tokens * experts.per_token, device="cuda").view(tokens, -1)
    rows = expert_rows(places % experts.count, experts.count, GROUP_MULTIPLE)
    narrow = partial(torch.zeros, dtype=torch.bfloat16, device="cuda")
    x, grad = (narrow(len(rows.slots), columns) for columns in (inputs, outputs))
    weights = narrow(experts.count, outputs, inputs)
    if name == "grouped_bf16_weight_gradient":
        grouped.grouped_bf16_weight_gradient(grad, x, rows, weights.float())
    else:
        getattr(grouped, name)(x if name == "grouped_bf16_gemm" else grad, weights, rows)
    release_memory()


def random_batch(arch: Architecture, sequences: int, length: int, prompt: int) -> RolloutBatch:
    """Rows of one length with log-probs near those of random weights."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, arch.vocab_size, (sequences, length), generator=generator)
    rows = TokenBatch.of(tokens[:, :prompt].tolist(), tokens[:, prompt:].tolist())
    mask = torch.ones(sequences, length - prompt, dtype=torch.bool)
    near = torch.full(mask.shape, -float(torch.tensor(arch.vocab_size).log()))
    advantages = torch.randn(sequences, generator=generator)
    return RolloutBatch(rows, mask, near, near, None, advantages, torch.ones(sequences, dtype=torch.bool))


def measure(cell: Cell, device: torch.device, out: Path) -> None:
    """Time one cell: a step to warm up, two or more that count, one traced."""
    arch, small = architecture(cell, device), device.type == "cpu"
    if not small:
        compile_products(cell, arch)
    sequence = 256 if small else SEQUENCE
    trainer = trainer_of(cell, arch, device)
    batch = random_batch(arch, 2 if small else cell.sequences, sequence, sequence * PROMPT // SEQUENCE)
    scales = [LayerScales(1 / 64, 1 / 64, 1 / 64)] * arch.num_layers if cell.precision == "fp8_block_kv" else []

    def step() -> float:
        _synchronise(device)
        start = time.perf_counter()
        trainer.step(batch, 1.0, scales)
        _synchronise(device)
        return time.perf_counter() - start

    warm_up, *timed = (step() for _ in range(1 + cell.repeats))
    tokens, seconds = batch.sequences.tokens.numel(), median_low(timed)
    about = {"model": cell.model, "trainer": "torch", "precision": cell.precision, "layers": arch.num_layers}
    about |= {"scale_rule": cell.rule}
    about |= {"sequence": sequence, "tokens": tokens, "tokens_per_pass": cell.tokens_per_pass}
    about |= {"checkpointing": cell.checkpointing, "deterministic": cell.deterministic}
    about |= {"attention_backward": attention_backward.describe(arch.head_dim, device)}
    about |= provenance()
    row = {"kind": "training", **about, "seconds": seconds, "repeats": timed, "warm_up_seconds": warm_up}
    row |= {"predicted": cell.predicted}
    row |= {"tokens_per_s": tokens / seconds, "mfu": flops(arch, batch) / seconds / PEAK_TFLOPS / 1e12}
    row |= {"peak_gb": 0.0 if small else torch.cuda.max_memory_allocated() / 1e9}
    write_rows(out, [row])
    print(json.dumps({key: row[key] for key in ("model", "precision", "tokens_per_s", "mfu", "peak_gb")}), flush=True)
    trace = {"kind": "training_trace", **about, **traced(step, device)}
    write_rows(out, [row, trace])


def flops(arch: Architecture, batch: RolloutBatch) -> float:
    """Of forward and backward, nothing computed twice: 6 a weight of a token, causal attention, head where asked."""
    counts = count_parameters(arch)
    linear = counts.linear - (counts.total - counts.active)
    rows, length = batch.sequences.tokens.shape
    attention = 6 * rows * length * length * arch.num_heads * arch.head_dim * arch.num_layers
    head = 6 * arch.vocab_size * arch.hidden_size * int(batch.policy_mask.sum())
    return 6.0 * linear * rows * length + attention + head


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# The first that matches names the part.
PARTS = (
    ("weight gradients of experts", ("_weight_gradient_kernel",)),
    (
        "routes of experts, and their rows",
        ("_choose_kernel", "_count_kernel", "_place_kernel", "_gather_", "_mix_", "_sum_kernel"),
    ),
    ("codes around attention", ("_head_codes_kernel", "_head_gradients_kernel")),
    # cuDNN's own are the last two.
    ("attention", ("decode_attention", "sequence_attention", "widen_pairs", "flash", "fmha", "sdpa", "cudnn")),
    # DeepGEMM's own, and cuBLASLt's of two E4M3 operands with FP32 scales.
    ("block-FP8 GEMM", ("sm90_fp8", "_qqsss_", "e4m3", "block_scaled")),
    (
        "quantise, with the norm or SwiGLU before it",
        ("_rows_kernel", "_tiles_kernel", "_and_columns", "_codes_kernel", "quant"),
    ),
    ("norm, rotary, SwiGLU", ("norm", "_forward_kernel", "_backward_kernel", "_column_sums_kernel")),
    ("optimiser", ("_adamw_kernel", "lpnorm", "NormTwo")),
    ("fingerprint", ("_fingerprint",)),
    ("BF16 GEMM", ("nvjet", "gemm", "cutlass", "cublas")),
    ("softmax", ("softmax", "SoftMax")),
    ("copies", ("Memcpy", "Memset", "memcpy", "copy")),
)


def traced(step: Callable[[], float], device: torch.device) -> dict[str, Any]:
    """Milliseconds of one step by part and by kernel (the 40 that take most), and its wall-clock time while traced."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        seconds = step()
    parts: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        milliseconds = (event.device_time_total if device.type == "cuda" else event.self_cpu_time_total) / 1000
        parts[part_of(event.key, PARTS)] += milliseconds
        kernels[event.key[:120]] += milliseconds
    largest = dict(sorted(kernels.items(), key=lambda item: -item[1])[:40])
    return {"traced_seconds": seconds, "parts_ms": dict(parts), "kernels_ms": largest}


if __name__ == "__main__":
    main()
