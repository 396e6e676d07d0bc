"""Sessions of vLLM and episodes over them: what `generate` gives, whatever is beside it or cached."""

from dataclasses import replace

import pytest
import torch
from conftest import ON_GPU
from episode_cases import (
    check_a_short_play_is_near,
    check_what_a_closed_session_had_is_gone,
    drawn_by_session_and_by_generate,
    short_play,
)
from generation_cases import STOPS, build_groups, collect

from fp8core.rollout.engine import Sampling

pytestmark = pytest.mark.vllm


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
        assert [e.completion.tokens for e in again] == [e.completion.tokens for e in episodes]
    check_a_short_play_is_near(policies[0], episodes)


def test_turns_do_not_draw_the_same_numbers(engine):
    """vLLM's generators begin anew with every request; of one context a later turn draws otherwise than a first."""
    (group,) = build_groups(1, 64)
    sampling, one = Sampling(1.7, 40, frozenset()), (1,) * 64
    first = collect(engine, [replace(group, prompt=(*group.prompt, 5), room=one)], sampling)
    later = [collect(engine, [replace(group, begun=((5,),) * 64, room=one)], sampling) for _ in range(2)]
    assert_equal(*later)
    assert sum(a.tokens == b.tokens for a, b in zip(first, later[0], strict=True)) < 32
