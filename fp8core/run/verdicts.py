"""Verdicts on how episodes ended, and what people are told of failures.

Without `environment` in the configuration an episode is one turn that the verifier judges. So there is one way from
prompts to rewards.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Answer, Key, Verdict, VerdictOutcome
from fp8core.rewards.verifier import Verifier
from fp8core.rollout.episode import Episode
from fp8core.run.context import RunContext
from fp8core.run.episodes import completion_text, said_by_policy
from fp8core.store.tables import COMPLETION_KEY, key_of

UNCHECKED_OUTCOMES: dict[VerdictOutcome, str] = {"timeout": "timed out", "crashed": "crashed"}
"""Outcomes by which nothing was checked, in words."""
JUDGE = "judge"
"""The outcome of an episode whose last turn the verifier reads."""


def counts(outcome: str, config: RunConfig) -> bool:
    """True if a completion with this outcome counts in the loss and in the baseline of its group."""
    left_out = config.environment is not None and config.environment.failed == "leave_out"
    return not (left_out and outcome in UNCHECKED_OUTCOMES)


class Ending(NamedTuple):
    group: int
    outcome: str
    reward: float
    detail: str
    text: str
    finish: str


def ending_of(episode: Episode, config: RunConfig, tokenizer: Tokenizer) -> Ending:
    done = episode.completion
    if config.environment is None or not episode.turns:
        text = completion_text(done, tokenizer, config.rollout.stop_strings)
    else:
        last = episode.turns[-1]
        text = said_by_policy(done.tokens[last.begin : last.end], tokenizer)
    return Ending(done.group, episode.outcome, episode.reward, episode.detail, text, done.finish)


def stored_endings(rollouts: pa.Table, turns: pa.Table | None) -> list[Ending]:
    """The ends of stored episodes, in the order of the rollouts (`group`, `sample`, `text`, `finish`)."""
    rows = rollouts.select([*COMPLETION_KEY, "text", "finish"]).to_pylist()
    if turns is None:
        return [Ending(row["group"], JUDGE, 0.0, "", row["text"], row["finish"]) for row in rows]
    played: dict[Key, list[dict[str, Any]]] = {}
    for turn in turns.select([*COMPLETION_KEY, "text", "reward", "outcome", "detail"]).to_pylist():
        played.setdefault(key_of(turn), []).append(turn)

    def ending(row: Mapping[str, Any]) -> Ending:
        said = played[key_of(row)]
        total, last = sum(turn["reward"] for turn in said), said[-1]
        return Ending(row["group"], last["outcome"], total, last["detail"], last["text"], row["finish"])

    return [ending(row) for row in rows]


class ScoredEpisode(NamedTuple):
    """`score` is the reward without what other verifiers add."""

    verdict: Verdict
    reward: float
    score: float


def answers(asked: Sequence[Mapping[str, Any]], endings: Sequence[Ending]) -> list[Answer]:
    """The verifier's input for the episodes that it judges, in their order."""
    rows = {row["group"]: row for row in asked}
    return [answer_to(rows[one.group], one.text, one.finish) for one in endings if one.outcome == JUDGE]


def answer_to(asked: Mapping[str, Any], completion: str, finish: str) -> Answer:
    """`asked`: the row of its prompt. To a verifier a completion that ends in a stop string has stopped."""
    ended = "stop" if finish == "stop_string" else finish
    return Answer(asked["text"], completion, asked["reference"], ended, asked.get("columns", ""))


def score(verifier: Verifier, asked: Sequence[Mapping[str, Any]], endings: Sequence[Ending]) -> list[ScoredEpisode]:
    """The verdict on each episode: the verifier's where the environment leaves it to that, else the environment's."""
    verdicts = iter(verifier.verify(answers(asked, endings)))
    found = []
    for one in endings:
        if one.outcome == JUDGE:
            verdict = next(verdicts)
            # Adding 0 would take the sign off a score of -0.
            both = (verdict.reward, verdict.score)
            found.append(ScoredEpisode(verdict, *(value + one.reward if one.reward else value for value in both)))
        else:
            right = float(one.outcome == "right")
            found.append(
                ScoredEpisode(Verdict(right, cast(VerdictOutcome, one.outcome), one.detail), one.reward, one.reward)
            )
    return found


