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

from fp8core.cluster.transport import GroupRanks, Meeting
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.kernels.hopper_gemm import deep_gemm
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics.e4m3 import row_and_column_codes, row_codes, tile_codes
from fp8core.numerics.gemm import forward_gemm, input_gradient_gemm, transpose, weight_gradient_gemm
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.logprobs import log_softmax
from fp8core.numerics.lora import merged_weight
from fp8core.numerics.packed import HeadOptions, head_logits, token_logprobs
from fp8core.numerics.recipe import POW2, RECIPES, Recipe
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
    qk_norm=True,
    tie_embeddings=False,
)
# Heads of 64, and parts of fused linears that end inside a tile.
PARTIAL = replace(
    ARCH,
    **{"family": "qwen2", "qk_norm": False, "qkv_bias": True, "hidden_size": 192, "intermediate_size": 480},
    **{"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
)
ARCHES = pytest.mark.parametrize("arch", [ARCH, PARTIAL], ids=["whole tiles", "partial tiles"])
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
    **settings: object,
) -> PackedTrainer:
    training = TrainingConfig.model_validate({"device": "cuda", "tokens_per_pass": 1024, **settings})
    formats = PackedFormats(
        training_formats(kept, ARCH.num_layers), rollout_formats(kept, ARCH.num_layers), 512, amax_only=False
    )
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


def test_cublas_and_deep_gemm_give_the_same_bits() -> None:
    from fp8core.kernels import hopper_gemm

    if deep_gemm() is None:
        pytest.skip("DeepGEMM is not installed")
    x, weight = (torch.randn(n, 1024, device=CUDA).bfloat16() for n in (512, 768))
    codes, tiles = row_codes(x, POW2.activations), tile_codes(weight, POW2.weights)
    other = hopper_gemm._scaled_mm(codes, hopper_gemm._ROWS, tiles, hopper_gemm._TILES, torch.bfloat16)
    assert torch.equal(forward_gemm(codes, tiles), other)


@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens"),
    [(640, 512, 384), (256, 128, 128), (768, 2048, 1152), (1536, 1024, 4096), (6144, 4096, 4096)],
)
def test_gradients_of_weights_are_added_up_pack_by_pack(outputs: int, inputs: int, tokens: int) -> None:
    """With the bytes of each pack's product and an addition, whatever the packs' lengths."""
    from fp8core.kernels import hopper_gemm

    if deep_gemm() is None:
        pytest.skip("DeepGEMM is not installed")
    total, expected = None, torch.zeros(outputs, inputs, device=CUDA)
    for length in (tokens, 128, 2 * tokens):
        grad, x = (
            row_and_column_codes(torch.randn(length, n, device=CUDA).bfloat16(), POW2.gradients, POW2.tokens)[1]
            for n in (outputs, inputs)
        )
        expected += hopper_gemm._scaled_mm(grad, hopper_gemm._ROWS, x, hopper_gemm._ROWS, torch.float32)
        added = weight_gradient_gemm(grad, x, total)
        assert total is None or added is total
        total = added
        assert torch.equal(total, expected)


def test_entropies_have_the_gradient_of_autograd() -> None:
    hidden, weight = (torch.randn(n, 512, device=CUDA).bfloat16() for n in (300, 2048))
    targets = torch.arange(300, device=CUDA)
    ours = hidden.clone().requires_grad_(), weight.float().requires_grad_()
    theirs = hidden.double().requires_grad_(), weight.double().requires_grad_()
    found = token_logprobs(*ours, weight, targets, HeadOptions(torch.float32, 0.7))
    logp = torch.log_softmax(theirs[0] @ theirs[1].t() / 0.7, -1)
    expected = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    pairs = (torch.autograd.grad(a.sum() + b.sum(), leaves) for (a, b), leaves in ((found, ours), (expected, theirs)))
    for mine, exact in zip(*pairs, strict=True):
        assert (mine.double() - exact).norm() < 5e-3 * exact.norm()


