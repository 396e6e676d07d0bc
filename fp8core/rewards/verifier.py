"""The protocols of verifiers, and the one place where a configuration becomes one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from fp8core.config.run import RewardConfig
from fp8core.errors import UserError
from fp8core.rewards.chain import ChainVerifier
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.pool import Limits, VerifierPool
from fp8core.rewards.scorer import Answer, Scorer
from fp8core.rewards.verdict import Outcome, Verdict

__all__ = ["Answer", "InProcess", "Outcome", "Scorer", "Verdict", "Verifier", "build_verifier"]


class Verifier(Protocol):
    """What a run scores with. Nothing a completion holds is an error."""

    def begin(self, answers: Sequence[Answer]) -> None:
        """Answers that `verify` will soon be asked about: may be checked meanwhile. Returns at once."""
        ...

    def verify(self, answers: Sequence[Answer]) -> list[Verdict]:
        """One verdict an answer, in their order.

        Raises UserError on a reference that is no answer, and when a verifier can no longer be started.
        """
        ...

    def faults(self, references: Sequence[tuple[str, str]]) -> list[str | None]:
        """What is wrong with each reference, given as (prompt, reference): the data's mistake; None where nothing."""
        ...

    def describe(self) -> dict[str, JsonValue]:
        """What gives the verdicts: name, and the versions or the digest of its code."""
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
