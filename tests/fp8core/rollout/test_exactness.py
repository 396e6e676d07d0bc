"""The promise of the project: log-probs of the rollout equal those of the trainer, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.models.architecture import Experts
from fp8core.numerics.kv_scales import LayerScales, scales_from_statistics
from fp8core.numerics.recipe import RECIPES
from fp8core.numerics.rotary import YarnScaling
from fp8core.rl.batch import RolloutBatch, TokenBatch, length_mask, pad
from fp8core.rollout.engine import PolicyScales, Sampling

STOP = frozenset({1, 7, 11})


def both(**formats):
    """A contract with the same formats on both sides."""
    return PrecisionContract(rollout=SidePrecision(**formats), training=TrainingPrecision(**formats))


FP8 = PrecisionContract()
BF16 = both(linear="bf16", kv_cache="bf16")
CONTRACTS = {
    "fp8": FP8,
    "bf16": BF16,
    "fp8 linears, bf16 cache": both(kv_cache="bf16"),
    "bf16 linears, fp8 cache": both(linear="bf16"),
    "pow2 scales": PrecisionContract(scale_rule="pow2"),
    "fp32 scales": PrecisionContract(scale_rule="fp32"),
    "first layer bf16": PrecisionContract(bf16_first_layers=1),
    "bf16 head": both(head="bf16"),
    "fp32": both(linear="fp32", kv_cache="fp32"),
}


def moe(**changes):
    shape = {"intermediate_size": 48, "normalise_top_k": True, "sparse_step": 1, "dense_layers": ()}
    return Experts(**{**shape, **changes})


SHAPES = {
    "no multiples of 128": {},
    "whole tiles": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "llama": {"family": "llama"},
    "tied": {"tie_embeddings": True},
    "Qwen2.5-0.5B": {
        "family": "qwen2",
        "tie_embeddings": True,
        "hidden_size": 448,
        "num_heads": 7,
        "num_kv_heads": 1,
        "head_dim": 64,
        "num_layers": 1,
    },
    "Llama-3.2-1B, with YaRN": {
        "family": "llama",
        "tie_embeddings": True,
        "rope_scaling": YarnScaling(factor=4.0, original_max_position_embeddings=16, beta_fast=4.0),
        "hidden_size": 256,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
    },
    "SmolLM2-135M": {
        "family": "llama",
        "tie_embeddings": True,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 64,
    },
    "OLMo-2-1B": {"family": "olmo2", "hidden_size": 128, "num_kv_heads": 4, "head_dim": 32},
    "experts": {"family": "qwen3_moe", "experts": moe(count=6, per_token=2)},
    "experts in whole tiles": {
        "family": "qwen3_moe",
        "hidden_size": 128,
        "head_dim": 32,
        "experts": moe(count=4, per_token=3, intermediate_size=128, normalise_top_k=False, sparse_step=2),
    },
}


def assert_exact(log_ratios):
    assert len(log_ratios) > 0
    assert torch.equal(log_ratios, torch.zeros_like(log_ratios)), f"{int((log_ratios != 0).sum())} tokens differ"


# Every shape in FP8, and every contract on two shapes.
PAIRS = sorted(
    {*itertools.product(SHAPES, ["fp8"])} | {*itertools.product(["no multiples of 128", "experts"], CONTRACTS)}
)


@pytest.mark.parametrize(("shape", "contract"), PAIRS)
def test_every_shape_and_contract(architecture, pair_of, ragged_prompts, groups_of, shape, contract):
    pair = pair_of(CONTRACTS[contract], architecture(**SHAPES[shape]), max_batch=16)
    groups = groups_of(ragged_prompts(5, pair.arch.vocab_size), 4)
    found = pair.generate(groups, Sampling(1.0, 6, STOP))
    assert_exact(pair.log_ratios(groups, found, 1.0))
    assert len({len(completion.tokens) for completion in found}) > 1, "completions must end at different times"


@pytest.mark.parametrize(("contract", "temperature"), [("fp8", 0.7), ("bf16", 1.0)])
def test_every_batch_size(architecture, pair_of, ragged_prompts, groups_of, contract, temperature):
    prompts = groups_of(ragged_prompts(4, 40), 4)
    sampling = Sampling(temperature, 6, STOP)
    found = {}
    for max_batch in (1, 7, 64):
        pair = pair_of(CONTRACTS[contract], architecture(), max_batch=max_batch)
        found[max_batch] = pair.generate(prompts, sampling)
    assert found[1] == found[7] == found[64]
    assert_exact(pair.log_ratios(prompts, found[1], temperature))


def test_long_sequences(architecture, pair_of, ragged_prompts, groups_of):
    """More than a hundred keys, sums over several blocks, and one row decoded at a time."""
    arch = architecture(hidden_size=288, intermediate_size=416, head_dim=64, max_positions=160)
    pair = pair_of(FP8, arch, max_batch=1)
    groups = groups_of(ragged_prompts(2, 40, longest=110), 2)
    found = pair.generate(groups, Sampling(1.0, 20, frozenset()))
    assert_exact(pair.log_ratios(groups, found, 1.0))


@given(
    seed=st.integers(0, 2**31),
    width=st.integers(1, 20).map(lambda n: 8 * n),
    wider=st.integers(1, 40).map(lambda n: 8 * n),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    head_dim=st.integers(1, 20).map(lambda n: 2 * n),
    scale_rule=st.sampled_from(list(RECIPES)),
    max_batch=st.sampled_from([1, 7, 64]),
    temperature=st.floats(0.3, 2.0),
)
@settings(max_examples=10)
def test_any_shape(
    architecture,
    pair_of,
    ragged_prompts,
    groups_of,
    seed,
    width,
    wider,
    heads,
    head_dim,
    scale_rule,
    max_batch,
    temperature,
):
    query_heads, kv_heads = heads
    shape = architecture(
        hidden_size=width, intermediate_size=wider, num_heads=query_heads, num_kv_heads=kv_heads, head_dim=head_dim
    )
    pair = pair_of(PrecisionContract(scale_rule=scale_rule), shape, max_batch=max_batch, seed=seed)
    groups = groups_of(ragged_prompts(3, shape.vocab_size, seed), 2)
    found = pair.generate(groups, Sampling(temperature, 4, STOP))
    assert_exact(pair.log_ratios(groups, found, temperature))


def test_scales_that_saturate_change_both_sides_alike(architecture, pair_of, ragged_prompts, groups_of):
    pair = pair_of(FP8, architecture())
    groups = groups_of(ragged_prompts(4, 40), 4)
    calibrated = pair.generate(groups, Sampling(1.0, 6, STOP))
    small = PolicyScales(0, tuple(LayerScales(s.q / 7, s.k / 5, s.v / 9) for s in pair.scales.layers))
    pair.engine.update(pair.trainer.export(), small, 0)
    saturated = pair.generate(groups, Sampling(1.0, 6, STOP))
    assert saturated != calibrated
    assert_exact(replace(pair, scales=small).log_ratios(groups, saturated, 1.0))


@pytest.mark.parametrize(("contract", "family"), [("fp8", "qwen3"), ("bf16", "qwen3"), ("fp8", "olmo2")])
def test_training_keeps_it(architecture, pair_of, ragged_prompts, groups_of, contract, family):
    """Three iterations, with scales from the log-prob pass under the previous policy."""
    pair = pair_of(CONTRACTS[contract], architecture(family=family))
    groups = groups_of(ragged_prompts(4, 40), 4)
    prompts = [group.prompt for group in groups for _ in group.seeds]
    for version in range(3):
        found = pair.generate(groups, Sampling(1.0, 6, STOP))
        assert_exact(pair.log_ratios(groups, found, 1.0))
        tokens = [completion.tokens for completion in found]
        sequences = TokenBatch.of(prompts, tokens)
        scored = pair.trainer.logprobs(sequences, 1.0, pair.scales.layers)
        rollout = pad([completion.logprobs for completion in found], torch.float32, 0.0)
        mask, lengths = length_mask(tokens), torch.tensor([float(len(row)) for row in tokens])
        old = scored.logprobs.nan_to_num()
        everything = torch.ones(len(found), dtype=torch.bool)
        batch = RolloutBatch(sequences, mask, rollout, old, None, lengths - lengths.mean(), everything)
        before = pair.trainer.digest()
        pair.trainer.step(batch, 1.0, pair.scales.layers)
        assert pair.trainer.digest() != before
        layers = scales_from_statistics(scored.statistics.amax(), 2.0, CONTRACTS[contract].recipe.cache)
        pair = replace(pair, scales=PolicyScales(version + 1, tuple(layers)))
        pair.engine.update(pair.trainer.export(), pair.scales, version + 1)
