"""Sessions and episodes of ten turns, for tests/gpu, tests/vllm and tests/sglang."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from generation_cases import Found, build_groups, collect
from scripted_pool import ScriptedPool
from torch import Tensor

from fp8core.environments.chat import Talk
from fp8core.environments.protocol import Action, Outcome, Said, Task, Turn
from fp8core.models.tokenizer import Tokenizer, character_tokenizer
from fp8core.rewards.scorer import Key
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PromptGroup, Sampling, StreamingEngine, sample_seed
from fp8core.rollout.episodes import MultiTurn, TurnBudget, run_episodes

TURNS = 10
_CHARACTERS = "0123456789+-*=,#[]$ abcdefgh"


@dataclass(frozen=True)
class Play:
    """Episodes over one engine: of each group a question, asked `size` times, and an environment that answers.

    Attributes:
        says: the environment's words, from an episode and how many turns were before.
    """

    questions: Sequence[str]
    size: int
    tokenizer: Tokenizer
    sampling: Sampling
    budget: TurnBudget
    says: Callable[[Key, int], str]

    def episodes(self, engine: Any, order: int | None) -> list[Completion]:
        """All of them, by group and sample; `order`: seed of the order of replies."""
        samples = tuple(range(self.size))
        tasks = {(group, i): Task(question, "", 0) for group, question in enumerate(self.questions) for i in samples}
        groups = [
            PromptGroup(group, f"{group}", (9,), samples, tuple(sample_seed(0, 0, group, i) for i in samples))
            for group in range(len(self.questions))
        ]
        pool = ScriptedPool(self._answer, order)
        multi_turn = MultiTurn(pool, Talk(self.tokenizer, "plain"), tasks, self.budget)
        found = [episode for whole in run_episodes(engine, groups, self.sampling, multi_turn) for episode in whole]
        return sorted(found, key=lambda episode: episode.key)

    def _answer(self, episode: Key, turn: int, action: Action) -> Turn | Outcome:
        if turn + 1 == TURNS:
            return Outcome("judge")
        return Turn((Said("tool", self.says(episode, turn)),))


def short_play() -> Play:
    """For the small shape of tests/vllm, whose contexts are 256 tokens."""
    tokenizer = character_tokenizer(_CHARACTERS, 200, "$")
    return Play(
        questions=[f"12+7*3-{group}=" for group in range(3)],
        size=4,
        tokenizer=tokenizer,
        sampling=Sampling(1.0, 140, tokenizer.eos_ids),
        budget=TurnBudget(TURNS, turn_tokens=5),
        says=lambda episode, turn: "ab"[: episode[1] % 2 + 1] + "12345678"[: (turn * 3 + episode[0]) % 7],
    )


def long_play(vocab_size: int) -> Play:
    """Of each group its own question, after a beginning that all share; neither is a multiple of a cache page.

    Answers have 0 to 46 characters.
    """
    tokenizer = character_tokenizer(_CHARACTERS, vocab_size, "$")
    return Play(
        questions=[("12+7*" * 70)[:337] + "3-" * (5 * group) + "4=" for group in range(8)],
        size=6,
        tokenizer=tokenizer,
        sampling=Sampling(0.7, 900, tokenizer.eos_ids),
        budget=TurnBudget(TURNS, turn_tokens=41, observation_tokens=60),
        says=lambda episode, turn: ("ab1234567890" * 4)[: (7 * turn + 5 * episode[0] + episode[1]) % 47],
    )


def scored_turns(
    trainer: Any, episodes: Sequence[Completion], temperature: float, scales: Any
) -> tuple[Tensor, Tensor]:
    """The trainer's log-probs of all tokens that the policy wrote, and those that the engine reported: FP32."""
    # Turn 0 is the environment's.
    assert all(len(episode.turns) == 1 + TURNS for episode in episodes)
    batch = TokenBatch.of([each.prompt_tokens for each in episodes], [each.tokens for each in episodes])
    scored = trainer.logprobs(batch, temperature, scales).logprobs
    written = [torch.tensor(each.policy_mask) for each in episodes]
    rows = [row[: len(mask)][mask] for row, mask in zip(scored, written, strict=True)]
    reported = [torch.tensor(each.logprobs)[mask] for each, mask in zip(episodes, written, strict=True)]
    return torch.cat(rows), torch.cat(reported)


def check_no_token_of_a_long_play_differs(trainer: Any, episodes: Sequence[Completion], scales: Any) -> None:
    """Bit for bit, on ten thousand tokens and more."""
    scored, reported = scored_turns(trainer, episodes, 0.7, scales)
    differing = scored != reported
    assert len(differing) > 10_000
    assert not differing.any(), f"{int(differing.sum())} of {len(differing)} tokens differ"


def check_a_short_play_is_near(policy: Any, episodes: Sequence[Completion]) -> None:
    """Log-probs as near to the trainer's as those of single turns."""
    scored, reported = scored_turns(policy.trainer, episodes, 1.0, policy.scales.layers)
    asked = [PromptGroup(i, "", tuple(episode.prompt_tokens), (0,), (0,)) for i, episode in enumerate(episodes)]
    bounds = policy.bounds(asked, [replace(each, group=i) for i, each in enumerate(episodes)], 1.0)
    error = (scored - reported).abs()
    assert len(error) > 300
    assert error.mean() < bounds.mean
    assert error.max() < bounds.largest


def drawn_by_session_and_by_generate(engine: Any, stops: frozenset[int]) -> tuple[Found, Found]:
    """Requests that come late, and some that go on from what was begun, by group and sample."""
    groups, sampling = build_groups(8, 4), Sampling(1.0, 12, stops)
    begun = [
        replace(group, prefix_tokens=tuple((5, 6, 8)[: 1 + i % 3] for i in group.samples), max_tokens=(1, 2, 3, 99))
        for group in groups[:4]
    ]
    expected = [*collect(engine, begun, sampling), *collect(engine, groups[4:], sampling)]
    found = drawn_by_session(engine, sampling, groups[4:], begun)
    assert {done.finish for done in found} == {"stop", "length", "open"}
    return sorted(found, key=lambda done: (done.group, done.sample)), expected


def drawn_by_session(
    engine: Any, sampling: Sampling, first: Sequence[PromptGroup], late: Sequence[PromptGroup]
) -> Found:
    """All completions; of the late groups one comes after each step."""
    assert isinstance(engine, StreamingEngine)
    session, found, left = engine.open_session(sampling), Found(), [*late]
    session.add(first)
    while session.busy or left:
        found += session.step()
        if left:
            session.add([left.pop()])
    session.close()
    return found


def check_what_a_closed_session_had_is_gone(engine: Any) -> None:
    session = engine.open_session(Sampling(1.0, 140, frozenset()))
    session.add(build_groups(4, 4))
    session.step()
    session.close()
    assert not session.busy
    assert engine.drop_prefixes(), "nothing runs"
