"""Score completions with the verifier of the configuration."""

import math

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.run.context import RunContext
from fp8core.run.rollouts import answers_of, tell_failures
from fp8core.store.artifacts import Ref
from fp8core.store.tables import REWARDS, SCORE
from tasks.step import step


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def reward(run: RunContext, index: int, options: NoOptions, prompts: Ref, rollouts: Ref) -> dict[str, Ref]:
    """One verdict a completion. Some may report a failure of the verifier; when all do, the step fails."""
    store = run.directory.store
    completions = store.get_table(rollouts, ["group", "sample", "text", "finish"])
    table = reward_table(run, store.get_table(prompts), completions)
    return {"rewards": store.put_table("rewards", table)}


def reward_table(run: RunContext, prompts: pa.Table, rollouts: pa.Table) -> pa.Table:
    """Verdicts as a table of kind `rewards`, in the order of the rollouts.

    With several verifiers it has a column for the score of each.
    """
    verdicts = run.verifier.verify(answers_of(prompts, rollouts))
    tell_failures(run, "rewards", verdicts)
    rows = []
    for completion, verdict in zip(rollouts.select(["group", "sample"]).to_pylist(), verdicts, strict=True):
        check_reward(verdict.reward, completion["group"], completion["sample"])
        scores = {f"{SCORE}{part.name}": part.score for part in verdict.added}
        rows.append(
            {
                "group": completion["group"],
                "sample": completion["sample"],
                "reward": verdict.reward,
                "outcome": verdict.outcome,
                "detail": verdict.record,
                "keep": True,
                **({f"{SCORE}verdict": verdict.score, **scores} if scores else {}),
            }
        )
    columns = [pa.field(name, pa.float64()) for name in (rows[0] if rows else {}) if name.startswith(SCORE)]
    return pa.Table.from_pylist(rows, schema=pa.schema([*REWARDS, *columns]))


def check_reward(value: float, group: int, sample: int) -> None:
    """Refuse a reward that would poison every advantage of its group."""
    if not math.isfinite(value):
        raise UserError(f"the reward of group {group}, sample {sample} is {value}; rewards must be finite")
