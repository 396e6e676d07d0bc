"""Weights in place: what vLLM holds is what was sent, generation and operations follow it, and every fault shows."""

import pytest
from conftest import (
    CONTRACT,
    ON_GPU,
    check_parameters_stay_where_they_are,
    update_in_parts,
)
from generation_cases import (
    build_groups,
    check_a_fault_shows,
    check_a_policy_that_lacks_a_tensor_is_never_held,
    check_generation_follows_every_update,
    check_near,
    collect,
)

from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import PolicyScales, Sampling
from fp8core.rollout.slots import EngineUpdateError
from fp8core.run.policy import SyncError, check_formats, check_report

pytestmark = pytest.mark.vllm

SAMPLING = Sampling(1.0, 12, frozenset({3}))


def test_generation_follows_every_update(engine, policies):
    check_generation_follows_every_update(engine, policies)


def test_a_policy_that_comes_in_parts_is_whole_at_the_end(engine, policies):
    policy, sent = policies[1], policies[1].tensors
    report = update_in_parts(engine, policy, parts=3)
    check_report(report, policy_digest(sent), policy.scales, 1)
    check_a_policy_that_lacks_a_tensor_is_never_held(engine, policy)


def test_parameters_stay_where_they_are(engine, policies):
    check_parameters_stay_where_they_are(engine, policies[1])


def test_the_engine_runs_what_the_contract_says(engine, policies):
    described = engine.describe()
    check_formats(described, CONTRACT)
    sent = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in policies[0].tensors.items()}
    assert described["dtypes"] == sent
    kernel = "DeepGemmFp8BlockScaledMMKernel" if ON_GPU else "InPlaceLinear"
    assert described["kernels"] == dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), kernel)
    assert described["scales"] == ([vars(layer) for layer in policies[0].scales.layers] if ON_GPU else [])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "k_proj.weight is missing"),
        (lambda t: t.pop("model.layers.0.mlp.down_proj.weight"), r"down_proj.weight: 0 of its \d+ rows were sent"),
        (lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t["model.norm.weight"]}), "has no parameter"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].float()}), r"float32 \[200, \d+\] was sent"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:64].clone()}), r"64 of its \d+ rows"),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(engine, policies, change, complaint):
    tensors = policies[1].tensors
    change(tensors)
    with pytest.raises(EngineUpdateError, match=complaint):
        engine.update(tensors, policies[1].scales, 1)
    groups = build_groups(2, 2)
    found = collect(engine, groups, SAMPLING)
    check_near(policies[0], groups, found)
    assert engine.fingerprint() == policy_digest(policies[0].tensors)


@pytest.mark.parametrize(
    "fault", ["skipped_tensor", "stale_layer", "swapped_tiles", "swapped_parts", "flipped_bit", "wrong_version"]
)
def test_a_fault_in_the_worker_is_caught(engine, policies, fault):
    check_a_fault_shows(engine, policies[1], fault)


@pytest.mark.skipif(not ON_GPU, reason="needs an FP8 cache")
def test_a_scale_that_is_wrong_or_was_never_written_is_caught(engine, policies):
    policy = policies[1]
    try:
        engine.ask_policy("commit_fault", "wrong_scale")
        report = engine.update(policy.tensors, policy.scales, 1)
        with pytest.raises(SyncError, match=r"policy 1, layer 1: scales .* were sent, .* were read back"):
            check_report(report, policy_digest(policy.tensors), policy.scales, 1)
        engine.ask_policy("commit_fault", "unwritten_scale")
        with pytest.raises(EngineUpdateError, match="layer 1: its scale of k was never written"):
            engine.update(policy.tensors, policy.scales, 1)
    finally:
        engine.ask_policy("commit_fault", "")


def test_scales_of_another_policy_are_refused(engine, policies):
    with pytest.raises(ValueError, match="scales of policy 0 sent with weights of policy 1"):
        engine.update(policies[1].tensors, PolicyScales(0, policies[0].scales.layers), 1)


def test_this_vllm_has_the_scales_that_the_internals_set(engine):
    scales = [[1.0, 2.0, 3.0], [0.5, 0.25, 0.125]]
    assert engine.ask_policy("rewritten_scales", scales) == scales
