"""References that a verifier cannot read: all of them are found before a run, and refused or left out."""

from collections.abc import Sequence
from typing import NamedTuple

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.errors import UserError
from fp8core.progress import tell_progress
from fp8core.rewards.verifier import Verifier

_AT_ONCE = 512
_MAX_EXAMPLES = 5
"""Rows in a message."""


class Unreadable(NamedTuple):
    problem: Problem
    fault: str


class Readable(NamedTuple):
    """Problems with references that the verifier reads, and those that are left out for theirs; both in order."""

    problems: list[Problem]
    left_out: list[Unreadable]


def readable(problems: Sequence[Problem], config: RunConfig, verifier: Verifier) -> Readable:
    """Raises UserError, with all counted and the first named, where some cannot be read and may not be left out."""
    if config.data.source == "chain" and config.reward.verifier == "integer":
        raise UserError(
            "reward.verifier=integer: the reference of a chain is its digits after one #, and integer reads what is "
            "after ####; set reward.verifier to chain, or data.source"
        )
    faults = _faults(problems, verifier)
    left_out = [Unreadable(row, faults[row.answer]) for row in problems if row.answer in faults]
    if left_out and (config.data.unreadable == "refuse" or config.data.source == "chain"):
        row, fault = left_out[0]
        cure = "correct them, or leave their rows out with data.unreadable=skip"
        raise UserError(f"{_at(row)}{fault}; {left_out_text(left_out, len(problems))}; {cure}")
    return Readable([row for row in problems if row.answer not in faults], left_out)


def left_out_text(left_out: Sequence[Unreadable], total: int) -> str:
    examples = [f"{_at(row)}{row.answer[-40:]!r}" for row, _ in left_out[:_MAX_EXAMPLES]]
    more = ", ..." if len(left_out) > len(examples) else ""
    return f"{len(left_out):,} of {total:,} references cannot be read ({', '.join(examples)}{more})"


def _at(row: Problem) -> str:
    return f"{row.place}: " if row.place else ""


def _faults(problems: Sequence[Problem], verifier: Verifier) -> dict[str, str]:
    rows = list({row.answer: row for row in reversed(problems)}.values())
    fault_of = dict[str, str]()
    for begin in range(0, len(rows), _AT_ONCE):
        tell_progress(begin, len(rows))
        part = rows[begin : begin + _AT_ONCE]
        faults = verifier.faults([(row.question, row.answer) for row in part])
        fault_of |= {row.answer: fault for row, fault in zip(part, faults, strict=True) if fault is not None}
    return fault_of
