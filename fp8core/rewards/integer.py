r"""Strict integers in GSM8K's format: `#### 18` on the last line.

The answer is one number after the last `####`, in ASCII digits, with a sign, a currency or a percent sign at most.
Markup may stand around it: `**18**`, `$18$`, `\boxed{18}`, `18</answer>`. Words may not: `18 million` differs.
"""

import re

from fp8core.errors import UserError
from fp8core.rewards.final_answer import MARKER, Unreadable, plain_answer
from fp8core.rewards.scorer import RIGHT, Scorer, Verdict, unparsed_answer, wrong

MAX_CHARACTERS = 256
MAX_DIGITS = 40

_MARKUP = re.compile(
    r"(?:\*\*(?P<a>[^*]+)\*\*|\$(?P<b>[^$]+)\$|`(?P<c>[^`]+)`|\\\((?P<d>.+)\\\)|\((?P<e>[^()]+)\)"
    r"|\\(?:boxed|text|textbf|mathrm|mathbf)\{(?P<f>.+)\})[.,]?"
)
_NUMBER = re.compile(
    r"(?:(?P<sign>[-+\N{MINUS SIGN}]?)(?:\\?\$|[€£¥₹] ?)?|\$(?P<late_sign>-))(?P<whole>[1-9]\d{0,2}(?:,\d{3})+|\d+)"
    r"(?:\.(?P<decimals>\d*))?(?: ?(?:\\?%|[€£¥₹¢]|°))?[.,]?",
    re.ASCII,
)


class IntegerVerifier(Scorer):
    """Right when the completion's answer is the integer of the data's."""

    def score(self, prompt: str, completion: str, answer: str, finish: str, columns: str = "") -> Verdict:
        expected = answer_integer(answer, prompt)
        try:
            whole, decimals = read_number(_answer_line(completion, finish))
        except Unreadable as reason:
            return unparsed_answer(str(reason))
        if decimals:
            return wrong(f"{whole}.{decimals} is no integer")
        return RIGHT if int(whole) == expected else wrong(f"answer {int(whole)}")

    def check(self, prompt: str, answer: str) -> None:
        answer_integer(answer, prompt)


def answer_integer(answer: str, prompt: str) -> int:
    """The integer after the last `####` of an answer, or the whole of one without: a mistake is a UserError."""
    _, marker, tail = answer.rpartition(MARKER)
    try:
        whole, decimals = read_number(tail.strip().partition("\n")[0] if marker else tail.strip())
        if decimals:
            raise Unreadable("no integer")
    except Unreadable as reason:
        why = reason if marker else f"no {MARKER}, and {reason}"
        raise UserError(f"the reference of {prompt[:60]!r} ends in {answer[-40:]!r} ({why})") from reason
    return int(whole)


def read_number(text: str) -> tuple[str, str]:
    """Integer part with sign ("-18"), and decimals without trailing zeros. Raises Unreadable: it is no number."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"more than {MAX_CHARACTERS} characters after {MARKER}")
    # Digits of other scripts are refused: what is seen may not be what is.
    text = plain_answer(text) if text.isascii() else text.strip(" \t\r")
    while markup := _MARKUP.fullmatch(text):
        text = next(filter(None, markup.groups())).strip()
    number = _NUMBER.fullmatch(text)
    if number is None:
        raise Unreadable(f"not one number alone: {text[:40]!r}" if text else "no number")
    whole = number["whole"].replace(",", "")
    decimals = (number["decimals"] or "").rstrip("0")
    if len(whole + decimals) > MAX_DIGITS:
        raise Unreadable(f"more than {MAX_DIGITS} digits")
    negative = (number["sign"] or number["late_sign"] or "+") != "+"
    return ("-" if negative else "") + whole, decimals


def _answer_line(completion: str, finish: str) -> str:
    _, marker, rest = completion.rpartition(MARKER)
    if not marker:
        raise Unreadable(f"no {MARKER}")
    line, newline, _ = rest.partition("\n")
    if finish != "stop" and not newline:
        raise Unreadable("cut off within the answer")
    return line
