"""Sessions of SGLang and episodes over them; test_aligned_gpu.py has episodes of the aligned model."""

import pytest
from episode_cases import (
    check_a_short_play_is_near,
    check_what_a_closed_session_had_is_gone,
    drawn_by_session_and_by_generate,
    short_play,
)
from generation_cases import build_groups, check_near, share_parted

pytestmark = pytest.mark.gpu

# A tenth of the vocabulary, so that some stop.
STOPS = frozenset(range(100, 120))


def test_a_session_gives_what_generate_gives(engine, policies):
    """As far as SGLang's results depend on what runs beside a request, and on what is cached."""
    found, expected = drawn_by_session_and_by_generate(engine, STOPS)
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
