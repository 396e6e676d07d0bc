"""Episodes of several turns: exact, the same in any order of replies, and ended by their budgets."""

import json
import random
from dataclasses import replace

import pytest
import torch
from scripted_pool import CALCULATOR, ScriptedPool

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.environments.chat import Talk
from fp8core.environments.pool import reply_of
from fp8core.environments.protocol import Outcome, Said, Task, Turn
from fp8core.errors import UserError
from fp8core.models.tokenizer import character_tokenizer
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PromptGroup, Sampling, StreamingEngine, sample_seed
from fp8core.rollout.episodes import MultiTurn, TurnBudget, one_turn_episodes, run_episodes
from fp8core.run.stream import stream_table
from fp8core.store.tables import STREAM_OF_EPISODES

# By the rule whose draws end no turn too early.
FP8 = PrecisionContract(scale_rule="pow2")
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
)
ALPHABET = "0123456789+-*=,#[]$ abcdefgh"
TOKENIZER = character_tokenizer(ALPHABET, 40, "$")
TALK = Talk(TOKENIZER, "plain")
TURNS = 12
SAMPLING = Sampling(1.0, 150, TOKENIZER.eos_ids)
BUDGET = TurnBudget(turns=TURNS, turn_tokens=5, observation_tokens=9)


@pytest.fixture(scope="module")
def shape(architecture):
    return architecture(max_positions=192)


@pytest.fixture(scope="module")
def pair(shape, pair_of):
    """FP8 on both sides; tests must leave it as it is."""
    return pair_of(FP8, shape, max_batch=7)


def build_tasks(groups, size):
    """Tasks of groups whose prompts begin alike, by episode."""
    questions = [f"12+{'7*3-' * group}{group}=" for group in range(groups)]
    return {(group, sample): Task(questions[group], "", 0) for group in range(groups) for sample in range(size)}


def build_groups(tasks):
    samples = {}
    for group, sample in tasks:
        samples.setdefault(group, []).append(sample)
    return [
        PromptGroup(group, f"{group}", (9,), tuple(held), tuple(sample_seed(0, 0, group, sample) for sample in held))
        for group, held in samples.items()
    ]


def talkative(episode, turn, action):
    """Answers of different lengths, some of them equal in several episodes; the last turn is to be judged."""
    if turn + 1 == TURNS:
        return Outcome("judge", reward=0.5, failed=1, detail="over", info={"turns": turn + 1})
    text = "ab"[: episode[1] % 2 + 1] + "12345678"[: (turn * 3 + episode[0]) % 7]
    return Turn((Said("tool", text),), reward=0.25, info={"length": float(len(text))})


def play(engine, pool, tasks, budget=BUDGET, sampling=SAMPLING, talk=TALK):
    """All episodes, by group and sample."""
    groups = build_groups(tasks)
    found = list(run_episodes(engine, groups, sampling, MultiTurn(pool, talk, tasks, budget)))
    places = [[e.key for e in part] for part in found]
    assert all(part == sorted(part) for part in places)
    assert sorted(key for part in places for key in part) == sorted(tasks)
    return sorted((e for part in found for e in part), key=lambda e: e.key)


def policy_log_ratios(pair, episodes):
    """The trainer's log-probs minus those of the engine, of every token that the policy wrote."""
    batch = TokenBatch.of([done.prompt_tokens for done in episodes], [done.tokens for done in episodes])
    scored = pair.trainer.logprobs(batch, 1.0, pair.scales.layers).logprobs
    return torch.cat(
        [
            (row[: len(done.tokens)] - torch.tensor(done.logprobs))[torch.tensor(done.policy_mask)]
            for row, done in zip(scored, episodes, strict=True)
        ]
    )


@pytest.mark.parametrize("contract", [FP8, BF16], ids=["fp8", "bf16"])
def test_twelve_turns_are_exact(shape, pair_of, contract):
    """Of episodes that begin alike, in a batch smaller than they are many, with replies in any order."""
    pair = pair_of(contract, shape, max_batch=7)
    episodes = play(pair.engine, ScriptedPool(talkative, order=1), build_tasks(3, 4))
    assert all(len(episode.turns) == 1 + TURNS for episode in episodes)
    ratios = policy_log_ratios(pair, episodes)
    written = sum(episode.length for episode in episodes)
    assert len(ratios) == written > 300
    assert torch.equal(ratios, torch.zeros(written)), f"{int((ratios != 0).sum())} of {written} tokens differ"


def play_in_parts(engine, pool, tasks, max_tokens):
    """As `play`, each episode so many tokens of one turn at a time, as a run stores it between the parts."""
    prefixes, states, over, known, parts = {}, {}, {}, {}, 0
    while len(over) < len(tasks):
        left = {key: task for key, task in tasks.items() if key not in over}
        asked = MultiTurn(pool, TALK, left, BUDGET, prefixes, max_tokens, states)
        found = [one for whole in run_episodes(engine, build_groups(left), SAMPLING, asked) for one in whole]
        parts += 1
        for done in found:
            key = done.key
            if not done.in_flight:
                over[key] = done
                continue
            before = known.get(key, 0)
            known[key] = len(done.tokens)
            assert before < len(done.tokens)
            assert sum((done.policy_mask or [True] * len(done.tokens))[before:]) <= max_tokens
            # Every third was stored, and is read again.
            if (sum(key) + parts) % 3 == 0:
                del states[key]
                (row,) = stream_table([done], STREAM_OF_EPISODES).to_pylist()
                prefixes[key] = Completion.of_row(row)
    return [over[key] for key in tasks], parts


