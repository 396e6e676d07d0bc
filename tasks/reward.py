"""Score completions with the verifier of the configuration."""

import math
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.rewards.scorer import Answer
from fp8core.rewards.verdict import Outcome, Verdict
from fp8core.store.artifacts import Ref
from fp8core.store.tables import REWARDS
from fp8core.workers.live import LiveRun
from tasks.step import step

_FAILURES: dict[Outcome, str] = {"timeout": "timed out", "crashed": "crashed"}


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def reward(run: LiveRun, index: int, options: NoOptions, prompts: Ref, rollouts: Ref) -> dict[str, Ref]:
    """One verdict a completion. Some of them may say that the verifier failed, which is told; when all do, it fails."""
    store = run.directory.store
    completions = store.get_table(rollouts, ["group", "sample", "text", "finish"])
    table = reward_table(run, store.get_table(prompts), completions)
    return {"rewards": store.put_table("rewards", table)}


def reward_table(run: LiveRun, prompts: pa.Table, rollouts: pa.Table) -> pa.Table:
    """Verdicts as a table of kind `rewards`, in the order of the rollouts."""
    verdicts = run.verifier.verify(answers_of(prompts, rollouts))
    tell_failures(run, "rewards", verdicts)
    rows = []
    for completion, verdict in zip(rollouts.select(["group", "sample"]).to_pylist(), verdicts, strict=True):
        check_reward(verdict.score, completion["group"], completion["sample"])
        rows.append(
            {
                "group": completion["group"],
                "sample": completion["sample"],
                "reward": verdict.score,
                "outcome": verdict.outcome,
                "detail": verdict.detail,
                "keep": True,
            }
        )
    return pa.Table.from_pylist(rows, schema=REWARDS)


def answers_of(prompts: pa.Table, rollouts: pa.Table) -> list[Answer]:
    """What the verifier is asked about completions, in their order."""
    asked = {row["group"]: row for row in prompts.select(["group", "text", "reference"]).to_pylist()}
    return [
        Answer(asked[row["group"]]["text"], row["text"], asked[row["group"]]["reference"], row["finish"])
        for row in rollouts.select(["group", "text", "finish"]).to_pylist()
    ]


def tell_failures(run: LiveRun, what: str, verdicts: Sequence[Verdict]) -> None:
    """Say how many answers could not be checked (errors: `failures`)."""
    text = failures(run.config.reward.verifier, verdicts)
    if text is not None:
        run.console.note(f"{what}: {text}")


def failures(verifier: str, verdicts: Sequence[Verdict]) -> str | None:
    """How many answers could not be checked, and why the first, in a line; None when all could.

    Raises:
        UserError: none of them could.
    """
    failed = [verdict for verdict in verdicts if verdict.outcome in _FAILURES]
    if not failed:
        return None
    counts = Counter(verdict.outcome for verdict in failed)
    how = ", ".join(f"{counts[outcome]} {word}" for outcome, word in _FAILURES.items() if counts[outcome])
    text = f"{len(failed)} of {len(verdicts)} answers could not be checked ({how}): {failed[0].detail}"
    if len(failed) == len(verdicts):
        raise UserError(f"reward.verifier={verifier}: {text}")
    return text


def check_reward(value: float, group: int, sample: int) -> None:
    """Refuse a reward that would poison every advantage of its group."""
    if not math.isfinite(value):
        raise UserError(f"the reward of group {group}, sample {sample} is {value}; rewards must be finite")
