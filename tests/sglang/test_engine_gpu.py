"""SGLang on Hopper: what it samples and reports against the forward that trains, weights in place, faults that show."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from episode_cases import drawn_by_session
from generation_cases import (
    STOPS,
    build_groups,
    check_a_fault_shows,
    check_generation_follows_every_update,
    check_greedy_tokens_are_the_references,
    check_known_tokens_are_scored,
    check_logprobs_are_those_of_the_distribution_sampled_from,
    check_near,
    collect,
    errors,
)
from sglang_cases import BF16, FP8, SHAPE, shared, start_engine

from fp8core.errors import EngineLost, UserError
from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import PolicyScales, Sampling
from fp8core.rollout.slots import EngineUpdateError
from fp8core.run.policy import SyncError, check_formats, check_report

pytestmark = pytest.mark.gpu

SAMPLING = Sampling(1.0, 12, frozenset({3}))


def test_it_runs_what_the_contract_says(engine, policies):
    described = engine.describe()
    check_formats(described, FP8)
    sent = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in policies[0].tensors.items()}
    assert described["dtypes"] == sent
    assert set(described["kernels"].values()) == {"BlockFp8Linear"}
    assert described["scales"] == [vars(layer) for layer in policies[0].scales.layers]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, policies, temperature):
    check_logprobs_are_those_of_the_distribution_sampled_from(engine, policies[0], temperature)


def test_greedy_tokens_are_the_references(engine, policies):
    check_greedy_tokens_are_the_references(engine, policies[0], FP8)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_known_tokens_are_scored_whether_they_would_be_drawn_or_not(engine, policies, temperature):
    check_known_tokens_are_scored(engine, policies[0], temperature)


def test_completions_stop_where_they_should(engine):
    found = collect(engine, build_groups(12, 4), Sampling(1.0, 24, STOPS))
    assert {done.finish for done in found} <= {"stop", "length"}
    for done in found:
        assert (done.tokens[-1] in STOPS) == (done.finish == "stop")
        assert not STOPS & set(done.tokens[:-1])
        assert done.finish == "stop" or len(done.tokens) == 24


def test_a_seed_decides_a_completion(engine):
    (group,) = build_groups(1, 4)
    first, again = (collect(engine, [group], Sampling(1.0, 16, STOPS)) for _ in range(2))
    assert [done.tokens for done in first] == [done.tokens for done in again]
    assert len({tuple(done.tokens) for done in first}) > 1
    other = replace(group, seeds=tuple(seed ^ 1 for seed in group.seeds))
    assert [done.tokens for done in collect(engine, [other], Sampling(1.0, 16, STOPS))] != [d.tokens for d in first]


def test_a_generation_that_is_left_ends(engine):
    running = engine.generate(build_groups(24, 4), Sampling(1.0, 60, frozenset()))
    next(running)
    running.close()
    assert engine.drop_prefixes()
    assert len(collect(engine, build_groups(2, 2), SAMPLING)) == 4


def test_a_session_takes_requests_while_others_run(engine, policies):
    """Some go on from what was begun, as a turn of an episode does."""
    groups = build_groups(8, 4)
    begun = [replace(group, begun=((5, 6),) * 4, room=(1, 2, 3, 99)) for group in groups[:4]]
    # A tenth of the vocabulary, so that some stop.
    found = drawn_by_session(engine, Sampling(1.0, 12, frozenset(range(100, 120))), groups[4:], begun)
    assert engine.drop_prefixes(), "nothing runs"
    assert len(found) == 32
    assert {done.finish for done in found} == {"stop", "length", "open"}
    asked = [replace(group, prompt=(*group.prompt, 5, 6)) for group in groups[:4]] + groups[4:]
    check_near(policies[0], asked, found)


def test_a_session_that_is_left_ends(engine):
    session = engine.open_session(Sampling(1.0, 60, frozenset()))
    session.add(build_groups(24, 4))
    session.step()
    session.close()
    assert engine.drop_prefixes()
    assert len(collect(engine, build_groups(2, 2), SAMPLING)) == 4


def test_prompts_that_are_too_long_are_refused(engine):
    (group,) = build_groups(1, 1, longest=40, shortest=40)
    with pytest.raises(UserError, match=r"40 tokens and rollout.max_new_tokens=250 are 290, .* is 256"):
        collect(engine, [group], Sampling(1.0, 250, STOPS))
    assert len(collect(engine, [group], Sampling(1.0, 216, frozenset()))[0].tokens) == 216


def test_generation_follows_every_update(engine, policies):
    check_generation_follows_every_update(engine, policies)


def test_a_policy_that_comes_in_parts_is_whole_at_the_end(engine, policies):
    report = shared.update_in_parts(engine, policies[1], parts=3)
    check_report(report, policy_digest(policies[1].tensors), policies[1].scales, 1)


def test_parameters_stay_where_they_are(engine, policies):
    before = engine.ask_policy("addresses")
    engine.update(policies[1].tensors, policies[1].scales, 1)
    assert engine.ask_policy("addresses") == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "k_proj.weight is missing"),
        (lambda t: t.pop("model.layers.0.mlp.down_proj.weight"), r"down_proj.weight: 0 of its \d+ rows were sent"),
        (lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t["model.norm.weight"]}), "has no parameter"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].float()}), r"float32 \[200, \d+\] was sent"),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(engine, policies, change, complaint):
    tensors = policies[1].tensors
    change(tensors)
    with pytest.raises(EngineUpdateError, match=complaint):
        engine.update(tensors, policies[1].scales, 1)
    assert engine.fingerprint() == policy_digest(policies[0].tensors)


@pytest.mark.parametrize(
    "fault", ["skipped_tensor", "stale_layer", "swapped_tiles", "swapped_parts", "flipped_bit", "wrong_version"]
)
def test_a_fault_in_the_worker_is_caught(engine, policies, fault):
    check_a_fault_shows(engine, policies[1], fault)


def test_a_wrong_scale_and_one_that_was_never_written_are_caught(engine, policies):
    policy = policies[1]
    try:
        engine.ask_policy("commit_fault", "wrong_scale")
        report = engine.update(policy.tensors, policy.scales, 1)
        with pytest.raises(SyncError, match=r"policy 1, layer 1: scales .* were sent, .* were read back"):
            check_report(report, policy_digest(policy.tensors), policy.scales, 1)
        engine.ask_policy("commit_fault", "unwritten_scale")
        with pytest.raises(EngineUpdateError, match="layer 1: its scale of"):
            engine.update(policy.tensors, policy.scales, 1)
    finally:
        engine.ask_policy("commit_fault", "")


def test_scales_of_another_policy_are_refused(engine, policies):
    with pytest.raises(ValueError, match="scales of policy 0 sent with weights of policy 1"):
        engine.update(policies[1].tensors, PolicyScales(0, policies[0].scales.layers), 1)


def test_this_sglang_has_the_scales_that_the_internals_set(engine):
    scales = [[1.0, 2.0, 3.0], [0.5, 0.25, 0.125]]
    assert engine.ask_policy("rewritten_scales", scales) == scales


def test_bf16_and_llama(sglang_build):
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    changed = {"family": "llama", "qk_norm": False, "rope_scaling": scaling, "tie_embeddings": True}
    shape = {**SHAPE, **changed}
    policy = shared.build_policy(Architecture(**shape), 0, BF16)
    engine = start_engine(sglang_build, BF16, shape=shape, graphs=False)
    try:
        report = engine.update(policy.tensors, PolicyScales(0, ()), 0)
        check_report(report, policy_digest(policy.tensors), PolicyScales(0, ()), 0)
        check_formats(engine.describe(), BF16)
        groups = build_groups(6, 2)
        # Both round: the reference alone is 0.028 from FP32 (transformers on a CPU, of this model).
        assert errors(policy, groups, collect(engine, groups, SAMPLING), 1.0).mean() < 0.056
    finally:
        engine.close()


def test_memory_is_given_back_and_taken(sglang_build, policies):
    engine = start_engine(sglang_build, sleep=True, kv_cache_gib=2.0)
    try:
        for policy in policies:
            engine.update(policy.tensors, policy.scales, policy.version)
            groups = build_groups(4, 2)
            assert errors(policy, groups, collect(engine, groups, SAMPLING), 1.0).mean() < 1
            awake = torch.cuda.mem_get_info()[0]
            engine.sleep()
            assert torch.cuda.mem_get_info()[0] > awake + (1 << 30)
        engine.update(policies[0].tensors, policies[0].scales, 0)
        assert engine.fingerprint() == policy_digest(policies[0].tensors)
    finally:
        engine.close()


def test_nothing_outlives_a_process_that_is_killed(sglang_build):
    program = str(Path(__file__).parent / "sglang_parent.py")
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        while (line := parent.stdout.readline()) != b"running\n":
            assert line, "it ended"
        below = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(below) >= 3
    shared.wait_until_gone(below)


def test_a_worker_that_is_killed_ends_the_generation(sglang_build, policies):
    before = psutil.Process().children(recursive=True)
    engine = start_engine(sglang_build, graphs=False)
    try:
        engine.update(policies[0].tensors, policies[0].scales, 0)
        below = [process for process in psutil.Process().children(recursive=True) if process not in before]
        running = engine.generate(build_groups(24, 4), Sampling(1.0, 200, frozenset()))
        next(running)
        holder = max(below, key=lambda process: process.memory_info().rss)
        holder.kill()
        with pytest.raises(EngineLost, match="SGLang's host ended"):
            list(running)
        assert engine.await_loss() is not None
    finally:
        engine.close()
