"""What vLLM samples, and the log-probs it reports, against the forward that trains; for Qwen3 and for Llama."""

from dataclasses import replace

import pytest
import torch
from conftest import CONTRACT, ON_GPU, OPTIONS, SHAPE, build_policy
from episode_cases import (
    check_a_short_play_is_near,
    check_what_a_closed_session_had_is_gone,
    drawn_by_session_and_by_generate,
    short_play,
)
from generation_cases import (
    STOPS,
    build_groups,
    check_a_generation_that_is_left_gives_way_to_an_update,
    check_greedy_logprobs_are_those_of_temperature_one,
    check_greedy_tokens_are_the_references,
    check_known_tokens_are_scored,
    check_logprobs_are_those_of_the_distribution_sampled_from,
    check_small_model,
    check_tokens_come_as_often_as_their_logprobs_say,
    collect,
    drawn_together_and_alone,
    part_and_whole_group,
    share_parted,
    with_a_bf16_head,
)

from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.numerics.rotary import Llama3Scaling, YarnScaling
from fp8core.rollout.engine import Sampling

pytestmark = pytest.mark.vllm


def test_greedy_tokens_are_the_references(engine, policies):
    equal = check_greedy_tokens_are_the_references(engine, policies[0], CONTRACT)
    assert ON_GPU or equal >= 6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, policies, temperature):
    check_logprobs_are_those_of_the_distribution_sampled_from(engine, policies[0], temperature)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_known_tokens_are_scored_whether_they_would_be_drawn_or_not(engine, policies, temperature):
    check_known_tokens_are_scored(engine, policies[0], temperature)


def test_greedy_logprobs_are_those_of_temperature_one(engine, policies):
    check_greedy_logprobs_are_those_of_temperature_one(engine, policies[0])


def test_tokens_come_as_often_as_their_logprobs_say(engine):
    check_tokens_come_as_often_as_their_logprobs_say(engine)


def test_a_seed_gives_its_completion_alone_and_in_any_batch(engine):
    assert share_parted(*drawn_together_and_alone(engine)) == 0


def test_part_of_a_group_draws_what_the_whole_group_did(engine):
    assert share_parted(*part_and_whole_group(engine, size=6, first=4)) == 0


def test_generation_can_be_abandoned(engine, policies):
    check_a_generation_that_is_left_gives_way_to_an_update(engine, policies[0])


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(UserError, match=r"rollout.temperature=0.005: vLLM samples at 0.01 or above"):
        collect(engine, build_groups(4, 1), Sampling(0.005, 5, STOPS))


SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
# Structures of Llama-3.2-1B and Qwen2.5-0.5B: a shared embedding, scaled positions, biases, and heads of 64.
SMALL = [
    {"family": "llama", "num_heads": 4, "rope_scaling": SCALING},
    {
        **{"family": "qwen2", "hidden_size": 256, "intermediate_size": 384},
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        "rope_scaling": YarnScaling(factor=4.0, original_max_position_embeddings=64),
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SMALL, ids=["llama", "qwen2"])
def test_small_models_that_share_their_embedding(vllm_build, changes):
    from fp8core.rollout.vllm.engine import VllmEngine

    contract = with_a_bf16_head(CONTRACT)
    arch = Architecture(**{**SHAPE, "tie_embeddings": True, **changes})
    engine = VllmEngine(arch, contract, OPTIONS, 16, vllm_build)
    try:
        check_small_model(engine, arch, contract, build_policy)
    finally:
        engine.close()


def assert_equal(found, expected):
    """All tokens; log-probs as far as vLLM's depend on the batch."""
    for done, other in zip(found, expected, strict=True):
        assert (done.group, done.sample, done.tokens, done.finish) == (
            *(other.group, other.sample, other.tokens, other.finish),
        )
        assert torch.tensor(done.logprobs).sub(torch.tensor(other.logprobs)).abs().max() < (0.1 if ON_GPU else 1e-3)


def test_a_session_gives_what_generate_gives(engine):
    assert_equal(*drawn_by_session_and_by_generate(engine, STOPS))


def test_what_a_closed_session_had_is_gone(engine):
    check_what_a_closed_session_had_is_gone(engine)


def test_episodes_of_ten_turns(engine, policies):
    """The same tokens in any order of replies; log-probs as near to the trainer's as those of single turns."""
    play = short_play()
    episodes = play.episodes(engine, None)
    if not ON_GPU:  # There vLLM's results depend on the batch, unless the model is aligned (tests/gpu).
        again = play.episodes(engine, 1)
        assert [e.tokens for e in again] == [e.tokens for e in episodes]
    check_a_short_play_is_near(policies[0], episodes)


def test_turns_do_not_draw_the_same_numbers(engine):
    """vLLM's generators begin anew with every request; of one context a later turn draws otherwise than a first."""
    (group,) = build_groups(1, 64)
    sampling, one = Sampling(1.7, 40, frozenset()), (1,) * 64
    first = collect(engine, [replace(group, prompt=(*group.prompt, 5), max_tokens=one)], sampling)
    later = [collect(engine, [replace(group, prefix_tokens=((5,),) * 64, max_tokens=one)], sampling) for _ in range(2)]
    assert_equal(*later)
    assert sum(a.tokens == b.tokens for a, b in zip(first, later[0], strict=True)) < 32
