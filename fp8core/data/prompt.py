"""A problem and the protocol of everything that yields problems."""

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

HELDOUT_ONE_IN = 8


@dataclass(frozen=True)
class Problem:
    """A question with the text that its answer is checked against, and where it was read, for messages."""

    prompt_id: str
    question: str
    reference: str
    place: str = field(default="", compare=False)


class TrainingSet(NamedTuple):
    """Which problems training can meet: SHA-256 of all that determines them, and how many; None: endless."""

    digest: str
    rows: int | None


class PromptSource(Protocol):
    """Problems for training and for evaluation. No state: the step number is the position in the data."""

    def training_set(self) -> TrainingSet:
        """What `training` draws from, whatever the step and the seed."""
        ...

    def training(self, step: int, count: int, seed: int) -> list[Problem]:
        """The `count` problems of step `step` (from 0); a pure function of its arguments.

        Raises UserError when the source has fewer than `count` different training problems to order.
        """
        ...

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` of a fixed list of different problems, none of whose questions training ever yields.

        Raises UserError when there are fewer.
        """
        ...

    def to_check(self) -> Iterable[Problem]:
        """Problems that show, before any work, what may be wrong with any of them: all rows, or the longest made."""
        ...


def problems_digest(problems: Iterable[Problem]) -> str:
    """SHA-256 over questions and references in order."""
    digest = hashlib.sha256()
    for row in problems:
        digest.update(f"{json.dumps([row.question, row.reference])}\n".encode())
    return digest.hexdigest()


def problem(question: str, reference: str, place: str = "") -> Problem:
    """A problem named by the first 16 hexadecimal digits of its question's SHA-256."""
    return Problem(hashlib.sha256(question.encode()).hexdigest()[:16], question, reference, place)


def is_heldout(question: str) -> bool:
    """Whether a question is one of the eighth kept from training: by CRC-32, hence the same in every process."""
    return zlib.crc32(question.encode()) % HELDOUT_ONE_IN == 0


def generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    """Random numbers that depend on these three alone, independent between purposes and between indices."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))
