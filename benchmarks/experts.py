"""Experts of Qwen3-30B-A3B's shape on one Hopper GPU: tokens whose log-probs differ, and where a layer's time goes.

    python -m benchmarks.experts exact --out FOLDER
    python -m benchmarks.experts profile --out FOLDER

Rollouts and sync are cells of `rollout_hopper`, steps of `training_hopper`. Weights are random; each part writes
FOLDER/experts-PART.json.

`exact`: the aligned engine writes half a million tokens in 12 layers, and the packed trainer of the same weights scores
them, in packs of 14 sequences. Predicted: 0 of them differ.

`profile`: the parts of one sparse layer, alone and together, at a decode step and at a pass. Beside them stand the
bytes of all weights that have a row, at 4.8 TB/s. Predicted (`PREDICTED`): of 256 tokens weights at 70 % of that,
18,304 rows at 3 TB/s, most of which are filling, and 4 microseconds for each small kernel; of 16,384 tokens products at
1,000 TFLOP/s, and other kernels at 3 TB/s.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine_cases as cases
from benchmarks.fused_hopper import PEAK, graph_microseconds, wall_microseconds
from benchmarks.harness import Row, RowFile
from benchmarks.training_hopper import SEQUENCE, SPARSE_LAYERS, Cell, trainer_of
from fp8core.models.architecture import Architecture
from fp8core.numerics.e4m3 import Codes, FiniteFlag, row_codes
from fp8core.numerics.elementwise import KERNELS
from fp8core.numerics.fused import swiglu_row_codes
from fp8core.numerics.grouped import (
    choose_experts,
    expert_rows,
    forward_multiple,
    gathered_codes,
    grouped_gemm,
    mixed,
)
from fp8core.numerics.kv_scales import scales_from_statistics
from fp8core.numerics.packed import head_logits
from fp8core.resources.kernels import Product, layer_products
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, Sampling
from fp8core.training.packed.trainer import PackedTrainer

# 36 packs of 14 whole sequences, of at most 16,384 tokens: kernels are compiled for one size.
REQUESTS, PROMPT, GENERATED, TOGETHER = 504, 128, 1024, 14
PACK = TOGETHER * (PROMPT + GENERATED)
STEP = 2048
CONTRACT = cases.aligned(cases.contract("fp8_linear_kv"))
# Microseconds by tokens.
PREDICTED = {256: 330, 16_384: 2_200}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts: dict[str, Callable[[RowFile], None]] = {"exact": measure_exactness, "profile": measure_layer}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args()
    rows = RowFile(options.out.absolute() / f"experts-{options.part}.json", model="qwen3-30b-a3b")
    try:
        parts[options.part](rows)
    except Exception as error:
        rows.fail(error)
        raise
    print(rows.rows[-1], flush=True)


def measure_exactness(rows: RowFile) -> None:
    """Rows of the engine's start, of a sync of all tensors in one buffer, and of the comparison."""
    arch, device = cases.qwen3_30b_a3b(SPARSE_LAYERS), torch.device("cuda")
    settings = cases.options(model="aligned", gpu_memory_utilization=0.25, max_model_len=SEQUENCE, batched_tokens=STEP)
    cases.prepare(CONTRACT, settings)
    cases.compile_products(arch, CONTRACT, STEP)
    cases.compile_pass(layer_products(arch, range(PACK, PACK + 1)))
    engine = cases.start(arch, CONTRACT, settings, 512, rows)
    try:
        trainer = trainer_of(Cell("qwen3-30b-a3b", "fp8_block_kv"), arch, device)
        policy = calibrated_policy(trainer)
        rows.append({"kind": "sync", "layers": arch.num_layers, **cases.synchronise(engine, policy)})
        groups = cases.prompt_groups(REQUESTS, 1, PROMPT, seed=1)
        began = time.perf_counter()
        found = cases.collect(engine, groups, Sampling(1.0, GENERATED, frozenset()))
        written = time.perf_counter()
        row = compared(trainer, policy, groups, found)
        seconds = {"rollout_seconds": written - began, "scoring_seconds": time.perf_counter() - written}
        rows.append({"kind": "experts_exactness", "layers": arch.num_layers, **row, **seconds, "predicted": 0})
    finally:
        engine.close()


def calibrated_policy(trainer: PackedTrainer) -> cases.Policy:
    """What the trainer ships, with scales of random sequences that fill a pack of the size that is scored."""
    prompts = [list(group.prompt) for group in cases.prompt_groups(TOGETHER, 1, PROMPT + GENERATED - 1, seed=100)]
    amax = trainer.statistics(TokenBatch.of(prompts, [[5]] * TOGETHER)).amax()
    scales = PolicyScales(0, tuple(scales_from_statistics(amax, 2.0, CONTRACT.recipe.cache)))
    return cases.Policy(trainer.arch, trainer.export(), scales)


