"""Sessions of vLLM and episodes over them: what `generate` gives, whatever is beside it or cached."""

from dataclasses import replace

import pytest
import torch
from conftest import ON_GPU, build_groups, collect
from scripted_pool import ScriptedPool

from fp8core.environments.chat import Talk
from fp8core.environments.protocol import Outcome, Said, Task, Turn
from fp8core.models.tokenizer import character_tokenizer
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import PromptGroup, Sampling, StreamingEngine, sample_seed
from fp8core.rollout.episodes import MultiTurn, TurnBudget, run_episodes

pytestmark = pytest.mark.vllm

TOKENIZER = character_tokenizer("0123456789+-*=,#[]$ abcdefgh", 200, "$")
TURNS = 10
SAMPLING = Sampling(1.0, 140, TOKENIZER.eos_ids)


@pytest.fixture(params=[True, False], ids=["prefixes cached", "prefixes computed"])
def session_engine(request, engine):
    engine.reads_prefixes = request.param
    assert engine.drop_prefixes()
    yield engine
    engine.reads_prefixes = True


def by_place(found):
    return {(done.group, done.sample): done for done in found}


def assert_equal(found, expected):
    """All tokens; log-probs as far as vLLM's depend on the batch."""
    assert {key: done.tokens for key, done in found.items()} == {key: done.tokens for key, done in expected.items()}
    assert {key: done.finish for key, done in found.items()} == {key: done.finish for key, done in expected.items()}
    for key, done in found.items():
        assert torch.tensor(done.logprobs).sub(torch.tensor(expected[key].logprobs)).abs().max() < (
            0.1 if ON_GPU else 1e-3
        )


def test_a_session_gives_what_generate_gives(session_engine):
    """Of requests that come late, and of some that go on from what was begun."""
    groups, sampling = build_groups(8, 4), Sampling(1.0, 12, frozenset({3, 7, 9}))
    begun = [
        replace(group, begun=tuple((5, 6, 8)[: 1 + i % 3] for i in group.samples), room=(1, 2, 3, 99))
        for group in groups[:4]
    ]
    expected = by_place([*collect(session_engine, groups[4:], sampling), *collect(session_engine, begun, sampling)])
    assert isinstance(session_engine, StreamingEngine)
    session, found, late = session_engine.open_session(sampling), {}, [*begun]
    session.add(groups[4:])
    while session.busy or late:
        found |= by_place(session.step())
        if late:
            session.add([late.pop()])
    session.close()
    assert_equal(found, expected)
    assert {done.finish for done in found.values()} == {"stop", "length", "open"}


def test_what_a_closed_session_had_is_gone(engine, policies):
    session = engine.open_session(SAMPLING)
    session.add(build_groups(4, 4))
    session.step()
    session.close()
    assert not session.busy
    assert engine.drop_prefixes(), "nothing runs"


def talkative(episode, turn, action):
    if turn + 1 == TURNS:
        return Outcome("judge")
    return Turn((Said("tool", "ab"[: episode[1] % 2 + 1] + "12345678"[: (turn * 3 + episode[0]) % 7]),))


def play(engine, order):
    tasks = {(group, sample): Task(f"12+7*3-{group}=", "", 0) for group in range(3) for sample in range(4)}
    groups = [
        PromptGroup(group, f"{group}", (9,), (0, 1, 2, 3), tuple(sample_seed(0, 0, group, i) for i in range(4)))
        for group in range(3)
    ]
    talk, budget = Talk(TOKENIZER, "plain"), TurnBudget(TURNS, turn_tokens=5)
    found = run_episodes(engine, groups, SAMPLING, MultiTurn(ScriptedPool(talkative, order), talk, tasks, budget))
    return sorted((e for whole in found for e in whole), key=lambda e: (e.completion.group, e.completion.sample))


def test_episodes_of_ten_turns(session_engine, policies):
    """The same tokens in any order of replies; log-probs as near to the trainer's as those of single turns."""
    episodes = play(session_engine, None)
    done = [episode.completion for episode in episodes]
    if not ON_GPU:  # There vLLM's results depend on the batch, unless the model is aligned (tests/gpu).
        assert [e.completion.tokens for e in play(session_engine, 1)] == [completion.tokens for completion in done]
    assert all(len(episode.turns) == TURNS for episode in episodes)
    policy = policies[0]
    batch = TokenBatch.of([episode.prompt for episode in episodes], [completion.tokens for completion in done])
    scored = policy.trainer.logprobs(batch, 1.0, policy.scales.layers).logprobs
    asked = [PromptGroup(i, "", e.prompt, (0,), (0,)) for i, e in enumerate(episodes)]
    bounds = policy.bounds(asked, [replace(c, group=i) for i, c in enumerate(done)], 1.0)
    error = torch.cat(
        [
            (row[: len(completion.tokens)] - torch.tensor(completion.logprobs))[torch.tensor(completion.written)].abs()
            for row, completion in zip(scored, done, strict=True)
        ]
    )
    assert len(error) > 300
    assert error.mean() < bounds.mean
    assert error.max() < bounds.largest


def test_turns_do_not_draw_the_same_numbers(engine):
    """vLLM's generators begin anew with every request; of one context a later turn draws otherwise than a first."""
    (group,) = build_groups(1, 64)
    sampling, one = Sampling(1.7, 40, frozenset()), (1,) * 64
    first = collect(engine, [replace(group, prompt=(*group.prompt, 5), room=one)], sampling)
    later = [collect(engine, [replace(group, begun=((5,),) * 64, room=one)], sampling) for _ in range(2)]
    assert_equal(by_place(later[0]), by_place(later[1]))
    assert sum(a.tokens == b.tokens for a, b in zip(first, later[0], strict=True)) < 32
