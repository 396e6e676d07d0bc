"""Verifier of the chain task: the text after the last `#` is the answer, and the completion ended by itself."""

import re

from fp8core.errors import UserError
from fp8core.rewards.verdict import RIGHT, Verdict, unparsed, wrong

MARKER = "#"
_NUMBER = re.compile(r"[0-9]{1,3}")


class ChainVerifier:
    """Right when a finished completion's text after the last `#` is the reference to the digit; see Verifier."""

    def score(self, prompt: str, completion: str, reference: str, finish: str) -> Verdict:
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
