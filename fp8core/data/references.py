"""References that a verifier cannot read: all of them are found before a run, and refused or left out."""

from collections.abc import Sequence
from typing import NamedTuple

from fp8core.config.data import data_key
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
    faults = dict[tuple[str, str], str]()
    for name, data in config.sources.items():
        rows = [row for row in problems if row.source == name]
        if data.source == "chain" and config.source_rewards.get(name, config.reward).verifier == "integer":
            raise UserError(
                f"{config.verifier_settings[name]}: the reference of a chain is its digits after one #, and integer "
                f"reads what is after ####; set it to chain, or {data_key(name)}.source"
            )
        source_faults = _faults(rows, verifier, name)
        left_out = [Unreadable(row, source_faults[row.answer]) for row in rows if row.answer in source_faults]
        if left_out and (data.unreadable == "refuse" or data.source == "chain"):
            row, fault = left_out[0]
            cure = f"correct them, or leave their rows out with {data_key(name)}.unreadable=skip"
            raise UserError(f"{_at(row)}{fault}; {left_out_text(left_out, len(rows))}; {cure}")
        faults |= {(name, answer): fault for answer, fault in source_faults.items()}
    every = [(row, faults.get((row.source, row.answer))) for row in problems]
    left_out = [Unreadable(row, fault) for row, fault in every if fault is not None]
    return Readable([row for row, fault in every if fault is None], left_out)


def left_out_text(left_out: Sequence[Unreadable], total: int) -> str:
    examples = [f"{_at(row)}{row.answer[-40:]!r}" for row, _ in left_out[:_MAX_EXAMPLES]]
    more = ", ..." if len(left_out) > len(examples) else ""
    return f"{len(left_out):,} of {total:,} references cannot be read ({', '.join(examples)}{more})"


def _at(row: Problem) -> str:
    return f"{row.place}: " if row.place else ""


def _faults(problems: Sequence[Problem], verifier: Verifier, source: str) -> dict[str, str]:
    rows = list({row.answer: row for row in reversed(problems)}.values())
    fault_of = dict[str, str]()
    for begin in range(0, len(rows), _AT_ONCE):
        tell_progress(begin, len(rows))
        part = rows[begin : begin + _AT_ONCE]
        faults = verifier.faults([(row.question, row.answer) for row in part], source)
        fault_of |= {row.answer: fault for row, fault in zip(part, faults, strict=True) if fault is not None}
    return fault_of
