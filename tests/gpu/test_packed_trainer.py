"""The packed trainer with its kernels, beside the exact trainer and beside itself."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from fp8core.cluster.transport import GroupRanks, Rendezvous
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics.e4m3 import column_parts, row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.gemm import bf16_gemm, forward_gemm, input_gradient_gemm, transpose, weight_gradient_gemm
from fp8core.numerics.grouped import (
    FEWEST,
    GROUP_MULTIPLE,
    choose_experts,
    expert_rows,
    gathered,
    gathered_codes,
    grouped_bf16_gemm,
    grouped_bf16_input_gradient,
    grouped_bf16_weight_gradient,
    grouped_gemm,
    grouped_weight_gradient,
)
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import FP32_ACTIVATIONS, RECIPES, Recipe
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.objective import Objective
from fp8core.training.exact import ExactTrainer
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer
from fp8core.training.ranks import ALONE, Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

CUDA = torch.device("cuda")
ARCH = Architecture(
    family="qwen3",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=1024,
    rope_scaling=None,
    tie_embeddings=False,
)
# Heads of 64, and parts of fused linears that end inside a tile.
PARTIAL = replace(
    ARCH,
    **{"family": "qwen2", "hidden_size": 192, "intermediate_size": 480},
    **{"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
)
# One dense layer, and two of eight experts.
SPARSE = replace(
    ARCH,
    family="qwen3_moe",
    experts=Experts(
        count=8, per_token=2, intermediate_size=256, normalise_top_k=True, sparse_step=1, dense_layers=(1,)
    ),
)
ARCHES = pytest.mark.parametrize("arch", [ARCH, PARTIAL, SPARSE], ids=["whole tiles", "partial tiles", "experts"])
SCALES = [LayerScales(2.0**-6, 2.0**-6, 2.0**-7)] * ARCH.num_layers


def contract(linear: str, cache_: str) -> PrecisionContract:
    side = {"linear": linear, "kv_cache": cache_}
    return PrecisionContract(
        rollout=SidePrecision.model_validate(side),
        training=TrainingPrecision.model_validate(side),
        rounding_points="kernels",
    )


CONTRACTS = {
    "fp8": contract("fp8_block", "fp8"),
    "fp8, bf16 cache": contract("fp8_block", "bf16"),
    "bf16": contract("bf16", "bf16"),
}


@cache
def masters(arch: Architecture) -> dict[str, Tensor]:
    return initial_weights(arch, seed=0)


def packed(
    kept: PrecisionContract,
    ranks: Ranks = ALONE,
    arch: Architecture = ARCH,
    weights: Mapping[str, Tensor] | None = None,
    longest: int = 512,
    **settings: object,
) -> PackedTrainer:
    training = TrainingConfig.model_validate({"device": "cuda", "tokens_per_pass": 1024, **settings})
    formats = PackedFormats(training_formats(kept, ARCH.num_layers), rollout_formats(kept, ARCH.num_layers), longest)
    objective, started = Objective(LossConfig(), CorrectionConfig()), masters(arch) if weights is None else weights
    return PackedTrainer(arch, started, formats, training, objective, CUDA, ranks)


def exact(kept: PrecisionContract, arch: Architecture = ARCH) -> ExactTrainer:
    sides = (formats(kept, ARCH.num_layers) for formats in (training_formats, rollout_formats))
    return ExactTrainer(arch, masters(arch), *sides, TrainingConfig(), Objective(LossConfig(), CorrectionConfig()))


def rows(count: int = 12) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 120, (count,), generator=generator).tolist()
    drawn = [torch.randint(2, ARCH.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return TokenBatch.of([tokens[: len(tokens) // 2] for tokens in drawn], [t[len(t) // 2 :] for t in drawn])


def batch_of(old: Tensor, sequences: TokenBatch) -> RolloutBatch:
    generator = torch.Generator().manual_seed(1)
    mask = ~old.isnan()
    filled = old.nan_to_num()
    noise = 0.1 * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(len(sequences), generator=generator)
    kept = torch.ones(len(sequences), dtype=torch.bool)
    return RolloutBatch(sequences, mask, torch.where(mask, filled + noise, 0.0), filled, None, advantages, kept)


@pytest.mark.parametrize(("inputs", "outputs"), [(512, 640), (576, 1280), (192, 704)])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gemms_are_near_their_references_and_do_not_depend_on_the_rows(
    recipe: Recipe, inputs: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (
        torch.randn(n, m, generator=generator).bfloat16() for n, m in ((384, inputs), (384, outputs), (outputs, inputs))
    )
    on_gpu = [tensor.to(CUDA) for tensor in (x, grad, weight)]
    backward = recipe.gradients, recipe.tokens
    tiles, tiles_gpu = tile_codes(weight, recipe.weights), tile_codes(on_gpu[2], recipe.weights)
    found = forward_gemm(row_codes(on_gpu[0], recipe.activations), tiles_gpu)
    for rows_ in (1, 3, 64, 129):
        part = forward_gemm(row_codes(on_gpu[0][:rows_], recipe.activations), tiles_gpu)
        assert torch.equal(part, found[:rows_]), rows_
    pairs = [
        (found, forward_gemm(row_codes(x, recipe.activations), tiles)),
        (
            input_gradient_gemm(row_and_column_codes(on_gpu[1], *backward)[0], transpose(tiles_gpu)),
            input_gradient_gemm(row_and_column_codes(grad, *backward)[0], transpose(tiles)),
        ),
        (
            weight_gradient_gemm(*(row_and_column_codes(t, *backward)[1] for t in (on_gpu[1], on_gpu[0]))),
            weight_gradient_gemm(*(row_and_column_codes(t, *backward)[1] for t in (grad, x))),
        ),
    ]
    for mine, reference in pairs:
        assert mine.dtype == reference.dtype
        # FP32 sums of about 14 bits inside a block, and BF16 results.
        assert (mine.cpu().double() - reference.double()).norm() < 5e-3 * reference.double().norm()


@pytest.mark.parametrize(("count", "k", "tokens"), [(8, 2, 700), (128, 8, 300), (8, 1, 1)])
def test_grouped_gemms_are_those_of_each_expert(count: int, k: int, tokens: int) -> None:
    """Forward has the bytes of an expert's own product, in BF16 as well; no row depends on the others."""
    recipe, generator = FP32_ACTIVATIONS, torch.Generator(CUDA).manual_seed(0)
    x, grad, weights = (
        torch.randn(shape, generator=generator, device=CUDA).bfloat16()
        for shape in ((tokens, 512), (tokens, 384), (count, 384, 512))
    )
    logits = torch.randn(tokens, count, generator=generator, device=CUDA)
    logits[:, 3] = -9.0
    chosen, _ = choose_experts(logits, k, True)
    by_expert = expert_rows(chosen, count, GROUP_MULTIPLE)
    made = [tile_codes(weight, recipe.weights) for weight in weights]
    stacked = (
        torch.stack([codes.view(torch.uint8) for codes, _ in made]).view(torch.float8_e4m3fn),
        torch.stack([scales for _, scales in made]),
    )
    codes = row_codes(x, recipe.activations)
    found = grouped_gemm(gathered_codes(codes, by_expert), stacked, by_expert)
    fewer = expert_rows(chosen, count, FEWEST)
    in_small_tiles = grouped_gemm(gathered_codes(codes, fewer), stacked, fewer)
    assert torch.equal(in_small_tiles[fewer.places], found[by_expert.places])
    in_bf16 = grouped_bf16_gemm(gathered(x, by_expert), weights, by_expert)
    for token in {0, tokens // 2, tokens - 1}:
        one = row_codes(x[token : token + 1], recipe.activations)
        for place, expert in zip(by_expert.places[token].tolist(), chosen[token].tolist(), strict=True):
            assert torch.equal(found[place], forward_gemm(one, made[expert])[0])
            assert torch.equal(in_bf16[place], bf16_gemm(x[token : token + 1], weights[expert])[0])
    assert not found[sum(by_expert.counts) :].any()

    columns = [
        row_and_column_codes(gathered(each, by_expert), recipe.gradients, recipe.tokens, None, by_expert.spans)[1]
        for each in (grad, x)
    ]
    total = torch.ones(count, 384, 512, device=CUDA)
    grouped_weight_gradient(columns[0], columns[1], by_expert, total)
    plain = grouped_bf16_weight_gradient(
        gathered(grad, by_expert), gathered(x, by_expert), by_expert, torch.ones_like(total)
    )
    parts = zip(*(column_parts(each, by_expert.counts) for each in columns), strict=True)
    for expert, (of_grad, of_x) in enumerate(parts):
        own = torch.ones(384, 512, device=CUDA)
        if of_x[0].shape[1]:
            weight_gradient_gemm(of_grad, (of_x[0], of_x[1]), own)
        assert (total[expert] - own).norm() <= 1e-3 * own.norm(), expert
        members = (chosen == expert).any(-1)
        exact_sum = grad[members].double().t() @ x[members].double() + 1
        assert (plain[expert].double() - exact_sum).norm() <= 1e-5 * exact_sum.norm(), expert
    of_input = grouped_bf16_input_gradient(gathered(grad, by_expert), weights, by_expert)
    place, expert = int(by_expert.places[0, 0]), int(chosen[0, 0])
    nearest = grad[0].double() @ weights[expert].double()
    assert (of_input[place].double() - nearest).norm() < 5e-3 * nearest.norm()


@ARCHES
@pytest.mark.parametrize("name", CONTRACTS)
def test_log_probs_are_near_those_of_the_exact_trainer(name: str, arch: Architecture) -> None:
    kept = CONTRACTS[name]
    scales = SCALES if kept.training.kv_cache == "fp8" else []
    on_gpu, on_cpu = packed(kept, arch=arch), exact(kept, arch)
    assert on_gpu.digest() == on_cpu.digest()
    found, expected = (trainer.logprobs(rows(), 1.0, scales) for trainer in (on_gpu, on_cpu))
    difference = (found.logprobs - expected.logprobs).nan_to_num().abs()
    assert difference.sum() / (~expected.logprobs.isnan()).sum() < 0.02
    for mine, theirs in zip(found.statistics.amax(), expected.statistics.amax(), strict=True):
        assert asdict(mine) == pytest.approx(asdict(theirs), rel=0.05)
    expected_tensors = on_cpu.export()
    for part, tensor in on_gpu.export().items():
        assert torch.equal(tensor.cpu().view(torch.uint8), expected_tensors[part].view(torch.uint8)), part


@ARCHES
@pytest.mark.parametrize("name", CONTRACTS)
def test_log_probs_do_not_depend_on_the_pack(name: str, arch: Architecture) -> None:
    kept = CONTRACTS[name]
    scales = SCALES if kept.training.kv_cache == "fp8" else []
    together = packed(kept, arch=arch).logprobs(rows(), 0.8, scales).logprobs
    apart = packed(kept, arch=arch, tokens_per_pass=256).logprobs(rows(), 0.8, scales).logprobs
    differ = int((together.nan_to_num() != apart.nan_to_num()).sum())
    if name == "fp8":
        assert differ == 0
    else:
        print(f"{name}: {differ} of {int((~together.isnan()).sum())} log-probs depend on the pack")


@pytest.mark.parametrize("arch", [ARCH, SPARSE], ids=["dense", "experts"])
@pytest.mark.parametrize("name", CONTRACTS)
def test_three_steps_are_the_same_twice(name: str, arch: Architecture) -> None:
    kept = CONTRACTS[name]
    scales = SCALES if kept.training.kv_cache == "fp8" else []
    batch = batch_of(packed(kept, arch=arch).logprobs(rows(), 1.0, scales).logprobs, rows())
    digests = []
    for checkpointing in (False, False, True):
        trainer = packed(kept, arch=arch, activation_checkpointing=checkpointing, optimiser={"state": "bf16"})
        digests.append([trainer.step(batch, 1.0, scales).digest for _ in range(3)])
    assert digests[0] == digests[1]
    assert digests[0] == digests[2], "with layers computed again"


RANKS = 2


def two_steps(trainer: PackedTrainer, scales: list[LayerScales]) -> dict[str, Any]:
    """What must not depend on the number of ranks, and the gradient norms of two updates, which may in their order."""
    found = trainer.logprobs(rows(), 1.0, scales)
    first = {"digest": trainer.digest(), "logprobs": found.logprobs.nan_to_num(), "exported": trainer.export().digest()}
    batch = batch_of(found.logprobs, rows())
    reports = [trainer.step(batch, 1.0, scales) for _ in range(2)]
    return first | {"norms": [report.grad_norm for report in reports], "weights": reports[-1].digest}


def _rank(rank: int, port: int, name: str, reduced: str, folder: Path) -> None:
    torch.cuda.set_device(rank)
    ranks = GroupRanks("127.0.0.1", port, rank, RANKS)
    scales = SCALES if CONTRACTS[name].training.kv_cache == "fp8" else []
    trainer, again = (packed(CONTRACTS[name], ranks, reduce_gradients=reduced) for _ in range(2))
    found = two_steps(trainer, scales)
    assert two_steps(again, scales)["weights"] == found["weights"], "a repetition has other bytes"
    trainer.save(folder)
    again.load(folder)
    assert again.digest() == found["weights"]
    if rank == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.barrier()
    os._exit(0)


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("reduced", ["per_update", "per_pass"])
@pytest.mark.parametrize("name", CONTRACTS)
def test_two_gpus_share_one_policy_and_compute_its_bytes(name: str, reduced: str, tmp_path: Path) -> None:
    meeting = Rendezvous("127.0.0.1")
    mp.spawn(_rank, (meeting.port(), name, reduced, tmp_path), nprocs=RANKS)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    alone = packed(CONTRACTS[name])
    expected = two_steps(alone, SCALES if CONTRACTS[name].training.kv_cache == "fp8" else [])
    assert torch.equal(found["logprobs"], expected["logprobs"])
    assert (found["digest"], found["exported"]) == (expected["digest"], expected["exported"])
    assert found["norms"] == pytest.approx(expected["norms"], rel=0.02)
    alone.load(tmp_path)
    assert alone.digest() == found["weights"]


# A layer of Qwen3-8B.
WIDE = replace(ARCH, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, max_positions=32768)
LONG = 32_000


def long_step(name: str, **settings: Any) -> dict[str, Any]:
    """Two sequences of 32k tokens together; only the ends of both are in the loss."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(2, ARCH.vocab_size, (n,), generator=generator).tolist() for n in (LONG, 700)]
    sequences = TokenBatch.of([tokens[:-600] for tokens in drawn], [tokens[-600:] for tokens in drawn])
    scales = SCALES if CONTRACTS[name].training.kv_cache == "fp8" else []
    trainer = packed(CONTRACTS[name], arch=WIDE, longest=32768, tokens_per_pass=32768, **settings)
    scored = trainer.logprobs(sequences, 1.0, scales).logprobs
    torch.cuda.reset_peak_memory_stats()
    norm = trainer.step(batch_of(scored, sequences), 1.0, scales).grad_norm
    return {"logprobs": scored.nan_to_num(), "norm": norm, "peak": torch.cuda.max_memory_allocated()}


def _sharer(rank: int, port: int, name: str, folder: Path) -> None:
    torch.cuda.set_device(rank)
    ranks = GroupRanks("127.0.0.1", port, rank, RANKS)
    found, again = (long_step(name, ranks=ranks, context_parallel=RANKS) for _ in range(2))
    assert again["norm"] == found["norm"], "a repetition has other bytes"
    if rank == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.barrier()
    os._exit(0)


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("name", CONTRACTS)
def test_two_gpus_share_a_pass_of_32k_tokens_and_compute_the_log_probs_of_one(name: str, tmp_path: Path) -> None:
    meeting = Rendezvous("127.0.0.1")
    mp.spawn(_sharer, (meeting.port(), name, tmp_path), nprocs=RANKS)
    found, alone = torch.load(tmp_path / "found.pt", weights_only=False), long_step(name)
    print(f"{name}: {found['peak'] / 2**30:.1f} GiB, alone {alone['peak'] / 2**30:.1f} GiB")
    # cuBLAS may take another kernel for other numbers of rows.
    assert name == "bf16" or torch.equal(found["logprobs"], alone["logprobs"])
    assert torch.allclose(found["logprobs"], alone["logprobs"], atol=0.05)
    assert found["norm"] == pytest.approx(alone["norm"], rel=0.02)
    assert found["peak"] < alone["peak"]


@pytest.mark.parametrize("name", ["fp8, bf16 cache", "bf16"])
def test_adapters_make_an_ordinary_policy_that_learns_the_same_twice(name: str, tmp_path: Path) -> None:
    kept, lora = CONTRACTS[name], {"rank": 4, "targets": ["q_proj", "up_proj", "down_proj"]}
    trainer, again = (packed(kept, lora=lora, learning_rate=0.01, warmup_steps=0) for _ in range(2))
    sequences = rows()
    batch = batch_of(trainer.logprobs(sequences, 1.0, ()).logprobs, sequences)
    before = {part: weight.clone() for part, weight in trainer.masters.items()}
    for _ in range(2):
        report = trainer.step(batch, 1.0, ())
        assert asdict(report) == asdict(again.step(batch, 1.0, ()))
        assert report.update_gain == pytest.approx(1.0, abs=0.3)
    after = {part: weight.clone() for part, weight in trainer.masters.items()}
    assert {part.split(".")[-2] for part in after if not torch.equal(after[part], before[part])} == set(lora["targets"])
    full = packed(kept, weights=after)
    assert full.export().digest() == trainer.export().digest()
    scored = [each.logprobs(sequences, 1.0, ()).logprobs.nan_to_num() for each in (trainer, full)]
    assert torch.equal(*scored)
    trainer.save(tmp_path)
    restored = packed(kept, lora=lora, learning_rate=0.01, warmup_steps=0)
    restored.load(tmp_path)
    assert asdict(restored.step(batch, 1.0, ())) == asdict(again.step(batch, 1.0, ()))
