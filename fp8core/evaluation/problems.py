"""Which problems an evaluation asks, and the precision it answers them in."""

from typing import Literal

from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.data.source import build_source, read_rows
from fp8core.errors import UserError

Precision = Literal["configured", "bf16", "fp8"]


def heldout_problems(config: RunConfig) -> list[Problem]:
    """The first `evaluation.prompts` problems that training never sees. Raises UserError as `build_source`."""
    return build_source(config.data, config.evaluation).heldout(config.evaluation.prompts)


def all_problems(config: RunConfig, count: int | None) -> list[Problem]:
    """Different questions of `data.source`, all or the first `count` by prompt_id: a fair sample of a sorted file.

    Raises:
        UserError: the data cannot be read, is generated without end, or has fewer.
    """
    if config.data.source == "chain":
        raise UserError("data: the chain task has no rows; leave data away to ask its held-out questions")
    unique: dict[str, Problem] = {}
    for row in read_rows(config.data):
        unique.setdefault(row.question, row)
    rows = sorted(unique.values(), key=lambda row: row.prompt_id)
    if count is not None and count > len(rows):
        raise UserError(f"{config.data.source}: prompts={count}, but there are only {len(rows)} different questions")
    return rows[:count]


def contract_in(precision: Precision, contract: PrecisionContract) -> PrecisionContract:
    """The contract with another rollout side; head, scale rule and layers kept in BF16 stay as configured."""
    head = contract.rollout.head
    sides = {
        "configured": contract.rollout,
        "bf16": SidePrecision(linear="bf16", kv_cache="bf16", head=head),
        "fp8": SidePrecision(linear="fp8_block", kv_cache="fp8", head=head),
    }
    return contract.model_copy(update={"rollout": sides[precision]})
