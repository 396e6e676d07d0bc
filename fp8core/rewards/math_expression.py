"""Verifier of mathematical expressions, by `math-verify` (extra `math`). It may hang: for child processes only.

The reference is what stands after its last `####`, else the whole of it; one without a `\\boxed{...}` of its own is
taken for LaTeX, as the answers of MATH are written. A completion counts when it ended by itself. Where reference and
completion have `####`, as in GSM8K, and nothing is boxed, the answer is on the line of the last `####`; else
math-verify looks for a boxed or otherwise announced answer, from the end, and then for any expression.
"""

import logging
from functools import lru_cache

import math_verify

from fp8core.errors import UserError, first_line
from fp8core.rewards.integer import MARKER, Unreadable, read_number
from fp8core.rewards.verdict import RIGHT, Verdict, crashed, unparsed, wrong

_SHOWN_CHARACTERS = 80

# Says once that no time limit is set: the process has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class MathScorer:
    """Right when an expression of the completion equals one of the reference; see Scorer."""

    def __init__(self) -> None:
        # Its first call builds tables that take longer than an answer.
        self.score("", r"\boxed{\frac{1}{2}}", "0.5", "stop")

    def score(self, prompt: str, completion: str, reference: str, finish: str) -> Verdict:
        expected = _expected(reference, prompt)
        if finish != "stop":
            return unparsed("cut off before the end of sequence")
        found = math_verify.parse(_answer_part(completion, reference), parsing_timeout=None)
        if not found:
            return unparsed("no expression")
        return _compare(expected, found)

    def check(self, prompt: str, reference: str) -> None:
        _expected(reference, prompt)


def _answer_part(completion: str, reference: str) -> str:
    if MARKER in reference and MARKER in completion and r"\boxed" not in completion:
        return completion.rpartition(MARKER)[2].partition("\n")[0]
    return completion


def _compare(expected: list[object], found: list[object]) -> Verdict:
    """Right when any pair is equal. A pair that cannot be compared is no wrong answer."""
    failure: Exception | None = None
    for one in expected:
        for other in found:
            try:
                if math_verify.verify(one, other, timeout_seconds=None, raise_on_error=True):
                    return RIGHT
            except Exception as error:  # noqa: BLE001 - sympy raises anything; the verdict names it
                failure = error
    if failure is not None:
        return crashed(f"comparing: {type(failure).__name__}: {first_line(failure)}")
    texts = [item for item in found if isinstance(item, str)]
    return wrong(f"answer {texts[-1][:_SHOWN_CHARACTERS]}" if texts else "another answer")


@lru_cache(maxsize=256)
def _expected(reference: str, prompt: str) -> list[object]:
    """The expressions of a reference. Raises UserError, naming the prompt, when there is none."""
    answer = reference.rpartition(MARKER)[2].strip()
    found = math_verify.parse(_as_latex(answer), parsing_timeout=None)
    if not any(not isinstance(item, str) for item in found):
        raise UserError(
            f"reward.verifier=math-verify: the reference of {prompt[:60]!r} ends in {reference[-40:]!r}, "
            "which is no expression"
        )
    return list(found)


def _as_latex(answer: str) -> str:
    try:
        whole, decimals = read_number(answer)
    except Unreadable:
        return answer if r"\boxed" in answer else rf"\boxed{{{answer}}}"
    return rf"\boxed{{{whole}.{decimals}}}" if decimals else rf"\boxed{{{whole}}}"
