"""SGLang on Hopper: what it samples and reports against the forward that trains, weights in place, faults that show.

Results of SGLang's own model depend on what runs beside a request, and on whether its prompt is cached. Where vLLM
must draw the same completions, here few may part. Were seeds lost, nearly all would.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from episode_cases import (
    check_a_short_play_is_near,
    check_what_a_closed_session_had_is_gone,
    drawn_by_session_and_by_generate,
    short_play,
)
from generation_cases import (
    build_groups,
    check_a_fault_shows,
    check_a_generation_that_is_left_gives_way_to_an_update,
    check_generation_follows_every_update,
    check_greedy_logprobs_are_those_of_temperature_one,
    check_greedy_tokens_are_the_references,
    check_known_tokens_are_scored,
    check_logprobs_are_those_of_the_distribution_sampled_from,
    check_near,
    check_tokens_come_as_often_as_their_logprobs_say,
    collect,
    drawn_together_and_alone,
    errors,
    part_and_whole_group,
    share_parted,
)
from sglang_cases import FP8, shared, start_engine

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


def test_generation_follows_every_update(engine, policies):
    check_generation_follows_every_update(engine, policies)


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


# Share of completions that may part.
FEW = 0.25


def test_greedy_logprobs_are_those_of_temperature_one(engine, policies):
    check_greedy_logprobs_are_those_of_temperature_one(engine, policies[0])


def test_tokens_come_as_often_as_their_logprobs_say(engine):
    check_tokens_come_as_often_as_their_logprobs_say(engine)


def test_a_seed_gives_its_completion_alone_and_in_any_batch(engine, policies):
    together, alone = drawn_together_and_alone(engine)
    assert share_parted(together, alone) < FEW
    for found in (together, alone):
        check_near(policies[0], build_groups(6, 4), found)


def test_part_of_a_group_draws_what_the_whole_group_did(engine):
    assert share_parted(*part_and_whole_group(engine, size=24, first=4)) < FEW


def test_what_is_left_generates_no_more_and_gives_way_to_an_update(engine, policies):
    check_a_generation_that_is_left_gives_way_to_an_update(engine, policies[0])


def test_a_turn_draws_the_number_of_its_place(engine):
    """A completion that was cut goes on with the token that it would have had, unlike in vLLM's own model."""
    (group,) = build_groups(1, 64)
    sampling = Sampling(1.7, 8, frozenset())
    whole = collect(engine, [group], sampling)
    begun = replace(group, prefix_tokens=tuple(tuple(done.tokens[:3]) for done in whole), max_tokens=(1,) * 64)
    later = collect(engine, [begun], sampling)
    assert {done.finish for done in later} == {"open"}
    assert sum(turn.tokens != done.tokens[3:4] for turn, done in zip(later, whole, strict=True)) < FEW * 64


# A tenth of the vocabulary, so that some stop.
SOME_STOPS = frozenset(range(100, 120))


def test_a_session_gives_what_generate_gives(engine, policies):
    """As far as SGLang's results depend on what runs beside a request, and on what is cached."""
    found, expected = drawn_by_session_and_by_generate(engine, SOME_STOPS)
    assert share_parted(found, expected) < 0.25
    same = [(a, b) for a, b in zip(found, expected, strict=True) if a.tokens == b.tokens]
    assert all(a.finish == b.finish for a, b in same)
    groups = build_groups(8, 4)[4:]
    check_near(policies[0], groups, [done for done in found if done.group >= 4])


def test_what_a_closed_session_had_is_gone(engine):
    check_what_a_closed_session_had_is_gone(engine)


def test_episodes_of_ten_turns(engine, policies):
    """From prefixes that decoding wrote, and again where all of them are cached and replies have another order."""
    play = short_play()
    assert engine.drop_prefixes()
    for order in (None, 1):
        check_a_short_play_is_near(policies[0], play.episodes(engine, order))
    assert engine.drop_prefixes(), "nothing runs"
