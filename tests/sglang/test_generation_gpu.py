"""What SGLang samples on Hopper, as tests/vllm asks it of vLLM.

Results of SGLang's own model depend on what runs beside a request, and on whether its prompt is cached. Where vLLM
must draw the same completions, here few may part. Were seeds lost, nearly all would.
"""

from dataclasses import replace

import pytest
from generation_cases import (
    build_groups,
    check_a_generation_that_is_left_gives_way_to_an_update,
    check_greedy_logprobs_are_those_of_temperature_one,
    check_near,
    check_small_model,
    check_tokens_come_as_often_as_their_logprobs_say,
    collect,
    drawn_together_and_alone,
    part_and_whole_group,
    sent_and_held_scales,
    share_parted,
    with_a_bf16_head,
)
from sglang_cases import FP8, SHAPE, shared, start_engine

from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.rollout.engine import Sampling

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


def test_part_of_a_group_draws_what_the_whole_group_did(engine):
    assert share_parted(*part_and_whole_group(engine, size=24, first=4)) < FEW


def test_what_is_left_generates_no_more_and_gives_way_to_an_update(engine, policies):
    check_a_generation_that_is_left_gives_way_to_an_update(engine, policies[0])


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
