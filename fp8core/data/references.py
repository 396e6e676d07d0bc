"""References that a verifier cannot read: all of them are found before a run, and refused or left out.

A file below `runs` has the results of a verifier that takes long: neither a resume nor another run checks them again.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fp8core import durable
from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.errors import UserError
from fp8core.progress import tell_progress
from fp8core.rewards.scorer import MATH_VERIFY
from fp8core.rewards.verifier import Verifier
from fp8core.store.json_text import canonical_json
from fp8core.store.manifest import current_code

_AT_ONCE = 512
_NAMED = 5
"""Rows in a message."""


class Unreadable(NamedTuple):
    """A problem whose reference the verifier cannot read, and why."""

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
    faults = _faults(problems, config, verifier)
    left_out = [Unreadable(row, faults[row.reference]) for row in problems if row.reference in faults]
    if left_out and (config.data.unreadable == "refuse" or config.data.source == "chain"):
        row, fault = left_out[0]
        cure = "correct them, or leave their rows out with data.unreadable=skip"
        raise UserError(f"{_at(row)}{fault}; {counted(left_out, len(problems))}; {cure}")
    return Readable([row for row in problems if row.reference not in faults], left_out)


def counted(left_out: Sequence[Unreadable], total: int) -> str:
    """Their number, with the places and the ends of the first."""
    named = [f"{_at(row)}{row.reference[-40:]!r}" for row, _ in left_out[:_NAMED]]
    more = ", ..." if len(left_out) > len(named) else ""
    return f"{len(left_out):,} of {total:,} references cannot be read ({', '.join(named)}{more})"


def _at(row: Problem) -> str:
    return f"{row.place}: " if row.place else ""


def _faults(problems: Sequence[Problem], config: RunConfig, verifier: Verifier) -> dict[str, str]:
    """The fault of each reference that has one. It depends on the reference and the verifier alone."""
    file = _results_file(config, verifier)
    known: dict[str, str | None] = {}
    with suppress(OSError, ValueError):  # One that is missing or damaged is begun again.
        known = {} if file is None else json.loads(file.read_bytes())
    first = dict[str, Problem]()
    for row in problems:
        first.setdefault(row.reference, row)
    # A fault is worth another look: the verifier may have been too slow, and its message names the question.
    unknown = [row for reference, row in first.items() if known.get(_name(reference), "") is not None]
    for begin in range(0, len(unknown), _AT_ONCE):
        tell_progress(begin, len(unknown))
        part = unknown[begin : begin + _AT_ONCE]
        faults = verifier.faults([(row.question, row.reference) for row in part])
        known.update((_name(row.reference), fault) for row, fault in zip(part, faults, strict=True))
    if file is not None and unknown:
        with suppress(UserError):  # The next start checks again.
            durable.write_file(file, canonical_json(known, "references"))
    return {reference: fault for reference in first if (fault := known[_name(reference)]) is not None}


def _results_file(config: RunConfig, verifier: Verifier) -> Path | None:
    """None of a verifier that takes no longer than to read a file."""
    reward = config.reward
    if MATH_VERIFY not in (reward.verifier, *(other.verifier for other in reward.others)):
        return None
    asked = reward.model_dump(
        mode="json", include={"verifier", "options", "others", "timeout_seconds", "cpu_seconds", "memory_mb"}
    )
    parts = {"settings": asked, "verifier": verifier.describe(), "code": current_code()}
    key = hashlib.sha256(canonical_json(parts, "reward")).hexdigest()
    return config.runs.absolute() / "checked_references" / f"{key}.json"


def _name(reference: str) -> str:
    return hashlib.sha256(reference.encode()).hexdigest()[:32]
