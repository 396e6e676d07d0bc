"""What a verifier says of one completion."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["right", "wrong", "unparsed", "timeout", "crashed"]


@dataclass(frozen=True)
class Verdict:
    """The reward, why it was given, and a short detail for people (empty when right)."""

    score: float
    outcome: Outcome
    detail: str


RIGHT = Verdict(1.0, "right", "")


def wrong(detail: str) -> Verdict:
    """An answer that was read and is not the reference's."""
    return Verdict(0.0, "wrong", detail)


def unparsed(detail: str) -> Verdict:
    """A completion in which no answer could be read."""
    return Verdict(0.0, "unparsed", detail)