@pytest.mark.parametrize(("max_tokens", "order"), [(1, None), (2, 5), (100, 3)])
def test_parts_change_nothing_and_an_environment_that_has_ended_is_asked_again(pair, in_turn, max_tokens, order):
    pool = ScriptedPool(talkative, order=order)
    found, parts = play_in_parts(pair.engine, pool, build_tasks(3, 4), max_tokens)
    assert found == in_turn
    assert parts >= TURNS
    assert sorted(set(pool.ended)) == sorted(build_tasks(3, 4))
    assert pool.resting == set()


def test_an_environment_that_answers_otherwise_when_it_is_asked_again_has_crashed(pair):
    told = []

    def moody(episode, turn, action):
        told.append(action)
        return Turn((Said("tool", "a" * (len(told) % 7 + 1)),))

    (one,), _ = play_in_parts(pair.engine, ScriptedPool(moody), {(0, 1): build_tasks(1, 2)[0, 1]}, 3)
    assert one.turns[-1].outcome == "crashed"
    assert one.turns[-1].detail.startswith("it answered otherwise when it was asked the same again")
    assert one.turns[-1].said == ""
    assert one.turns[-1].end == one.turns[-1].observation_end == len(one.tokens)
    assert one.turns[-1].begin == one.turns[-2].observation_end


@pytest.fixture(scope="module")
def pool():
    return ScriptedPool(talkative)


@pytest.fixture(scope="module")
def in_turn(pair, pool):
    """Episodes whose environments answer at once."""
    return play(pair.engine, pool, build_tasks(3, 4))


@pytest.mark.parametrize("max_batch", [1, 64])
def test_the_batch_changes_nothing(shape, pair_of, in_turn, max_batch):
    engine = pair_of(FP8, shape, max_batch=max_batch).engine
    tasks = build_tasks(3, 4)
    assert play(engine, ScriptedPool(talkative, order=4), {(1, 2): tasks[1, 2], (2, 0): tasks[2, 0]}) == [
        episode for episode in in_turn if episode.key in ((1, 2), (2, 0))
    ]


def test_what_is_in_an_episode(in_turn):
    """Turns and observations follow one another without a gap, and the mask tells them apart."""
    for done in in_turn:
        opening, *turns = done.turns
        place = 0
        assert done.prompt_tokens == TOKENIZER.encode(build_tasks(3, 4)[done.key].question)
        for number, turn in enumerate(turns):
            assert turn.text == TOKENIZER.decode(done.tokens[turn.begin : turn.end]).removesuffix("$")
            assert turn.begin == place < turn.end <= turn.begin + 5
            assert done.policy_mask[turn.begin : turn.end] == [True] * (turn.end - turn.begin)
            assert done.policy_mask[turn.end : turn.observation_end] == [False] * (turn.observation_end - turn.end)
            assert done.logprobs[turn.end : turn.observation_end] == [0.0] * (turn.observation_end - turn.end)
            assert all(logprob < 0 for logprob in done.logprobs[turn.begin : turn.end])
            if number + 1 < TURNS:
                (said,) = reply_of(turn).messages
                observed = TOKENIZER.decode(done.tokens[turn.end : turn.observation_end])
                assert observed == f"={said.content}"
            place = turn.observation_end
        assert place == len(done.tokens) == len(done.logprobs) == len(done.policy_mask)
        last = turns[-1]
        assert (last.said, last.end, last.failed, json.loads(last.info)) == ("", place, 1, {"turns": TURNS})
        assert (last.outcome, last.detail, [turn.reward for turn in turns]) == ("judge", "over", [*[0.25] * 11, 0.5])
        assert (opening.seconds, turns[0].seconds) == (0.25, 0.5)
        assert reply_of(opening).tools == (CALCULATOR,)


def chatty(episode, turn, action):
    return Turn((Said("tool", "1234567"),))


@pytest.mark.parametrize(
    ("budget", "tokens", "finish", "turns", "detail"),
    [
        (TurnBudget(3, 5), 150, "turns", 3, "after 3 turns"),
        # An observation that takes all that is left.
        (TurnBudget(99, 5), 26, "length", 2, "leaves no room, 8 are left"),
        (TurnBudget(99, 5), 40, "length", None, "the episode has its 40 tokens"),
        (TurnBudget(99, 5, observation_tokens=7), 150, "observation", 1, "8 tokens, 7 are allowed"),
        (TurnBudget(99), 8, "length", 1, ""),
    ],
)
def test_budgets(pair, budget, tokens, finish, turns, detail):
    sampling = replace(SAMPLING, max_new_tokens=tokens, stop_ids=frozenset())
    pool = ScriptedPool(chatty, order=5)
    episodes = play(pair.engine, pool, build_tasks(2, 3), budget, sampling)
    for episode in episodes:
        last = episode.turns[-1]
        assert (episode.finish, last.outcome) == (finish, "unparsed")
        assert detail in last.detail
        assert len(episode.tokens) <= tokens
        assert last.turn == len(episode.turns) - 1 == (turns or last.turn)
        assert last.observation_end == last.end
        assert reply_of(last).messages == (Said("tool", "1234567"),)
    assert len(pool.ended) == 6