def ended_as(outcome: str, detail: str) -> str:
    return f"{outcome}: {detail}".removesuffix(": ")


def tell_failures(run: RunContext, what: str, verdicts: Sequence[Verdict]) -> None:
    """Say how many answers could not be checked. Errors as `failures`, but none in a replay."""
    try:
        text = failures(judges(run.config), verdicts)
    except UserError as error:
        if run.replayed is None:
            raise
        text = str(error)
    if text is not None:
        run.console.note(f"{what}: {text}")


def tell_endings(run: RunContext, what: str, turns: pa.Table) -> None:
    """Say how many episodes ended before the policy's first turn. Raises UserError: all did, or failed; not in a
    replay."""
    ended = turns.filter(pc.not_equal(turns["outcome"], "")).select(["turn", "outcome", "detail"]).to_pylist()
    try:
        lines = early_endings(run.config, [(row["turn"], row["outcome"], row["detail"]) for row in ended])
    except UserError as error:
        if run.replayed is None:
            raise
        lines = [str(error)]
    for text in lines:
        run.console.note(f"{what}: {text}")


def early_endings(config: RunConfig, ended: Sequence[tuple[int, str, str]]) -> list[str]:
    """A line on the episodes that ended early; `ended`: turns, outcome and detail of each.
    Raises UserError as `tell_endings`."""
    unspoken = [each for each in ended if not each[0]]
    failed = [each for each in ended if each[1] in UNCHECKED_OUTCOMES]
    # Of some that failed, the verdicts tell.
    all_failed = failed if len(failed) == len(ended) else []
    assert config.environment is not None, "without one the policy speaks"
    lines = []
    for which, where in ((unspoken, "before the policy's first turn"), (all_failed, "in the environment")):
        if not which:
            continue
        _, outcome, detail = which[0]
        number = f"all {len(ended)}" if len(which) == len(ended) else f"{len(which)} of {len(ended)}"
        text = f"{number} episodes ended {where}, the first of them as {ended_as(outcome, detail)}"
        if len(which) == len(ended):
            raise UserError(f"environment.name={config.environment.name}: {text}")
        lines.append(text)
    return lines


def judges(config: RunConfig) -> str:
    verifier = f"reward.verifier={config.reward.verifier}"
    return verifier if config.environment is None else f"environment.name={config.environment.name}, {verifier}"


def failures(setting: str, verdicts: Sequence[Verdict]) -> str | None:
    """A line on answers that a verifier could not check, with the reason of the first; None when each could be.

    Raises UserError: the main verifier, or the environment, could check none of them; with the setting that names
    it."""
    failed = [verdict for verdict in verdicts if verdict.outcome in UNCHECKED_OUTCOMES]
    if not failed:
        return _failures_of_others(verdicts)
    counts = Counter(verdict.outcome for verdict in failed)
    how = ", ".join(f"{counts[outcome]} {word}" for outcome, word in UNCHECKED_OUTCOMES.items() if counts[outcome])
    text = f"{len(failed)} of {len(verdicts)} answers could not be checked ({how}): {failed[0].detail}"
    if len(failed) == len(verdicts):
        raise UserError(f"{setting}: {text}")
    return "; ".join(filter(None, (text, _failures_of_others(verdicts))))


def _failures_of_others(verdicts: Sequence[Verdict]) -> str | None:
    failed = [
        (part.name, verdict) for verdict in verdicts for part in verdict.added if part.outcome in UNCHECKED_OUTCOMES
    ]
    counts = Counter(name for name, _ in failed)
    lines = (f"{count} of {len(verdicts)} by reward.others.{name}" for name, count in counts.items())
    return f"not checked: {', '.join(lines)}: {failed[0][1].detail}" if failed else None
