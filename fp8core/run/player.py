"""Player of episodes: an engine and an environment, under the distribution of a configuration."""

from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fp8core.config.run import RunConfig
from fp8core.data.prompt import longest_prompt
from fp8core.environments.chat import Talk
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.numerics.logprobs import Truncation
from fp8core.rewards.scorer import Key
from fp8core.rollout.engine import Completion, PromptGroup, RolloutEngine, Sampling, StreamingEngine
from fp8core.rollout.episode import Begun, Episode, TurnBudget
from fp8core.rollout.episodes import MultiTurn, Pool, ask_again, one_turn_episodes, run_episodes
from fp8core.rollout.registry import longest_row
from fp8core.run.turns import task_of


@dataclass(frozen=True)
class EpisodePlayer:
    """The settings common to all episodes of a configuration; `longest`: tokens of an environment's first messages."""

    config: RunConfig
    tokenizer: Tokenizer
    longest: int

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, arch: Architecture) -> "EpisodePlayer":
        """For a model of this shape (errors: `registry.find_entry`)."""
        return cls(config, tokenizer, longest_prompt(config, longest_row(config, arch)))

    def sampling(self) -> Sampling:
        """The distribution that the run learns from, with its truncation."""
        rollout = self.config.rollout
        truncation = Truncation.of(rollout.top_k, rollout.top_p)
        return Sampling(rollout.temperature, rollout.max_new_tokens, self.tokenizer.eos_ids, truncation=truncation)

    def evaluation_sampling(self, temperature: float) -> Sampling:
        """The whole distribution, which evaluations keep, at a temperature of theirs; 0 is greedy."""
        return Sampling(temperature, self.config.rollout.max_new_tokens, self.tokenizer.eos_ids)

    def play(
        self,
        engine: RolloutEngine,
        groups: Sequence[PromptGroup],
        asked: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        pool: Pool | None = None,
        begun: Mapping[Key, Begun | Episode] = MappingProxyType({}),
        room: int | None = None,
    ) -> Generator[list[Episode], None, None]:
        """Episodes of all groups as they finish; without an environment, whole groups. Closed, it ends what is open.

        While environments keep all waiting, it yields none each second (`run_episodes`). `asked`: rows of kind
        `prompts`, of these groups or more; `sampling.max_new_tokens` limits an episode; `begun`, `room`: as of
        `MultiTurn`.
        """
        if self.config.environment is None:
            strings = self.config.rollout.stop_strings
            for episodes in one_turn_episodes(engine, groups, sampling):
                yield [replace(one, completion=cut_at(one.completion, self.tokenizer, strings)) for one in episodes]
            return
        assert pool is not None, "an environment was configured"
        if not isinstance(engine, StreamingEngine):
            raise UserError(
                f"environment.name={self.config.environment.name}: rollout.engine={self.config.rollout.engine} has no "
                "open_session, which takes requests while others are in flight"
            )
        yield from run_episodes(engine, groups, sampling, self._multi_turn(groups, asked, pool, begun, room))

    def ask_again(
        self,
        groups: Sequence[PromptGroup],
        asked: Sequence[Mapping[str, Any]],
        pool: Pool,
        begun: Mapping[Key, Begun | Episode],
    ) -> list[Key]:
        """As `rollout.episodes.ask_again`; arguments as of `play`."""
        return ask_again(groups, self.sampling(), self._multi_turn(groups, asked, pool, begun, None))

    def _multi_turn(
        self,
        groups: Sequence[PromptGroup],
        asked: Sequence[Mapping[str, Any]],
        pool: Pool,
        begun: Mapping[Key, Begun | Episode],
        room: int | None,
    ) -> MultiTurn:
        assert self.config.environment is not None, "a pool is of an environment"
        rows = {row["group"]: row for row in asked}
        tasks = {
            (group.group, sample): task_of(rows[group.group], seed)
            for group in groups
            for sample, seed in zip(group.samples, group.seeds, strict=True)
        }
        asked_for = self.config.environment
        budget = TurnBudget(asked_for.max_turns, asked_for.turn_tokens, asked_for.observation_tokens, self.longest)
        talk = Talk.of(self.config, self.tokenizer)
        return MultiTurn(pool, talk, tasks, budget, begun, room)


def cut_at(completion: Completion, tokenizer: Tokenizer, strings: Sequence[str]) -> Completion:
    """The completion up to the token that completes the first of the strings; all of it without one.

    A token depends on those before it alone. So the result equals, bit for bit, a completion of an engine that stops
    there.
    """
    if not strings:
        return completion

    def complete(count: int) -> bool:
        text = tokenizer.decode(completion.tokens[:count])
        return any(string in text for string in strings)

    whole = len(completion.tokens)
    if not complete(whole):
        return completion
    count = bisect_left(range(whole), True, key=complete)
    experts = completion.experts
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        finish="stop_string",
        experts=None if experts is None else experts[: len(experts) - (whole - count)],
    )
