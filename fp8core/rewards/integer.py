r"""Answers read from text: strict integers in GSM8K's format, units after a number, and the final answer of a solution.

`IntegerVerifier` reads `#### 18` on the last line. The answer is the text after the last `####`, to the end of that
line. In a completion that was cut off it counts only when the line had ended, for digits may be missing. One number may
stand there, in ASCII digits. Before it may stand markup, a currency and one sign; after it markup, punctuation and a
unit. Each character is looked at a fixed number of times.

`is_unit` decides which words leave a number's value as it is: `18 dollars`, and not `18 million`. It accepts symbols
and names of measures, and common nouns of counted things. It also accepts any plural in -s that is no number word, no
fraction and no verb of a statement.

`final_answer` is for `math-verify`. The answer is announced by `\boxed{...}` or by `####`, and the last of them counts.
After `####` it is the whole rest of the line. A box counts where the clause around it adds nothing to it: no denial, no
factor, no second answer.

The tables of docs/reference/verifiers.md show these policies row by row.
"""

import re
import unicodedata

from fp8core.errors import UserError
from fp8core.rewards.scorer import RIGHT, Verdict, unparsed, wrong

# Case matters in these: `m` is metres and `M` a million. `k`, `K`, `b`, `B`, `bn`, `t`, `G` and `e` are refused.
_SYMBOLS_TEXT = (
    "m cm mm km dm ft yd mi in g kg kgs mg lb lbs oz l L ml mL dl h hr hrs min s sec d yr yrs wk ms mph kph kmh mpg "
    "wpm rpm kB KB MB GB TB kW kWh W V A Hz kHz MHz J kJ cal kcal N Pa C F pt qt gal sq"
)
_SYMBOLS = frozenset(_SYMBOLS_TEXT.split())
_CURRENCIES = frozenset(("USD", "EUR", "GBP", "JPY", "CNY", "INR", "Rs"))
_NOUNS_TEXT = (
    "dollar cent penny pence euro pound rupee yen yuan peso buck percent percentage degree celsius fahrenheit radian "
    "meter metre centimeter centimetre millimeter millimetre kilometer kilometre mile foot feet inch yard acre hectare "
    "gram kilogram kilo milligram ton tonne ounce liter litre milliliter millilitre gallon quart pint cup tablespoon "
    "teaspoon second minute hour day week month year decade century watt kilowatt volt ampere joule calorie newton "
    "byte kilobyte megabyte gigabyte unit people person men man women woman children child kid student teacher boy "
    "girl friend player worker customer guest fish sheep deer mice geese teeth egg apple orange banana cookie cake pie "
    "pizza slice piece box bag bottle can jar book page pen pencil card ticket toy ball game car bus truck train bike "
    "house room chair table tree flower plant dog cat bird chicken cow horse pig rabbit animal goal vote step lap trip "
    "row pack packet crate coin stamp sticker marble candy shirt dress shoe hat glass sandwich meal item part family "
    "class team school male female adult baby letter word question floor leg wheel light stick rose bead photo song "
    "popcorn fruit money profit homework"
)
_NOUNS = frozenset(_NOUNS_TEXT.split())
_NO_PLURALS_TEXT = (
    # Numbers, fractions and arithmetic; then what states something of the number.
    "hundreds thousands dozens tens ones twos threes fours fives sixes sevens eights nines zeros zeroes naughts nths "
    "googols grosses scores lakhs crores myriads grands mils bils sums halves halfs thirds fourths minus times "
    "negatives opposites reciprocals inverses doubles triples factorials exponents powers roots logs divides "
    "multiplies subtracts adds equals exceeds differs fails remains comes goes gives makes means becomes follows "
    "holds lies approximates seems looks needs wants does always perhaps besides towards afterwards whereas sometimes "
    "errs"
)
_NO_PLURALS = frozenset(_NO_PLURALS_TEXT.split())
_NUMBER_WORD = re.compile(
    r".*(?:illion|illiard|hundred|thousand|dozen).*|.*teens"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ties"
    r"|.*(?:fif|six|ven|eigh|nin|ten|twelf|een|tie|ion|red|sand)ths"
)
_PLURAL = re.compile(r"[a-z]{3,}(?<![sui])s")
_PHRASE = re.compile(
    r"(?:(?:square|cubic|sq\.?|cu\.?) )?(?P<unit>[A-Za-z]+)(?:(?: per | an? | ?/ ?)(?P<rate>[A-Za-z]+))?"
    r"(?: (?:old|long|tall|wide|high|deep|each|total|left))?|(?:per|an?) (?P<only_rate>[A-Za-z]+)"
)
_UNIT_SIGNS = re.compile(r"%|° ?[CF]?|\N{CENT SIGN}|[$\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}]")


