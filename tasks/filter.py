"""Optional step: leave groups without a learning signal out of the loss (DAPO, arXiv 2503.14476, section 3.2).

With `rollout.oversample` above 1 this is dynamic sampling: the first `groups` with a signal stay.
"""

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from fp8core.config.section import Section
from fp8core.run.batches import baseline_mask, rows_with_signal
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from tasks.step import step


class FilterOptions(Section):
    groups: int | None = Field(
        None, ge=1, description="Keep the first so many groups with a signal; null keeps all of them."
    )


@step(inputs={"rewards": "rewards"}, outputs={"filtered": "rewards"}, options=FilterOptions)
def filter(run: StepContext, index: int, options: FilterOptions, rewards: Ref) -> dict[str, Ref]:
    """Clear `keep` of every completion of a group that stays out of the loss: the scores in its baseline are equal."""
    store = run.store
    table = store.get_table(rewards)
    informative_rewards = keep_informative(table, options.groups, baseline_mask(table, run.config))
    return {"filtered": store.put_table("rewards", informative_rewards)}


def keep_informative(rewards: pa.Table, groups: int | None, baseline: Tensor) -> pa.Table:
    """`baseline`: bool [rows], those that may make the baseline of advantages, if they are in the loss."""
    row_mask = torch.tensor(rewards["keep"].to_pylist(), dtype=torch.bool)
    signal = (row_mask & rows_with_signal(rewards, row_mask & baseline)).tolist()
    rows = rewards.to_pylist()
    informative_groups = {
        *sorted({row["group"] for row, differs in zip(rows, signal, strict=True) if differs})[:groups]
    }
    kept_rows = [{**row, "keep": row["keep"] and row["group"] in informative_groups} for row in rows]
    return pa.Table.from_pylist(kept_rows, schema=rewards.schema)