@pytest.mark.parametrize(
    ("opening", "finish", "outcome", "detail"),
    [
        (Outcome("crashed", detail="no such file"), "stop", "crashed", "no such file"),
        (Turn((Said("user", "é"),)), "observation", "unparsed", "no token for"),
        (Turn((Said("user", "\ud800"),)), "observation", "unparsed", "surrogates not allowed"),
        (Turn(()), "observation", "unparsed", "0 tokens"),
        (Turn((Said("user", "1" * 40),)), "observation", "unparsed", "40 tokens, 1 to 30 fit"),
    ],
)
def test_episodes_that_never_begin(pair, opening, finish, outcome, detail):
    """They are a row like all others, of a token that nobody wrote."""
    pool = ScriptedPool(chatty, opening=opening)
    (done,) = play(pair.engine, pool, {(0, 0): Task("1=", "", 0)}, TurnBudget(9, prompt_tokens=30))
    (turn,) = done.turns
    assert (done.finish, turn.outcome, turn.observation_end) == (finish, outcome, 1)
    assert detail in turn.detail
    assert (done.prompt_tokens, done.tokens, done.logprobs, done.policy_mask) == (
        [9],
        [TOKENIZER.end_id],
        [0.0],
        [False],
    )


@pytest.mark.parametrize("said", ["1$2", "\ud800"])
def test_observations_without_tokens_end_the_episode(pair, said):
    """A character that the tokenizer lacks, and one that is a control token, which cannot be plain text."""
    pool = ScriptedPool(lambda episode, turn, action: Turn((Said("tool", said),)))
    (episode,) = play(pair.engine, pool, {(0, 0): Task("1=", "", 0)})
    _, turn = episode.turns
    assert (episode.finish, turn.outcome) == ("observation", "unparsed")
    assert reply_of(turn).messages == (Said("tool", said),)
    turn.said.encode()
    turn.detail.encode()


def test_a_failure_releases_every_episode(pair):
    def fail(episode, turn, action):
        raise UserError("a mistake")

    pool = ScriptedPool(fail)
    with pytest.raises(UserError, match="a mistake"):
        play(pair.engine, pool, build_tasks(2, 2))
    assert sorted(pool.ended) == sorted(pool.acted)
    assert pair.generate(build_groups(build_tasks(1, 1)), replace(SAMPLING, max_new_tokens=2))


def test_without_an_environment_an_episode_is_a_completion(pair, ragged_prompts, groups_of):
    """Equal to what the engine generates, in the same parts."""
    groups, sampling = groups_of(ragged_prompts(6, 40), 4), Sampling(1.0, 8, frozenset({1, 7, 11}))
    generated = [part for part in pair.engine.generate(groups, sampling)]
    found = [*one_turn_episodes(pair.engine, groups, sampling)]
    assert [len(part) for part in found] == [len(part) for part in generated]
    for done, expected in zip(
        (e for whole in found for e in whole), (c for part in generated for c in part), strict=True
    ):
        group = groups[done.group]
        prompt = {"prompt_id": group.prompt_id, "seed": group.seeds[done.sample], "prompt_tokens": [*group.prompt]}
        assert done == replace(expected, **prompt)
    assert [*one_turn_episodes(pair.engine, [], sampling)] == []


@pytest.mark.parametrize(("max_batch", "temperature"), [(1, 1.0), (5, 0.0), (64, 1.0)])
def test_a_session_gives_what_generate_gives(shape, pair_of, ragged_prompts, groups_of, max_batch, temperature):
    """Also of requests that come late, have begun, and have little room."""
    pair = pair_of(FP8, shape, max_batch=max_batch)
    groups, sampling = groups_of(ragged_prompts(6, 40), 4), Sampling(temperature, 8, frozenset({1, 7, 11}))
    open_groups = [
        replace(group, prefix_tokens=tuple((3, 4, 5)[: 1 + i % 3] for i in group.samples), max_tokens=(1, 2, 3, 9))
        for group in groups[:3]
    ]
    expected = {}
    for asked in (groups[3:], open_groups):
        expected |= {(c.group, c.sample): c for c in pair.generate(asked, sampling)}
    assert isinstance(pair.engine, StreamingEngine)
    session, found, late = pair.engine.open_session(sampling), {}, random.Random(0).sample(open_groups, 3)
    session.add(groups[3:])
    while session.busy or late:
        found |= {(c.group, c.sample): c for c in session.step()}
        if late and len(found) % 2 == 0:
            session.add([late.pop()])
    session.close()
    assert found == expected
    assert {c.finish for c in found.values()} == {"stop", "length", "open"}
