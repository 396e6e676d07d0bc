"""Several sources of problems in one, each with its share of the prompts."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fp8core.data.prompt import Problem, PromptSource, generator

# Offsets drawn at once. Part of the random stream, as in the chain task.
_BLOCK = 256


class Part(PromptSource, Protocol):
    def at(self, position: int, count: int, seed: int) -> list[Problem]:
        """Problems for training from a position (from 0) on; a pure function of its arguments."""

    def holds_out(self, question: str) -> bool:
        """True if a whole question is held out."""

    def never_training(self, holds_out: Callable[[str], bool]) -> Self:
        """The same source, whose training passes over the questions that another one holds out."""


class MixedSource:
    """Problems of several sources in the shares of their weights; see PromptSource.

    Prompt k of a source with share w has the time (k + u) / w, with u from [0, 1) drawn by the seed. Training takes all
    prompts by time, so steps differ in their mixture. Of the first n prompts a source has n * w, more or less by at
    most the number of sources. Its rows have the order that they have alone. Held-out prompts have u = 1/2.
    """

    def __init__(self, parts: Mapping[str, Part], weights: Mapping[str, float]) -> None:
        """Raises UserError: the sources hold out all questions of one."""
        total = math.fsum(weights.values())
        self._shares = {name: weights[name] / total for name in parts}
        # None learns what another one is tested on.
        self.parts = {
            name: part.never_training(lambda question: any(other.holds_out(question) for other in parts.values()))
            for name, part in parts.items()
        }

    def training_digest(self) -> str:
        return _digest({name: [self._shares[name], part.training_digest()] for name, part in self.parts.items()})

    def digest(self) -> str | None:
        digests = {name: part.digest() for name, part in self.parts.items()}
        return _digest(digests) if any(digests.values()) else None

    def training(self, step: int, count: int, seed: int) -> list[Problem]:
        """A source with fewer rows than it has prompts in a step gives some twice."""
        order = self._order(step * count, count, seed)
        return self._problems(order, lambda part, first, number: part.at(first, number, seed))

    def heldout(self, count: int) -> list[Problem]:
        return self._problems(self._order(0, count, None), lambda part, _, number: part.heldout(number))

    def to_check(self) -> Iterable[Problem]:
        return [_named(row, name) for name, part in self.parts.items() for row in part.to_check()]

    def without(self, rows: Iterable[Problem]) -> Self:
        removed = [*rows]
        parts = {name: part.without(row for row in removed if row.source == name) for name, part in self.parts.items()}
        return type(self)(parts, self._shares)

    def _order(self, first: int, count: int, seed: int | None) -> list[tuple[str, int]]:
        """Source, and number among its own, of `count` prompts; without a seed the offsets are 1/2."""
        # A prompt's time and its position differ by less than this.
        slack = len(self.parts) + 1
        before = 0
        places = list[tuple[float, str, int]]()
        for name, share in self._shares.items():
            begin = max(0, math.floor((first - slack) * share))
            end = math.ceil((first + count + slack) * share) + 1
            before += begin
            offsets = np.full(end - begin, 0.5) if seed is None else _offsets(name, begin, end, seed)
            times = (np.arange(begin, end) + offsets) / share
            places += zip(times.tolist(), repeat(name), range(begin, end), strict=False)
        places.sort()
        return [(name, number) for _, name, number in places[first - before :][:count]]

    def _problems(
        self, order: list[tuple[str, int]], rows_of: Callable[[Part, int, int], list[Problem]]
    ) -> list[Problem]:
        """`rows_of`: the problems of a source from a number on."""
        rows = dict[str, Iterator[Problem]]()
        for name, part in self.parts.items():
            numbers = [number for source, number in order if source == name]
            rows[name] = iter(rows_of(part, numbers[0], len(numbers)) if numbers else ())
        return [_named(next(rows[name]), name) for name, _ in order]


def _offsets(name: str, begin: int, end: int, seed: int) -> NDArray[np.float64]:
    blocks = range(begin // _BLOCK, (end - 1) // _BLOCK + 1)
    drawn = np.concatenate([generator(seed, f"source {name}", block).random(_BLOCK) for block in blocks])
    return drawn[begin - blocks[0] * _BLOCK :][: end - begin]


def _named(row: Problem, source: str) -> Problem:
    """The problem as one of its source: two may put and score one question differently."""
    name = hashlib.sha256(f"{source} {row.prompt_id}".encode()).hexdigest()[:16]
    return replace(row, prompt_id=name, source=source)


def _digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
