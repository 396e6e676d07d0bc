"""Optional step: penalties of completions that are too long (DAPO, arXiv 2503.14476, section 3.4)."""

import pyarrow as pa
import torch
from pydantic import Field, model_validator

from fp8core.config.section import Section
from fp8core.rl.advantages import overlong_penalty
from fp8core.rl.batch import pad_column
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from fp8core.store.tables import REWARDS, scores_of
from tasks.step import step


class ShapeOptions(Section):
    max_length: int = Field(ge=1, description="Tokens at which the penalty is complete.")
    buffer: int = Field(ge=1, description="Tokens below max_length over which the penalty grows linearly.")
    penalty: float = Field(1.0, ge=0, le=1000, description="Reward taken at max_length.")
    drop_cut_off: bool = Field(False, description="Leave completions that hit the length limit out of the loss.")

    @model_validator(mode="after")
    def _buffer_fits(self) -> "ShapeOptions":
        if self.buffer > self.max_length:
            raise ValueError(f"buffer={self.buffer} is above max_length={self.max_length}")
        return self


@step(inputs={"rollouts": "rollouts", "rewards": "rewards"}, outputs={"shaped": "rewards"}, options=ShapeOptions)
def shape(run: StepContext, index: int, options: ShapeOptions, rollouts: Ref, rewards: Ref) -> dict[str, Ref]:
    """Lengths are of what the policy wrote. Completions that were cut off may leave loss and baseline."""
    store = run.store
    table = shape_rewards(store.get_table(rollouts), store.get_table(rewards), options)
    return {"shaped": store.put_table("rewards", table)}


def shape_rewards(rollouts: pa.Table, rewards: pa.Table, options: ShapeOptions) -> pa.Table:
    lengths = pad_column(rollouts["written"], torch.bool, False).sum(dim=1)
    penalties = overlong_penalty(lengths, options.max_length, options.buffer, options.penalty).tolist()
    cut_off = [options.drop_cut_off and finish == "length" for finish in rollouts["finish"].to_pylist()]
    scores = scores_of(rewards).to_pylist()
    schema = rewards.schema
    rows = [
        {**row, "reward": row["reward"] + penalty, "keep": row["keep"] and not drop, "score": score}
        for row, penalty, drop, score in zip(rewards.to_pylist(), penalties, cut_off, scores, strict=True)
    ]
    return pa.Table.from_pylist(
        rows, schema=schema if "score" in schema.names else schema.append(REWARDS.field("score"))
    )
