"""Qwen3-MoE's shape: experts in place and read back, their log-probs, and the experts that were chosen."""

import pytest
import torch
from conftest import CONTRACT, ON_GPU, OPTIONS, SHAPE, build_policy, check_parameters_stay_where_they_are
from generation_cases import (
    build_groups,
    check_a_fault_shows,
    check_generation_follows_every_update,
    collect,
    errors,
)

from fp8core.models.architecture import Architecture, Experts
from fp8core.numerics.e4m3 import row_codes
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.recipe import POW2
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Sampling
from fp8core.run.policy import check_formats, check_report

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not ON_GPU, reason="vLLM for CPUs computes no experts"),
]

# A dense layer between two with experts; the router's logits are as far apart as those of the head.
EXPERTS = Experts(count=8, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=(1,))
ARCH = Architecture(**{**SHAPE, "family": "qwen3_moe", "num_layers": 3, "experts": EXPERTS})
SAMPLING = Sampling(1.0, 12, frozenset({3}), report_experts=True)


@pytest.fixture(scope="module")
def started(vllm_build):
    from fp8core.rollout.vllm.engine import VllmEngine

    options = OPTIONS.model_copy(update={"sleep": True})
    engine = VllmEngine(ARCH, CONTRACT, options, 16, vllm_build, "faulty_worker.FaultyWorker", routes=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def policies():
    return build_policy(ARCH, 0), build_policy(ARCH, 1)


def test_generation_follows_every_update(engine, policies):
    check_generation_follows_every_update(engine, policies)


def test_the_engine_runs_what_the_contract_says(engine, policies):
    described = engine.describe()
    check_formats(described, CONTRACT)
    assert described["dtypes"]["model.layers.0.mlp.gate.weight"] == "bfloat16"
    assert described["kernels"]["routed_experts"] == "TritonOrDeepGemmExperts"


def test_parameters_stay_where_they_are(engine, policies):
    check_parameters_stay_where_they_are(engine, policies[1])


@pytest.mark.parametrize("fault", ["swapped_experts", "doubled_tile"])
def test_a_fault_among_experts_shows(engine, policies, fault):
    check_a_fault_shows(engine, policies[1], fault)


def test_an_engine_that_slept_holds_what_it_was_sent(engine, policies):
    """Waking, vLLM's first runner sets the scales of K and V to 1.0."""
    groups, policy = build_groups(8, 2), policies[1]
    engine.update(policy.tensors, policy.scales, 1)
    before = collect(engine, groups, SAMPLING)
    engine.sleep()
    report = engine.update(policy.tensors, policy.scales, 1)
    check_report(report, policy_digest(policy.tensors), policy.scales, 1)
    after = collect(engine, groups, SAMPLING)
    assert sum(a.tokens == b.tokens for a, b in zip(before, after, strict=True)) >= 12


def test_what_leaves_an_activation_is_quantised_as_agreed(started):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import silu_mul_per_token_group_quant_fp8_colmajor

    # Every BF16 value of 80 binades is the largest of a group; silu(64) is 64, so that only quantising can differ.
    first = torch.tensor(2.0**-20, dtype=torch.bfloat16).view(torch.int16)
    largest = torch.arange(int(first), int(first) + 80 * 128, dtype=torch.int16).view(torch.bfloat16)
    draws = torch.rand(len(largest), 128, generator=torch.Generator().manual_seed(0))
    up = largest[:, None] * (draws * 2 - 1).bfloat16()
    up[:, 5] = largest
    gated = torch.cat((torch.full_like(up, 64.0), up), dim=1).cuda()
    codes, scales = silu_mul_per_token_group_quant_fp8_colmajor(gated, use_ue8m0=True)
    expected_codes, expected_scales = row_codes(up * 64, POW2.activations)
    assert scales.cpu().equal(expected_scales)
    assert codes.cpu().view(torch.uint8).equal(expected_codes.view(torch.uint8))


def test_the_chosen_experts_bring_training_nearer(engine, policies):
    groups, policy = build_groups(12, 4), policies[0]
    found = collect(engine, groups, SAMPLING)
    prompts = {group.group: list(group.prompt) for group in groups}
    for done in found:
        assert done.experts.shape == (len(prompts[done.group]) + len(done.tokens) - 1, 2, 2)
        assert (done.experts[..., 0] < done.experts[..., 1]).all(), "ascending"
    batch = TokenBatch.of(
        [prompts[done.group] for done in found], [done.tokens for done in found], [done.experts for done in found]
    )
    scored = policy.trainer.logprobs(batch, 1.0, policy.scales.layers).logprobs
    pairs = zip(scored, found, strict=True)
    replayed = torch.cat([(row[: len(done.tokens)] - torch.tensor(done.logprobs)).abs() for row, done in pairs])
    assert replayed.mean() <= errors(policy, groups, found, 1.0).mean() < policy.bounds(groups, found, 1.0).mean
