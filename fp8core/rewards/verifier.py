"""The protocol of verifiers, the verifier of the chain task, and the one place where a configuration becomes one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from fp8core.config.run import RewardConfig
from fp8core.errors import UserError
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.pool import Limits, VerifierPool
from fp8core.rewards.scorer import RIGHT, Answer, Outcome, Scorer, Verdict, unparsed, wrong

MARKER = "#"
_NUMBER = re.compile(r"[0-9]{1,3}")


class ChainVerifier:
    """Right when a finished completion's text after the last `#` is the reference to the digit; see Verifier."""

    def score(self, prompt: str, completion: str, reference: str, finish: str, columns: str = "") -> Verdict:
        self.check(prompt, reference)
        _, marker, answer = completion.rpartition(MARKER)
        if not marker:
            return unparsed(f"no {MARKER}")
        if finish != "stop":
            return unparsed("cut off before the end of sequence")
        if len(answer) != len(reference) or not _NUMBER.fullmatch(answer):
            return unparsed(f"the text after {MARKER} is not {_spelt(reference)}")
        return RIGHT if answer == reference else wrong(f"answer {answer}")

    def check(self, prompt: str, reference: str) -> None:
        if not _NUMBER.fullmatch(reference):
            place = f"the reference of {prompt[:60]!r} is {reference[:60]!r}"
            raise UserError(f"reward.verifier=chain: {place}, not one to three digits")


def _spelt(reference: str) -> str:
    return "one digit" if len(reference) == 1 else f"{len(reference)} digits"


__all__ = ["Answer", "InProcess", "Outcome", "Scorer", "Verdict", "Verifier", "build_verifier"]


class Verifier(Protocol):
    """The scoring of a run. Nothing a completion holds is an error."""

    def begin(self, answers: Sequence[Answer]) -> None:
        """Start to check answers that `verify` will get soon. Returns at once."""
        ...

    def verify(self, answers: Sequence[Answer]) -> list[Verdict]:
        """One verdict an answer, in their order.

        Raises UserError on a reference that is no answer, and when a verifier can no longer be started.
        """
        ...

    def faults(self, references: Sequence[tuple[str, str]]) -> list[str | None]:
        """The data's mistake in each reference, given as (prompt, reference); None where there is none."""
        ...

    def describe(self) -> dict[str, JsonValue]:
        """The source of the verdicts: name, and the versions or the digest of its code."""
        ...

    def close(self) -> None:
        """End its processes; a second call does nothing."""
        ...


@dataclass(frozen=True)
class InProcess:
    """A verifier for a scorer that can neither hang nor crash, whatever a completion holds."""

    name: str
    scorer: Scorer

    def begin(self, answers: Sequence[Answer]) -> None:
        return

    def verify(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self.scorer.score(*answer) for answer in answers]

    def faults(self, references: Sequence[tuple[str, str]]) -> list[str | None]:
        return [self._fault(prompt, reference) for prompt, reference in references]

    def _fault(self, prompt: str, reference: str) -> str | None:
        try:
            self.scorer.check(prompt, reference)
        except UserError as error:
            return str(error)
        return None

    def describe(self) -> dict[str, JsonValue]:
        return {"verifier": self.name}

    def close(self) -> None:
        return


def build_verifier(config: RewardConfig) -> Verifier:
    """The verifier that the configuration names; one with processes of its own has started them.

    Raises:
        UserError: what it needs is not installed, or the function cannot be imported.
    """
    if config.verifier == "chain":
        return InProcess("chain", ChainVerifier())
    if config.verifier == "integer":
        return InProcess("integer", IntegerVerifier())
    limits = Limits(config.timeout_seconds, config.cpu_seconds, config.memory_mb)
    return VerifierPool(config.verifier, config.options, limits, config.workers)
