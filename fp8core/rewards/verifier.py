"""The protocol of verifiers, and the one place where a configuration becomes one."""

from typing import Protocol

from fp8core.config.run import RewardConfig
from fp8core.rewards.chain import ChainVerifier
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.verdict import Outcome, Verdict

__all__ = ["Outcome", "Verdict", "Verifier", "build_verifier"]


class Verifier(Protocol):
    """Scores completions one at a time, without state."""

    def score(self, prompt: str, completion: str, reference: str, finish: str) -> Verdict:
        """The verdict on `completion`, the text without end of sequence; `finish` is "stop" or, cut off, "length".

        Nothing a completion holds is an error. Raises UserError as `check` does.
        """
        ...

    def check(self, prompt: str, reference: str) -> None:
        """Raises UserError on a reference that is no answer: the data's mistake."""
        ...


def build_verifier(config: RewardConfig) -> Verifier:
    """The verifier that the configuration names."""
    if config.verifier == "chain":
        return ChainVerifier()
    return IntegerVerifier()