def compared(trainer: PackedTrainer, policy: cases.Policy, groups: list[PromptGroup], found: list[Completion]) -> Row:
    """How many tokens there are, how many log-probs the trainer has otherwise, and by how much."""
    batch = TokenBatch.of([list(group.prompt) for group in groups], [done.tokens for done in found])
    scored = trainer.logprobs(batch, 1.0, policy.scales.layers).logprobs
    told = torch.tensor([done.logprobs for done in found])
    assert scored.shape == told.shape, "a request was cut short"
    differing = scored != told
    return {
        "tokens": told.numel(),
        "differing": int(differing.sum()),
        "largest_difference": float((scored - told).abs().max()),
        "mean_logprob": float(told.mean()),
    }


def measure_layer(rows: RowFile) -> None:
    arch = cases.qwen3_30b_a3b()
    cases.prepare(CONTRACT, cases.options(model="aligned"))
    cases.compile_pass(product for tokens in PREDICTED for product in sparse_products(arch, tokens))
    for tokens, predicted in PREDICTED.items():
        row = layer_row(arch, tokens, torch.device("cuda"))
        rows.append({"kind": "experts_layer", **row, "predicted_microseconds": predicted})


def sparse_products(arch: Architecture, tokens: int) -> list[Product]:
    """Of a router and experts."""
    assert arch.experts is not None
    products = layer_products(arch, range(tokens, tokens + 1))
    return [each for each in products if each.experts > 1 or each.outputs == arch.experts.count]


def layer_row(arch: Architecture, tokens: int, device: torch.device) -> Row:
    """Microseconds of each part of a sparse layer's second half, and of all, with those of its weights' bytes."""
    assert arch.experts is not None
    count, k, width, hidden = (
        arch.experts.count,
        arch.experts.per_token,
        arch.experts.intermediate_size,
        arch.hidden_size,
    )
    torch.manual_seed(0)
    quantiser = CONTRACT.recipe.activations, FiniteFlag(device)
    x, router = (torch.randn(n, hidden, device=device).bfloat16() for n in (tokens, count))
    gate_up, down = (random_codes(count, *shape, device) for shape in ((2 * width, hidden), (hidden, width)))
    logits = KERNELS.routed(head_logits(x, router))
    chosen, gates = choose_experts(logits, k, True)
    rows = expert_rows(chosen, count, forward_multiple(chosen.numel(), count))
    codes = row_codes(x, *quantiser)
    gathered = gathered_codes(codes, rows)
    inner = grouped_gemm(gathered, gate_up, rows)
    activated = swiglu_row_codes(inner, *quantiser, rows)
    outputs = grouped_gemm(activated, down, rows)

    def layer() -> Any:
        chosen, gates = choose_experts(KERNELS.routed(head_logits(x, router)), k, True)
        rows = expert_rows(chosen, count, forward_multiple(chosen.numel(), count))
        inner = grouped_gemm(gathered_codes(row_codes(x, *quantiser), rows), gate_up, rows)
        return mixed(grouped_gemm(swiglu_row_codes(inner, *quantiser, rows), down, rows), rows, gates)

    parts: dict[str, Callable[[], Any]] = {
        "router": lambda: KERNELS.routed(head_logits(x, router)),
        "choose_experts": lambda: choose_experts(logits, k, True),
        "expert_rows": lambda: expert_rows(chosen, count, forward_multiple(chosen.numel(), count)),
        "row_codes": lambda: row_codes(x, *quantiser),
        "gathered_codes": lambda: gathered_codes(codes, rows),
        "gate_up": lambda: grouped_gemm(gathered, gate_up, rows),
        "swiglu_row_codes": lambda: swiglu_row_codes(inner, *quantiser, rows),
        "down": lambda: grouped_gemm(activated, down, rows),
        "mixed": lambda: mixed(outputs, rows, gates),
        "all": layer,
    }
    clock = wall_microseconds if device.type == "cpu" else graph_microseconds
    touched = int((rows.sizes > 0).sum())
    weights = {name: touched * each[0][0].numel() for name, each in (("gate_up", gate_up), ("down", down))}
    weights["all"] = sum(weights.values())
    return {
        "tokens": tokens,
        "rows": len(rows.slots),
        "filled_rows": int(rows.sizes.sum()),
        "experts": touched,
        "microseconds": {name: round(clock(call), 2) for name, call in parts.items()},
        "weight_microseconds": {name: round(size / PEAK * 1e6, 2) for name, size in weights.items()},
        "tflop": 2e-12 * tokens * k * 3 * width * hidden,
    }


def random_codes(count: int, outputs: int, inputs: int, device: torch.device) -> Codes:
    """Weights of deviation 0.012, as `engine_cases.random_policy` has them."""
    drawn = (torch.randn(outputs, inputs, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.full((count, outputs // 128, inputs // 128), 2.0**-13, device=device)
    return drawn.view(torch.uint8).repeat(count, 1, 1).view(drawn.dtype), scales


if __name__ == "__main__":
    main()
