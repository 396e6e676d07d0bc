"""Verifier of the chain task: the text after the last `#` is the answer, and the completion ended by itself."""

from fp8core.errors import UserError
from fp8core.rewards.verdict import RIGHT, Verdict, unparsed, wrong

MARKER = "#"
_DIGITS = frozenset("0123456789")


class ChainVerifier:
    """Right when a finished completion's text after the last `#` is the reference digit; see Verifier."""

    def score(self, prompt: str, completion: str, reference: str, finish: str) -> Verdict:
        self.check(prompt, reference)
        _, marker, answer = completion.rpartition(MARKER)
        if not marker:
            return unparsed(f"no {MARKER}")
        if finish != "stop":
            return unparsed("cut off before the end of sequence")
        if answer not in _DIGITS:
            return unparsed(f"the text after {MARKER} is not one digit")
        return RIGHT if answer == reference else wrong(f"answer {answer}")

    def check(self, prompt: str, reference: str) -> None:
        if reference not in _DIGITS:
            raise UserError(
                f"reward.verifier=chain: the reference of {prompt[:60]!r} is {reference[:60]!r}, not one digit"
            )
