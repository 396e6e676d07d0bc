r"""Strict verifier of integer answers in GSM8K's format: `#### 18` on the last line.

The answer is the text after the last `####`, to the end of that line; in a completion that was cut off it counts only
when the line had ended, for digits may be missing. One number may stand there, in ASCII digits, read by a scanner that
looks at each character a fixed number of times:

| after `####`                                            | read as                                               |
|---------------------------------------------------------|-------------------------------------------------------|
| `18`, `+18`, `007`                                      | 18, 18, 7                                             |
| `-18`, `−18` (U+2212), `-$18`, `$-18`                   | -18                                                   |
| `- 18`, `--18`, `–18` (another dash), `±18`             | unparsed: the sign is not certain                     |
| `$18`, `€ 18`, `\$18`                                   | 18 (any currency sign)                                |
| `1,234`, `12,345,678`                                   | commas between groups of three                        |
| `1,23`, `1234,567`, `0,123`                             | unparsed: commas do not group thousands               |
| `72.0`, `1.000`                                         | 72, 1: a point is a decimal point, zeros add nothing  |
| `72.5`, `.5`                                            | wrong: a number, but no integer                       |
| `18.`, `18%`, `18 dollars`, `18kg`, `18 million`        | 18: what follows without digits is a unit or the end  |
| `**18**`, `(18)`, `$18$`, `\boxed{18}`, `\(\text{18}\)` | 18: brackets, emphasis and LaTeX wrappers             |
| `x = 18`, `about 18`, `minus 18`, `\sqrt{18}`           | unparsed: text before the number may change it        |
| `18 or 20`, `18 = 18`, `1/2`, `1 234`, `9:30`, `18 m2`  | unparsed: several numbers                             |
| `1e5`, `1.8E+1`                                         | unparsed: exponent notation                           |
| `١٨`, `18²`, `½`                                        | unparsed: digits that are not ASCII                   |
| nothing, `eighteen`, a second `####` at the end         | unparsed: no number                                   |
| a line above 256 characters, above 40 digits            | unparsed                                              |
"""

import unicodedata

from fp8core.errors import UserError
from fp8core.rewards.verdict import RIGHT, Verdict, unparsed, wrong

MARKER = "####"
MAX_CHARACTERS = 256
MAX_DIGITS = 40

_DIGITS = frozenset("0123456789")
_SIGNS = frozenset("+-\N{MINUS SIGN}")
_MARKUP = frozenset("*_`()[]{}\\")
_LATEX_WRAPPERS = (r"\boxed", r"\textbf", r"\text", r"\mathbf", r"\mathrm")


class Unreadable(Exception):
    """The text does not hold exactly one plainly written number; the message says why."""


class IntegerVerifier:
    """Right when the completion's answer is the integer of the reference; see Verifier and the table above."""

    def score(self, prompt: str, completion: str, reference: str, finish: str) -> Verdict:
        expected = reference_integer(reference, prompt)
        try:
            whole, decimals = read_number(_answer_line(completion, finish))
        except Unreadable as reason:
            return unparsed(str(reason))
        if decimals:
            return wrong(f"{whole}.{decimals} is no integer")
        return RIGHT if int(whole) == expected else wrong(f"answer {whole}")

    def check(self, prompt: str, reference: str) -> None:
        reference_integer(reference, prompt)


def reference_integer(reference: str, prompt: str) -> int:
    """The integer after the last `####` of a reference. Raises UserError, naming the prompt, when it has none."""
    try:
        _, marker, answer = reference.rpartition(MARKER)
        if not marker:
            raise Unreadable(f"no {MARKER}")
        whole, decimals = read_number(answer)
        if decimals:
            raise Unreadable("no integer")
    except Unreadable as reason:
        raise UserError(
            f"reward.verifier=integer: the reference of {prompt[:60]!r} ends in {reference[-40:]!r} ({reason})"
        ) from reason
    return int(whole)


def read_number(text: str) -> tuple[str, str]:
    """The only number in `text`: its integer part with sign ("-18"), and its decimals without trailing zeros.

    Raises Unreadable, also on a text above MAX_CHARACTERS.
    """
    _refuse_oversize(text)
    start = next((index for index, character in enumerate(text) if character in _DIGITS), None)
    if start is None:
        raise Unreadable("no number")
    if text[start - 1 : start] == ".":
        start -= 1
    # Commas at the end of the run are punctuation.
    point = start + len(text[start : _run_end(text, start, "0123456789,")].rstrip(","))
    end = _run_end(text, point + 1, "0123456789") if text[point : point + 1] == "." else point
    _refuse_second_number(text[end:])
    sign = _sign(text[:start])
    return sign + _ungrouped(text[start:point]), text[point + 1 : end].rstrip("0")


def _answer_line(completion: str, finish: str) -> str:
    _, marker, rest = completion.rpartition(MARKER)
    if not marker:
        raise Unreadable(f"no {MARKER}")
    line, newline, _ = rest.partition("\n")
    if finish != "stop" and not newline:
        raise Unreadable("cut off within the answer")
    return line


def _refuse_oversize(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"more than {MAX_CHARACTERS} characters after {MARKER}")
    if any(unicodedata.category(character).startswith("N") and character not in _DIGITS for character in text):
        raise Unreadable("digits that are not ASCII")
    if sum(character in _DIGITS for character in text) > MAX_DIGITS:
        raise Unreadable(f"more than {MAX_DIGITS} digits")


def _run_end(text: str, start: int, alphabet: str) -> int:
    return len(text) - len(text[start:].lstrip(alphabet))


def _refuse_second_number(rest: str) -> None:
    exponent = rest[1:].lstrip("+-") if rest[:1] in ("e", "E") else ""
    if exponent[:1] in _DIGITS:
        raise Unreadable("exponent notation")
    if any(character in _DIGITS for character in rest):
        raise Unreadable("several numbers")


def _sign(before: str) -> str:
    """The minus sign or nothing, by the text before the number: only markup, currency and one sign may stand there."""
    for wrapper in _LATEX_WRAPPERS:
        before = before.replace(wrapper, "")
    signs = [character for character in before if character in _SIGNS]
    if any(not _may_precede(character) for character in before):
        raise Unreadable("text before the number")
    if len(signs) > 1:
        raise Unreadable("several signs")
    if signs and before.partition(signs[0])[2][:1].isspace():
        raise Unreadable("a sign apart from the number")
    return "" if signs in ([], ["+"]) else "-"


def _may_precede(character: str) -> bool:
    return character in _SIGNS or character in _MARKUP or character.isspace() or unicodedata.category(character) == "Sc"


def _ungrouped(digits: str) -> str:
    """The integer part without its commas; none at all is 0."""
    first, *groups = digits.split(",")
    if groups and (not 1 <= len(first) <= 3 or first[0] == "0" or any(len(group) != 3 for group in groups)):
        raise Unreadable("commas do not group thousands")
    return (first or "0") + "".join(groups)
