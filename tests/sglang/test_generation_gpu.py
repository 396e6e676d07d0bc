"""What SGLang samples on Hopper, as tests/vllm asks it of vLLM.

Results of SGLang's own model depend on what runs beside a request, and on whether its prompt is cached. Where vLLM
must draw the same completions, here few may part. Were seeds lost, nearly all would.
"""

from dataclasses import replace

import pytest
from generation_cases import (
    build_groups,
    check_a_generation_that_is_left_gives_way_to_an_update,
    check_a_policy_that_lacks_a_tensor_is_never_held,
    check_greedy_logprobs_are_those_of_temperature_one,
    check_groups_come_whole_and_as_they_finish,
    check_near,
    check_small_model,
    check_tokens_come_as_often_as_their_logprobs_say,
    collect,
    drawn_together_and_alone,
    drawn_twice_by,
    part_and_whole_group,
    prompts_that_exceed_a_batch,
    sent_and_held_scales,
    share_parted,
    with_a_bf16_head,
)
from sglang_cases import FP8, SHAPE, shared, start_engine

from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import Sampling
from fp8core.rollout.slots import EngineUpdateError

pytestmark = pytest.mark.gpu

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


def test_prompts_that_exceed_a_batch_change_nothing(engine, policies):
    """Of 24 prompts 16 run together; attention reads keys of several blocks."""
    assert share_parted(*prompts_that_exceed_a_batch(engine, policies[0])) < FEW


def test_part_of_a_group_draws_what_the_whole_group_did(engine):
    assert share_parted(*part_and_whole_group(engine, size=24, first=4)) < FEW


def test_groups_come_whole_and_as_they_finish(engine):
    check_groups_come_whole_and_as_they_finish(engine)


def test_what_is_left_generates_no_more_and_gives_way_to_an_update(engine, policies):
    check_a_generation_that_is_left_gives_way_to_an_update(engine, policies[0])


def test_no_groups_give_no_completions(engine):
    assert collect(engine, [], Sampling(1.0, 4, frozenset())) == []


def test_temperatures_that_divide_by_nearly_nothing_are_refused(engine):
    with pytest.raises(UserError, match=r"rollout.temperature=5e-05: SGLang samples at 0.0001 or above"):
        collect(engine, build_groups(4, 1), Sampling(5e-5, 5, frozenset()))


def test_every_seed_is_one(engine):
    """Of 64 bits the lower 63 draw: the first two have the same, so have the last two; the others have their own."""
    seeds = [-1, 2**63 - 1, 1, 2**62, -(2**63), 0]
    first, second = drawn_twice_by(seeds, engine)
    assert [done.tokens for done in first] == [done.tokens for done in second]
    drawn = [tuple(done.tokens) for done in first]
    assert (drawn[0], drawn[4]) == (drawn[1], drawn[5])
    assert len(set(drawn)) == 4


def test_a_turn_draws_the_number_of_its_place(engine):
    """A completion that was cut goes on with the token that it would have had, unlike in vLLM's own model."""
    (group,) = build_groups(1, 64)
    sampling = Sampling(1.7, 8, frozenset())
    whole = collect(engine, [group], sampling)
    begun = replace(group, begun=tuple(tuple(done.tokens[:3]) for done in whole), room=(1,) * 64)
    later = collect(engine, [begun], sampling)
    assert {done.finish for done in later} == {"open"}
    assert sum(turn.tokens != done.tokens[3:4] for turn, done in zip(later, whole, strict=True)) < FEW * 64


SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
# Structures of Llama-3.2-1B and Qwen2.5-0.5B, in whole tiles: a shared embedding, scaled positions, biases, and heads
# of 64.
SMALL = [
    {"family": "llama", "num_heads": 4, "rope_scaling": SCALING},
    {"family": "qwen2", "qkv_bias": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SMALL, ids=["llama", "qwen2"])
def test_small_models_that_share_their_embedding(sglang_build, changes):
    contract = with_a_bf16_head(FP8)
    shape = {**SHAPE, "qk_norm": False, "tie_embeddings": True, **changes}
    engine = start_engine(sglang_build, contract, shape=shape)
    try:
        check_small_model(engine, Architecture(**shape), contract, shared.build_policy)
    finally:
        engine.close()


def test_scales_of_both_sources_reach_the_engine(engine, policies):
    found = sent_and_held_scales(engine, policies, FP8)
    assert found.keys() == {"logprob_pass", "fresh_pass"}
    for sent, held in found.values():
        assert held == [vars(layer) for layer in sent]


def test_a_policy_that_lacks_a_tensor_is_never_held(engine, policies):
    check_a_policy_that_lacks_a_tensor_is_never_held(engine, policies[1])


def test_a_tensor_that_is_too_short_changes_nothing(engine, policies):
    """Neither what is held, nor what is generated."""
    tensors = policies[1].tensors
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:64].clone()
    with pytest.raises(EngineUpdateError, match=r"64 of its \d+ rows"):
        engine.update(tensors, policies[1].scales, 1)
    groups = build_groups(2, 2)
    check_near(policies[0], groups, collect(engine, groups, Sampling(1.0, 12, frozenset({3}))))
    assert engine.fingerprint() == policy_digest(policies[0].tensors)
