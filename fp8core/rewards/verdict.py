"""What a verifier says of one completion."""

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["right", "wrong", "unparsed", "timeout", "crashed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


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


def timed_out(detail: str) -> Verdict:
    """A completion whose check took too long: nothing is known of its answer."""
    return Verdict(0.0, "timeout", detail)


def crashed(detail: str) -> Verdict:
    """A completion on which the verifier failed: nothing is known of its answer."""
    return Verdict(0.0, "crashed", detail)