def is_unit(phrase: str, *, money: bool) -> bool:
    """True if `phrase`, without markup and punctuation, is a unit; `money`: a currency stood before."""
    phrase = " ".join(phrase.split())
    if _UNIT_SIGNS.fullmatch(phrase):
        return not money
    match = _PHRASE.fullmatch(phrase)
    if match is None:
        return False
    unit, rate = match["unit"], match["rate"] or match["only_rate"]
    return (unit is None or _is_unit_word(unit, money)) and (rate is None or _is_unit_word(rate, money=False))


def _is_unit_word(word: str, money: bool) -> bool:
    """Symbols of measures after a currency (`$18 m`) are no units: they may be multipliers."""
    lower = word.lower()
    if word in _CURRENCIES or (word in _SYMBOLS and not money):
        return True
    if lower in _NOUNS:
        return not (money and lower.startswith("percent"))
    return bool(_PLURAL.fullmatch(lower)) and lower not in _NO_PLURALS and not _NUMBER_WORD.fullmatch(lower)


MARKER = "####"
MAX_CHARACTERS = 256
MAX_DIGITS = 40
_MAX_PUNCTUATION = 2

_DIGITS = frozenset("0123456789")
_SIGNS = frozenset("+-\N{MINUS SIGN}")
_MARKUP = frozenset("*_`()[]{}\\")
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_LATEX_WRAPPERS = re.compile(r"\\(?:boxed|textbf|text|mathbf|mathrm)(?![A-Za-z])")
_LATEX_SPACES = re.compile(r"\\[,;: ]|~")
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]")
_LATEX_DEGREE = re.compile(r"\^(?:\\circ(?![A-Za-z])|\{\\circ\})")
_UNTRUSTED_CATEGORIES = ("C", "M", "Zl", "Zp")
"""Control, formatting and unassigned characters, combining marks, line separators: what is seen may not be what is."""


class Unreadable(Exception):
    """The text does not hold exactly one plainly written number; the message gives the reason."""


class IntegerVerifier:
    """Right when the completion's answer is the integer of the reference; see `Scorer` and the policy above."""

    def score(self, prompt: str, completion: str, reference: str, finish: str, columns: str = "") -> Verdict:
        expected = reference_integer(reference, prompt)
        try:
            whole, decimals = read_number(_answer_line(completion, finish))
        except Unreadable as reason:
            return unparsed(str(reason))
        if decimals:
            return wrong(f"{whole}.{decimals} is no integer")
        return RIGHT if int(whole) == expected else wrong(f"answer {int(whole)}")

    def check(self, prompt: str, reference: str) -> None:
        reference_integer(reference, prompt)


def reference_integer(reference: str, prompt: str) -> int:
    """The integer after the last `####` of a reference, or the whole of one without: a mistake is a UserError."""
    _, marker, answer = reference.rpartition(MARKER)
    try:
        whole, decimals = read_number(answer.strip().partition("\n")[0] if marker else answer.strip())
        if decimals:
            raise Unreadable("no integer")
    except Unreadable as reason:
        why = reason if marker else f"no {MARKER}, and {reason}"
        raise UserError(f"the reference of {prompt[:60]!r} ends in {reference[-40:]!r} ({why})") from reason
    return int(whole)


