"""Score completions with the verifier of the configuration."""

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.rewards.scorer import check_reward
from fp8core.run.context import StepContext
from fp8core.run.rollouts import counts, score, stored_endings, tell_failures
from fp8core.store.artifacts import Ref
from fp8core.store.tables import COMPLETION_KEY, REWARDS, SCORE, keys_of
from tasks.step import step


@step(
    inputs={"prompts": "prompts", "rollouts": "rollouts"},
    optional_inputs={"turns": "turns"},
    outputs={"rewards": "rewards"},
)
def reward(
    run: StepContext, index: int, options: NoOptions, prompts: Ref, rollouts: Ref, turns: Ref | None = None
) -> dict[str, Ref]:
    store = run.store
    completions = store.get_table(rollouts, [*COMPLETION_KEY, "text", "finish"])
    turn_table = None if turns is None else store.get_table(turns)
    table = reward_table(run, store.get_table(prompts), completions, turn_table)
    return {"rewards": store.put_table("rewards", table)}


def reward_table(run: StepContext, prompts: pa.Table, rollouts: pa.Table, turns: pa.Table | None = None) -> pa.Table:
    scored_episodes = score(run.verifier, prompts.drop_columns(["tokens"]).to_pylist(), stored_endings(rollouts, turns))
    tell_failures(run, "rewards", [each.verdict for each in scored_episodes])
    none = {f"{SCORE}{part.name}": 0.0 for each in scored_episodes for part in each.verdict.added}
    rows = []
    for key, (verdict, value, own) in zip(keys_of(rollouts), scored_episodes, strict=True):
        check_reward(value, key)
        scores = {f"{SCORE}{part.name}": part.score for part in verdict.added} or none
        rows.append(
            {
                **dict(zip(COMPLETION_KEY, key, strict=True)),
                "reward": value,
                "outcome": verdict.outcome,
                "detail": verdict.detail,
                "keep": counts(verdict.outcome, run.config),
                "score": own,
                **({f"{SCORE}verdict": verdict.score, **scores} if scores else {}),
            }
        )
    columns = [pa.field(name, pa.float64()) for name in (rows[0] if rows else {}) if name.startswith(SCORE)]
    return pa.Table.from_pylist(rows, schema=pa.schema([*REWARDS, *columns]))
