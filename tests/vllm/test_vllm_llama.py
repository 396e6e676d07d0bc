"""Llama's shape: a head that is the embedding, scaled rotary positions, BF16 logits."""

import pytest
import torch
from conftest import CONTRACT, OPTIONS, SHAPE, build_groups, build_policy, collect

from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import Sampling
from tasks.sync import check_formats, check_report

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHANGES = {
    "family": "llama",
    "qk_norm": False,
    "num_heads": 4,
    "tie_embeddings": True,
    "rope_scaling": RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
}


def test_a_tied_llama_with_scaled_positions(vllm_build):
    from fp8core.rollout.vllm import VllmEngine

    side = CONTRACT.rollout.model_copy(update={"head": "bf16"})
    contract = CONTRACT.model_copy(
        update={"rollout": side, "training": CONTRACT.training.model_copy(update={"head": "bf16"})}
    )
    arch = Architecture(**{**SHAPE, **CHANGES})
    engine = VllmEngine(arch, contract, OPTIONS, 16, vllm_build)
    try:
        groups = build_groups(8, 4, longest=80)
        for version in (0, 1):
            policy = build_policy(arch, version, contract)
            report = engine.update(policy.tensors, policy.scales, version)
            check_report(report, policy_digest(policy.tensors), policy.scales, version)
            check_formats(engine.describe(), contract)
            found = collect(engine, groups, Sampling(0.7, 12, frozenset({3})))
            reported = torch.tensor([logprob for done in found for logprob in done.logprobs])
            error = (reported - torch.cat(policy.logprobs(groups, found, 0.7))).abs()
            bounds = policy.bounds(groups, found, 0.7)
            assert error.mean() < bounds.mean
            assert error.max() < 2 * bounds.largest, "logits of 8 bits"
    finally:
        engine.close()
