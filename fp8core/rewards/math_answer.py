"""Mathematical expressions, parsed and compared by `math-verify`. It may take for ever: for processes of a pool only.

The answer is what the completion announces last (`final_answer`). The reference is what stands after its last `####`,
else in its last box, else the whole of it. A completion counts when it ended by itself. Two plain numbers are compared
digit by digit, and two words letter by letter; everything else is the library's to say.
"""

import logging
import re
from functools import lru_cache
from typing import NamedTuple

import math_verify
from sympy.core.cache import clear_cache

from fp8core.errors import UserError, described_error
from fp8core.rewards.final_answer import MARKER, Unreadable, final_answer, plain_answer
from fp8core.rewards.integer import read_number
from fp8core.rewards.scorer import RIGHT, Scorer, Verdict, scorer_crash, unparsed_answer, wrong

_SHOWN_CHARACTERS = 80
# Warns once that no time limit is set: the process has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)
# The box alone: nothing is searched for in an answer.
_BOX = math_verify.LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
_WORD = re.compile(r"(?:\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{)?\s*\(?([A-Za-z][A-Za-z ,'-]*)\)?\s*\}?\.?")
# The library takes letters outside of `\text` for variables.
_UNIT = re.compile(r"(?<=[\d}])(?:\s+|\s*\\(?:text|mathrm|mbox)\s*\{\s*)([A-Za-z]{2,}[A-Za-z /.]*)\}?\Z")
_MULTIPLIER = re.compile(r"hundred|thousand|illion|dozen|half|halves|third|quarter|tenth|squared|cubed|times|less|more")
_FIRST = ((r"\frac{1}{2}", "x"), ("(x+1)^2", "x^2+2x+1"), (r"\sin 2x", r"2\sin x\cos x"), ("[0,1)", "(0,1)"))


class AnswerForms(NamedTuple):
    """The data's answer in every form that a prediction is compared with; a plain number is not parsed yet."""

    text: str
    number: tuple[str, str] | None
    word: str | None
    forms: list[object]


class MathScorer(Scorer):
    def __init__(self) -> None:
        # First calls build tables that take longer than an answer.
        for prediction, answer in _FIRST:
            self.score("", rf"\boxed{{{prediction}}}", answer, "stop")

    def score(self, prompt: str, completion: str, answer: str, finish: str, columns: str = "") -> Verdict:
        expected = _answer_forms(answer, prompt)
        if finish != "stop":
            return unparsed_answer("cut off before the end of sequence")
        try:
            prediction = final_answer(completion)
        except Unreadable as reason:
            return unparsed_answer(str(reason))
        return _compare(prediction, expected)

    def check(self, prompt: str, answer: str) -> None:
        # The library reads every plain number, and takes a thousand times as long.
        if _number(answer.rpartition(MARKER)[2]) is None:
            _answer_forms(answer, prompt)


def _compare(prediction: str, expected: AnswerForms) -> Verdict:
    wrong_verdict = wrong(f"answer {prediction[:_SHOWN_CHARACTERS]}")
    if prediction == expected.text:
        return RIGHT
    number = _number(prediction)
    word = _word(prediction)
    if number and expected.number:
        return RIGHT if number == expected.number else wrong_verdict
    if word and expected.word:
        return RIGHT if word == expected.word else wrong_verdict
    unit = _UNIT.search(prediction)
    if unit and _MULTIPLIER.search(unit[1].lower()):
        return unparsed_answer(f"a word that makes another number: {unit[1][:_SHOWN_CHARACTERS]}")
    # Results of earlier answers in sympy's cache must not decide on this one.
    clear_cache()
    forms = _parse(_UNIT.sub(r"\\text{ \1}", prediction))
    if not forms:
        return unparsed_answer("no expression")
    try:
        equal = math_verify.verify(
            expected.forms or _parse(expected.text), forms, timeout_seconds=None, raise_on_error=True
        )
    except Exception as error:  # noqa: BLE001 - sympy raises anything; the verdict names it
        return scorer_crash(f"comparing: {described_error(error)}")
    return RIGHT if equal else wrong_verdict


@lru_cache(maxsize=256)
def _answer_forms(answer: str, prompt: str) -> AnswerForms:
    """The forms of the data's answer. Raises UserError, naming the prompt, when it is no expression."""
    text = answer.rpartition(MARKER)[2].strip()
    if MARKER not in answer and r"\boxed" in answer:
        try:
            text = final_answer(answer)
        except Unreadable:
            text = answer
    text = plain_answer(text)
    if (number := _number(text)) is not None:
        return AnswerForms(text, number, None, [])
    # The data is trusted with what an answer is not: the library reads it as it can.
    forms = _parse(_UNIT.sub(r"\\text{ \1}", text)) or list(math_verify.parse(text, parsing_timeout=None))
    if all(isinstance(item, str) for item in forms):
        raise UserError(f"the reference of {prompt[:60]!r} ends in {answer[-40:]!r}, which is no expression")
    return AnswerForms(text, None, _word(text), forms)


def _parse(text: str) -> list[object]:
    return list(math_verify.parse(rf"\boxed{{{text}}}", [_BOX], fallback_mode="no_fallback", parsing_timeout=None))


def _number(text: str) -> tuple[str, str] | None:
    """A plain number as (whole, decimals), zero without a sign; a percentage is left to the library."""
    if "%" in text:
        return None
    try:
        whole, decimals = read_number(text)
    except Unreadable:
        return None
    digits = whole.lstrip("-").lstrip("0") or "0"
    return ("-" if whole.startswith("-") and digits + decimals != "0" else "") + digits, decimals


def _word(text: str) -> str | None:
    r"""The words that an answer is, such as `\text{(A)}` or `east`; a letter alone is a variable for the library."""
    match = _WORD.fullmatch(text)
    return None if match is None or len(match[1]) < 3 else " ".join(match[1].lower().split())