def test_the_head_does_not_depend_on_the_rows() -> None:
    hidden, weight = (torch.randn(n, 512, device=CUDA).bfloat16() for n in (600, 2048))
    logits = head_logits(hidden, weight)
    logp = log_softmax(logits, 0.7)
    for count in (1, 2, 7, 64, 130, 512):
        part = head_logits(hidden[:count], weight)
        assert torch.equal(part, logits[:count]), count
        assert torch.equal(log_softmax(part, 0.7), logp[:count]), count
    reference = hidden.double() @ weight.double().t()
    assert (logits.double() - reference).norm() < 1e-5 * reference.norm()


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
    for tensor, other in zip(on_gpu.export().values(), on_cpu.export().values(), strict=True):
        assert torch.equal(tensor.cpu().view(torch.uint8), other.view(torch.uint8))


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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", CONTRACTS)
def test_an_update_scores_as_a_pass(name: str, checkpointing: bool) -> None:
    kept = CONTRACTS[name]
    scales = SCALES if kept.training.kv_cache == "fp8" else []
    passing, scoring = (packed(kept, activation_checkpointing=checkpointing) for _ in range(2))
    expected = passing.logprobs(rows(), 1.0, scales)
    batch = batch_of(expected.logprobs, rows())
    report = passing.step(batch, 1.0, scales)
    learnt, scored = scoring.scored_step(replace(batch, old_logprobs=None), 1.0, scales)
    assert torch.equal(scored.logprobs.view(torch.int32), expected.logprobs.view(torch.int32))
    assert scored.statistics.histograms() == expected.statistics.histograms()
    assert asdict(learnt) == asdict(report)


@pytest.mark.parametrize("name", CONTRACTS)
def test_three_steps_are_the_same_twice(name: str) -> None:
    kept = CONTRACTS[name]
    scales = SCALES if kept.training.kv_cache == "fp8" else []
    batch = batch_of(packed(kept).logprobs(rows(), 1.0, scales).logprobs, rows())
    digests = []
    for checkpointing in (False, False, True):
        trainer = packed(kept, activation_checkpointing=checkpointing, optimiser_state="bf16")
        digests.append([trainer.step(batch, 1.0, scales).digest for _ in range(3)])
    assert digests[0] == digests[1]
    assert digests[0] == digests[2], "with layers computed again"


@ARCHES
@pytest.mark.parametrize(("name", "bound"), [("fp8", 0.12), ("fp8, bf16 cache", 0.12), ("bf16", 0.02)])
def test_gradients_are_near_those_of_the_exact_trainer(name: str, bound: float, arch: Architecture) -> None:
    kept = CONTRACTS[name]
    scales = SCALES if kept.training.kv_cache == "fp8" else []
    on_gpu, on_cpu = packed(kept, arch=arch), exact(kept, arch)
    batch = batch_of(on_cpu.logprobs(rows(), 1.0, scales).logprobs, rows())
    found, expected = (trainer.step(batch, 1.0, scales) for trainer in (on_gpu, on_cpu))
    for key in ("loss", "grad_norm", "ratio_mean", "weight_mean"):
        assert getattr(found, key) == pytest.approx(getattr(expected, key), rel=bound, abs=5e-3)


def test_a_policy_that_is_shown_the_same_learns_it() -> None:
    trainer = packed(CONTRACTS["bf16"], learning_rate=1e-3)
    losses = [trainer.sft_step(rows(), 1e-3) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


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
    meeting = Meeting("127.0.0.1")
    mp.spawn(_rank, (meeting.port(), name, reduced, tmp_path), nprocs=RANKS)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    alone = packed(CONTRACTS[name])
    expected = two_steps(alone, SCALES if CONTRACTS[name].training.kv_cache == "fp8" else [])
    assert torch.equal(found["logprobs"], expected["logprobs"])
    assert (found["digest"], found["exported"]) == (expected["digest"], expected["exported"])
    assert found["norms"] == pytest.approx(expected["norms"], rel=0.02)
    alone.load(tmp_path)
    assert alone.digest() == found["weights"]


def test_a_merged_weight_has_the_bytes_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((3000, 1024), (3000, 16), (16, 1024))]
    here, there = (merged_weight(*(each.to(device) for each in drawn), 32 / 12) for device in ("cpu", CUDA))
    assert torch.equal(here, there.cpu())


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
