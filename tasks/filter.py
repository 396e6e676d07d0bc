"""Optional step: leave groups without a learning signal out of the loss (DAPO, arXiv 2503.14476, section 3.2)."""

from collections.abc import Mapping

import pyarrow as pa
from pydantic import Field

from fp8core.config.section import Section
from fp8core.store.artifacts import Ref
from fp8core.store.tables import REWARDS
from fp8core.workers.live import LiveRun
from tasks.step import step


class FilterOptions(Section):
    """Which groups stay."""

    min_spread: float = Field(
        1e-6, ge=0, description="Groups whose rewards differ by less than this teach nothing and are left out."
    )


@step(inputs={"rewards": "rewards"}, outputs={"filtered": "rewards"}, options=FilterOptions)
def filter(run: LiveRun, index: int, options: FilterOptions, rewards: Ref) -> dict[str, Ref]:
    """Clear `keep` of every completion of a group whose rewards are all equal."""
    table = run.directory.store.get_table(rewards)
    return {"filtered": run.directory.store.put_table("rewards", drop_uniform(table, options.min_spread))}


def drop_uniform(rewards: pa.Table, min_spread: float) -> pa.Table:
    """A table of kind `rewards` with `keep` cleared where a group's spread is below `min_spread`."""
    rows = rewards.to_pylist()
    spread: Mapping[int, float] = {
        row["group"]: row["reward_max"] - row["reward_min"]
        for row in rewards.group_by("group").aggregate([("reward", "max"), ("reward", "min")]).to_pylist()
    }
    kept = [{**row, "keep": row["keep"] and spread[row["group"]] >= min_spread} for row in rows]
    return pa.Table.from_pylist(kept, schema=REWARDS)