def read_number(text: str) -> tuple[str, str]:
    """The only number in `text`: its integer part with sign ("-18"), and its decimals without trailing zeros.

    Raises Unreadable, also on a text above MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"more than {MAX_CHARACTERS} characters after {MARKER}")
    text = text.removesuffix("\r")
    _refuse_characters(text)
    start = next((index for index, character in enumerate(text) if character in _DIGITS), None)
    if start is None:
        raise Unreadable("no number")
    if text[start - 1 : start] == ".":
        start -= 1
    # Commas at the end of the run are punctuation.
    point = start + len(text[start : _run_end(text, start, "0123456789,")].rstrip(","))
    end = _run_end(text, point + 1, "0123456789") if text[point : point + 1] == "." else point
    before, rest = text[:start], text[end:]
    _refuse_second_number(rest)
    sign = _sign(before)
    _refuse_open_brackets(before + rest)
    _refuse_text_after(before, rest)
    return sign + _ungrouped(text[start:point]), text[point + 1 : end].rstrip("0")


def _answer_line(completion: str, finish: str) -> str:
    _, marker, rest = completion.rpartition(MARKER)
    if not marker:
        raise Unreadable(f"no {MARKER}")
    line, newline, _ = rest.partition("\n")
    if finish != "stop" and not newline:
        raise Unreadable("cut off within the answer")
    return line


def _refuse_characters(text: str) -> None:
    for character in text:
        category = unicodedata.category(character)
        if category.startswith(_UNTRUSTED_CATEGORIES) and character != "\t":
            raise Unreadable(f"the invisible character U+{ord(character):04X}")
        if category.startswith("N") and character not in _DIGITS:
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
    before = _LATEX_WRAPPERS.sub("", before)
    signs = [character for character in before if character in _SIGNS]
    if any(not _may_precede(character) for character in before):
        raise Unreadable("text before the number")
    if len(signs) > 1:
        raise Unreadable("several signs")
    if signs and before.partition(signs[0])[2][:1].isspace():
        raise Unreadable("a sign apart from the number")
    return "" if signs in ([], ["+"]) else "-"


def _refuse_open_brackets(text: str) -> None:
    """Wrappers close in the order in which they were opened."""
    opened: list[str] = []
    for character in text:
        if character in _BRACKETS.values():
            opened.append(character)
        elif character in _BRACKETS and (not opened or opened.pop() != _BRACKETS[character]):
            raise Unreadable("brackets that do not match")
    if opened:
        raise Unreadable("brackets that do not match")


def _refuse_text_after(before: str, rest: str) -> None:
    """Only markup, a unit and punctuation may stand after the number."""
    # A dollar sign that closes is the end of `$18$`; one that stays open is money.
    opened, closed = before.count("$"), rest.count("$")
    money = opened > closed or any(unicodedata.category(character) == "Sc" for character in before.replace("$", ""))
    rest = _LATEX_DEGREE.sub("\N{DEGREE SIGN}", _LATEX_SPACES.sub(" ", _LATEX_WRAPPERS.sub(" ", rest)))
    if _LATEX_COMMAND.search(rest):
        raise Unreadable("LaTeX after the number")
    markup = _MARKUP | {"$"} if opened else _MARKUP
    unit = "".join(character for character in rest if character not in markup).strip()
    if len(unit) - len(unit.rstrip(".,;")) > _MAX_PUNCTUATION or ".." in unit:
        raise Unreadable("punctuation that is no end")
    unit = unit.rstrip(".,;").rstrip()
    if unit and not is_unit(unit, money=money):
        raise Unreadable("text after the number that is no unit")


def _may_precede(character: str) -> bool:
    return character in _SIGNS or character in _MARKUP or character.isspace() or unicodedata.category(character) == "Sc"


def _ungrouped(digits: str) -> str:
    """The integer part without its commas; none at all is 0."""
    first, *groups = digits.split(",")
    if groups and (not 1 <= len(first) <= 3 or first[0] == "0" or any(len(group) != 3 for group in groups)):
        raise Unreadable("commas do not group thousands")
    return (first or "0") + "".join(groups)


MAX_ANSWER_CHARACTERS = 400
_NEAR = 2 * MAX_ANSWER_CHARACTERS

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_CLAUSE_END = re.compile(r"[.?!,;:](?=[\s*$])|\b(?:so|thus|hence|therefore|then|but)\b", re.IGNORECASE)
_DENIAL = re.compile(
    r"\b(?:not|no|never|neither|nor|cannot|without|except|unlike|instead|wrong|false|incorrect|doubt|unless)\b"
    r"|n['\N{RIGHT SINGLE QUOTATION MARK}]t\b",
    re.IGNORECASE,
)
_MODIFIER_WORDS = (
    "or than minus negative plus times over under above below per by between within beyond half twice double triple "
    "hundred thousand million billion dozen squared sqrt divided multiplied least most nearly almost around maybe"
)
_MODIFIERS = frozenset(_MODIFIER_WORDS.split())
_MARKUP_BEFORE = re.compile(r"(?:[\s$*_&]|\\[$(\[,;:! ]|\\(?:quad|qquad|displaystyle)(?![A-Za-z]))+\Z")
_LEADS_TO = re.compile(
    r"(?<![<>!=:/])(?<!\\not)(?<!\\not )=\Z|:\Z|[\N{RIGHTWARDS ARROW}\N{THEREFORE}]\Z"
    r"|\\(?:therefore|implies|[Rr]ightarrow|[Ll]ongrightarrow|to)\Z"
)
_LAST_WORD = re.compile(r"(?:\A|[\s*_$\"'(}])([A-Za-z]{2,}|[aAI])[,;]?\Z|\\text\s*\{[^{}]*?([A-Za-z]+)[ :,]*\}\Z")
_TEXT_AFTER = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
_MARKUP_AFTER = re.compile(r"[\s$*_`]|\\[)\],;! ]|\\\\|\\end\{[a-z]+\*?\}")
_STOP = re.compile(r"\.(?=[\s$*_`)\\\]]|\Z)")


def final_answer(completion: str) -> str:
    r"""The text of the last announcement: what is in the box, or the rest of the line after `####`.

    Raises Unreadable: there is none, it is too long, or what stands around the box may change it.
    """
    marker = completion.rfind(MARKER)
    announced = max(marker, completion.rfind(r"\boxed"), completion.rfind(r"\fbox"))
    if announced < 0:
        raise Unreadable(rf"no {MARKER} and no \boxed")
    line_start = completion.rfind("\n", 0, announced) + 1
    if marker < line_start:
        return _boxed(completion[max(line_start, announced - _NEAR) :], alone=False)
    line = completion[marker + len(MARKER) :].partition("\n")[0]
    if len(line) > MAX_ANSWER_CHARACTERS:
        raise Unreadable(f"more than {MAX_ANSWER_CHARACTERS} characters after {MARKER}")
    if not _BOX.search(line):
        return line.removesuffix("\r")
    try:
        read_number(line)
    except Unreadable:
        return _boxed(line, alone=True)
    return line.removesuffix("\r")


def _boxed(text: str, *, alone: bool) -> str:
    """The content of the last box that begins on the first line of `text`; `alone` refuses words before it."""
    *others, box = _BOX.finditer(text.partition("\n")[0])
    if others:
        raise Unreadable("several boxes on one line")
    inside, after = _braced(text[box.end() : box.end() + MAX_ANSWER_CHARACTERS + _NEAR])
    _refuse_before(text[: box.start()], alone)
    _refuse_after(after.partition("\n")[0])
    return inside


def _braced(text: str) -> tuple[str, str]:
    """The text in the braces that open `text`, and the text that follows them."""
    depth = 0
    for brace in _BRACE.finditer(text):
        if depth == 0 and (brace[0] != "{" or text[: brace.start()].strip()):
            break
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            inside = text[text.index("{") + 1 : brace.start()]
            if len(inside) > MAX_ANSWER_CHARACTERS:
                raise Unreadable(f"more than {MAX_ANSWER_CHARACTERS} characters in the box")
            return inside.replace("\r\n", "\n"), text[brace.end() :]
    raise Unreadable("a box that does not close")


def _refuse_before(before: str, alone: bool) -> None:
    clause_start = max((end.end() for end in _CLAUSE_END.finditer(before)), default=0)
    clause = before[clause_start:]
    if _DENIAL.search(clause):
        raise Unreadable("a denial before the box")
    lead = _MARKUP_BEFORE.sub("", clause)
    if not lead and not (alone and before.strip(" $*_\\([")):
        return
    if alone:
        raise Unreadable("text before the box")
    word = _LAST_WORD.search(lead)
    apart = len(lead) < len(clause)
    if word and apart and (word[1] or word[2]).lower() not in _MODIFIERS:
        return
    if not _LEADS_TO.search(lead):
        raise Unreadable("what stands before the box may change it")


def _refuse_after(after: str) -> None:
    clause = _STOP.split(after, maxsplit=1)[0]
    unit = _MARKUP_AFTER.sub(" ", _TEXT_AFTER.sub(r" \1 ", clause).replace(r"\%", "%")).strip().rstrip(",;").rstrip()
    if unit and not is_unit(unit, money=False):
        raise Unreadable("what stands after the box may change it")
