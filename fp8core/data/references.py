"""References that a verifier cannot read: all of them are found before a run, and refused or left out.

A file below `runs` has the results by reference and verifier: neither a resume nor another run checks them again.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from fp8core import durable
from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.errors import StoredFileError, UserError
from fp8core.progress import tell_progress
from fp8core.rewards.scorer import MATH_VERIFY
from fp8core.rewards.verifier import Verifier
from fp8core.store.json_text import canonical_json, parse_model
from fp8core.store.manifest import current_code

_FOLDER = "checked_references"
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


def first_readable(problems: Sequence[Problem], count: int | None, config: RunConfig, verifier: Verifier) -> Readable:
    """As `readable`, of the first `count` that can be read; None: of all."""
    wanted = len(problems) if count is None else count
    found, left_out, position = list[Problem](), list[Unreadable](), 0
    while len(found) < wanted and position < len(problems):
        part = problems[position : position + wanted - len(found)]
        more = readable(part, config, verifier)
        found, left_out, position = found + more.problems, left_out + more.left_out, position + len(part)
    return Readable(found, left_out)


def _at(row: Problem) -> str:
    return f"{row.place}: " if row.place else ""


def _faults(problems: Sequence[Problem], config: RunConfig, verifier: Verifier) -> dict[str, str]:
    """The fault of each reference that has one. It depends on the reference and the verifier alone."""
    first = dict[str, Problem]()
    for row in problems:
        first.setdefault(row.reference, row)
    memory = _Memory.of(config, verifier)
    # A refusal is worth another look: the verifier may have been too slow, and its message names the question.
    unknown = [row for row in first.values() if not memory.knows(row, faults=config.data.unreadable == "skip")]
    try:
        for begin in range(0, len(unknown), _AT_ONCE):
            tell_progress(begin, len(unknown))
            part = unknown[begin : begin + _AT_ONCE]
            memory.note(part, verifier.faults([(row.question, row.reference) for row in part]))
    finally:
        if unknown:
            memory.store()
    return {reference: fault for reference, row in first.items() if (fault := memory.fault(row)) is not None}


class _Content(BaseModel):
    """A file of the memory. References are named by the first half of their SHA-256."""

    readable: set[str] = set()
    faults: dict[str, str] = {}


class _Memory:
    """Results of one verifier by reference, in a file; without one, those of this process."""

    def __init__(self, file: Path | None, content: _Content) -> None:
        self._file, self._content = file, content

    @classmethod
    def of(cls, config: RunConfig, verifier: Verifier) -> "_Memory":
        """A file that is missing or damaged is begun again. Other verifiers take no longer than to read a file."""
        reward = config.reward
        if MATH_VERIFY not in (reward.verifier, *(other.verifier for other in reward.others)):
            return cls(None, _Content())
        asked = reward.model_dump(
            mode="json", include={"verifier", "options", "others", "timeout_seconds", "cpu_seconds", "memory_mb"}
        )
        parts = {"settings": asked, "verifier": verifier.describe(), "code": current_code()}
        key = hashlib.sha256(canonical_json(parts, "reward")).hexdigest()
        file = config.runs.absolute() / _FOLDER / f"{key}.json"
        try:
            return cls(file, parse_model(file.read_bytes(), _Content, file))
        except (OSError, StoredFileError):
            return cls(file, _Content())

    def knows(self, row: Problem, *, faults: bool) -> bool:
        """`faults`: whether they count as known."""
        return _name(row) in self._content.readable or (faults and _name(row) in self._content.faults)

    def note(self, rows: Sequence[Problem], faults: Sequence[str | None]) -> None:
        for row, fault in zip(rows, faults, strict=True):
            self._content.faults.pop(_name(row), None)
            if fault is None:
                self._content.readable.add(_name(row))
            else:
                self._content.faults[_name(row)] = fault

    def fault(self, row: Problem) -> str | None:
        return self._content.faults.get(_name(row))

    def store(self) -> None:
        """Where that fails, the next start checks again."""
        if self._file is not None:
            content = {"readable": sorted(self._content.readable), "faults": self._content.faults}
            with suppress(UserError):
                durable.write_file(self._file, canonical_json(content, "references"))


def _name(row: Problem) -> str:
    return hashlib.sha256(row.reference.encode()).hexdigest()[:32]
