"""Score completions with the verifier of the configuration."""

import math

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.store.artifacts import Ref
from fp8core.store.tables import REWARDS
from fp8core.workers.live import LiveRun
from tasks.step import step


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def reward(run: LiveRun, index: int, options: NoOptions, prompts: Ref, rollouts: Ref) -> dict[str, Ref]:
    """One verdict a completion; a verifier that returns no finite score is an error, never a zero."""
    store = run.directory.store
    table = reward_table(run, store.get_table(prompts), store.get_table(rollouts))
    return {"rewards": store.put_table("rewards", table)}


def reward_table(run: LiveRun, prompts: pa.Table, rollouts: pa.Table) -> pa.Table:
    """Verdicts as a table of kind `rewards`, in the order of the rollouts."""
    by_group = {row["group"]: row for row in prompts.to_pylist()}
    rows = []
    for completion in rollouts.select(["group", "sample", "text", "finish"]).to_pylist():
        prompt = by_group[completion["group"]]
        verdict = run.verifier.score(prompt["text"], completion["text"], prompt["reference"], completion["finish"])
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


def check_reward(value: float, group: int, sample: int) -> None:
    """Refuse a reward that would poison every advantage of its group."""
    if not math.isfinite(value):
        raise UserError(f"the reward of group {group}, sample {sample} is {value}; rewards must be finite")
