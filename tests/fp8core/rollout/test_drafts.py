"""What a draft continues with, how long it is, and what is remembered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8core.rollout import drafts
from fp8core.rollout.drafts import CONTEXTS, EARLIER, GROUP, PROMPT, SOURCES, Drafts, Votes

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def search(texts, tail):
    """By looking through all texts: the token that a vote over what followed the longest known context elects."""
    for context in (context for context in CONTEXTS if context <= len(tail)):
        elected, count = None, 0
        for source, text in texts:
            for place in range(context, len(text)):
                if text[place - context : place] == tail[-context:]:
                    if elected is None or text[place] == elected[0]:
                        elected, count = (text[place], source), min(count + 1, 63)
                    elif count == 1:
                        elected = (text[place], source)
                    else:
                        count -= 1
        if elected is not None:
            return elected
    return None


@given(texts=st.lists(st.tuples(st.sampled_from([PROMPT, GROUP, EARLIER]), TOKENS), max_size=4), tail=TOKENS)
def test_a_guess_is_what_a_search_through_all_texts_finds(texts, tail):
    votes = Votes()
    for source, text in texts:
        votes.add(text, 0, source)
    guess = votes.guess(tail)
    expected = search(texts, tail)
    assert (guess and (guess.token, guess.source)) == (expected and (expected[0], SOURCES[expected[1]]))


@given(text=TOKENS, cut=st.integers(0, 40))
def test_a_text_in_two_parts_votes_as_one(text, cut):
    whole, parts = Votes(), Votes()
    whole.add(text, 0, GROUP)
    parts.add(text[:cut], 0, GROUP)
    parts.add(text, cut, GROUP)
    assert whole._votes == parts._votes


def write(memory, key, prompt, tokens, prefix=()):
    """A sequence that writes these tokens one by one, without a draft."""
    memory.begin(key, prompt, prefix)
    for token in tokens:
        memory.observe(key, [token])
    memory.end(key)


PROMPT_TOKENS, ANSWER = [5, 6, 7], [1, 2, 3, 4, 1, 2, 3, 9]
LONG_ANSWER = list(range(10, 30))


def test_the_same_prompt_again_is_drafted_from_memory():
    memory = Drafts(8, 100)
    write(memory, "first", PROMPT_TOKENS, ANSWER)
    memory.begin("second", PROMPT_TOKENS, [])
    drafted = []
    while len(drafted) < len(ANSWER):
        room = len(ANSWER) - len(drafted)
        draft = memory.propose({"second": room}).get("second", [])
        assert len(draft) < room
        accepted = ANSWER[len(drafted) : len(drafted) + len(draft) + 1]
        assert draft == accepted[:-1]
        memory.observe("second", accepted)
        drafted += accepted
    assert memory.counts["draft_tokens_earlier"] == memory.counts["accepted_tokens_earlier"] > 0
    assert {name for name in memory.counts if "group" in name or "prompt" in name} == set()


def test_completions_of_the_group_in_flight_are_a_source():
    memory = Drafts(8, 100)
    memory.begin(1, PROMPT_TOKENS, [])
    memory.begin(2, PROMPT_TOKENS, [])
    memory.observe(1, ANSWER)
    assert memory.propose({2: 20})[2][:4] == ANSWER[:4]
    assert memory.counts["draft_tokens_group"] > 0


def test_a_sequence_that_goes_on_votes_with_new_tokens_alone():
    memory = Drafts(8, 100)
    write(memory, 1, PROMPT_TOKENS, [1, 2])
    write(memory, 1, PROMPT_TOKENS, [3, 4], prefix=[1, 2])
    memory.begin(1, PROMPT_TOKENS, [])
    (prompt,) = memory._prompts.values()
    expected = Votes()
    expected.add(PROMPT_TOKENS, 0, PROMPT)
    expected.add([*PROMPT_TOKENS, 1, 2, 3, 4], 3, EARLIER)
    assert prompt.build_votes()._votes == expected._votes


def test_a_full_forward_has_no_drafts_and_looks_nothing_up():
    memory = Drafts(8, 4)
    write(memory, "before", PROMPT_TOKENS, ANSWER)
    for key in range(64):
        memory.begin(key, PROMPT_TOKENS, [])
    assert memory.propose(dict.fromkeys(range(64), 20)) == {}
    assert all(prompt.votes is None for prompt in memory._prompts.values())
    assert memory.propose({0: 20}) != {}


def test_drafts_get_longer_as_they_come_true_and_vanish_as_they_do_not():
    lengths = {}
    for coming_true in (True, False):
        memory = Drafts(8, 2)
        lengths[coming_true] = []
        for number in range(40):
            write(memory, f"{number} before", [number + 50, 6, 7], LONG_ANSWER)
            memory.begin(number, [number + 50, 6, 7], [])
            draft = memory.propose({number: 20}).get(number, [])
            lengths[coming_true].append(len(draft))
            memory.observe(number, LONG_ANSWER[: len(draft) + 1] if coming_true else [8])
            memory.end(number)
    assert lengths[True][0] == lengths[False][0] <= 2
    assert lengths[True][-1] == 8
    assert lengths[False][-1] == 0


def test_memory_is_bounded_and_prompts_of_long_ago_go_first(monkeypatch):
    monkeypatch.setattr(drafts, "MEMORY_TOKENS", 100)
    monkeypatch.setattr(drafts, "PROMPT_TOKENS", 40)
    memory = Drafts(8, 100)
    for number in range(20):
        memory.begin(number, [50, number], [])
    for number in range(20):
        memory.observe(number, ANSWER)
        memory.end(number)
        assert memory._size == sum(prompt.size for prompt in memory._prompts.values())
        assert sum(prompt.size for prompt in memory._prompts.values() if not prompt.live) <= 100
    assert {prompt.tokens[1] for prompt in memory._prompts.values()} == {*range(10, 20)}
    for number in range(9):
        write(memory, number, [50, 19], [*ANSWER, number])
    (prompt,) = [prompt for prompt in memory._prompts.values() if prompt.tokens[1] == 19]
    assert prompt.size <= 40
    assert prompt.pieces[-1][0][-1] == 8


def test_beyond_the_bound_of_votes_a_prompt_has_no_drafts(monkeypatch):
    monkeypatch.setattr(drafts, "VOTES", 10)
    memory = Drafts(8, 100)
    for number in range(2):
        write(memory, number, [50, number], ANSWER)
        memory.begin(number, [50, number], [])
    assert memory.propose({0: 20, 1: 20}).keys() == {0}
    memory.end(0)
    assert memory.propose({1: 20}).keys() == {1}


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_draft_leaves_room_for_the_token_behind_it(room):
    memory = Drafts(8, 100)
    write(memory, "first", PROMPT_TOKENS, ANSWER)
    memory.begin("second", PROMPT_TOKENS, [])
    assert len(memory.propose({"second": room}).get("second", [])) <= room - 1
