"""Optional step: leave groups without a learning signal out of the loss (DAPO, arXiv 2503.14476, section 3.2).

With `rollout.oversample` above 1 this is dynamic sampling: more prompts are answered than are needed, and the first
`groups` with a signal stay. When there are fewer, the step fails or trains on those, as configured. It never generates
again, so that an iteration stays a fixed graph.
"""

from typing import Literal

import pyarrow as pa
import torch
from pydantic import Field

from fp8core.config.section import Section
from fp8core.errors import UserError
from fp8core.rl.advantages import informative
from fp8core.run.context import RunContext
from fp8core.store.artifacts import Ref
from tasks.step import step


class FilterOptions(Section):
    """Selection of the groups that stay."""

    groups: int | None = Field(
        None, ge=1, description="Keep the first so many groups with a signal; null keeps all of them."
    )
    shortfall: Literal["log", "error"] = Field(
        "log", description="With fewer than `groups`: train on what there is (train/rows shows it), or fail."
    )


@step(inputs={"rewards": "rewards"}, outputs={"filtered": "rewards"}, options=FilterOptions)
def filter(run: RunContext, index: int, options: FilterOptions, rewards: Ref) -> dict[str, Ref]:
    """Clear `keep` of every completion of a group that stays out of the loss."""
    table = run.directory.store.get_table(rewards)
    kept = keep_informative(table, options.groups)
    found = len({row["group"] for row in kept.to_pylist() if row["keep"]})
    if options.groups is not None and found < options.groups and options.shortfall == "error":
        raise UserError(
            f"step {index}: {found} of {options.groups} wanted groups have rewards that differ; "
            "raise rollout.oversample or set shortfall: log"
        )
    return {"filtered": run.directory.store.put_table("rewards", kept)}


def keep_informative(rewards: pa.Table, groups: int | None) -> pa.Table:
    """A table of kind `rewards` that keeps groups whose kept rewards differ, the first `groups` of them."""
    rows = rewards.to_pylist()
    signal = informative(
        torch.tensor([row["reward"] for row in rows], dtype=torch.float64),
        torch.tensor([row["group"] for row in rows]),
        torch.tensor([row["keep"] for row in rows]),
    ).tolist()
    wanted = sorted({row["group"] for row, has_signal in zip(rows, signal, strict=True) if has_signal})[:groups]
    chosen = [{**row, "keep": row["keep"] and row["group"] in wanted} for row in rows]
    return pa.Table.from_pylist(chosen, schema=rewards.schema)
