r"""Strict integers in GSM8K's format, and units after a number.

`IntegerVerifier` reads `#### 18` on the last line. The answer is the text after the last `####`, to the end of that
line. In a completion that was cut off it counts only when the line had ended, for digits may be missing. One number may
stand there, in ASCII digits. Before it may stand markup, a currency and one sign; after it markup, punctuation and a
unit. Tags of a format may stand around both.

`is_unit` decides which words leave a number's value as it is: `18 dollars`, and not `18 million`. It accepts symbols
and names of measures, and common nouns of counted things. It also accepts any plural in -s that is no number word, no
fraction and no verb of a statement. The tables of docs/reference/verifiers.md show the policy row by row.
"""

import re
import unicodedata

from fp8core.errors import UserError
from fp8core.rewards.scorer import RIGHT, Verdict, unparsed, wrong
from fp8core.rewards.wording import is_altered

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
    "tens ones twos threes fours fives sixes sevens eights nines zeros zeroes naughts nths googols grosses scores "
    "lakhs crores myriads grands mils bils sums halfs fourths negatives opposites reciprocals inverses factorials "
    "exponents powers roots logs divides multiplies subtracts adds equals exceeds differs fails remains comes goes "
    "gives makes means becomes follows holds lies approximates looks needs wants does always besides towards "
    "afterwards whereas sometimes errs"
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
    return bool(_PLURAL.fullmatch(lower)) and not (
        lower in _NO_PLURALS or _NUMBER_WORD.fullmatch(lower) or is_altered(lower)
    )


MARKER = "####"
MAX_CHARACTERS = 256
MAX_DIGITS = 40

# Tags that strike out, raise or lower their content are none of a format.
OPENING_TAG = re.compile(r"<(?!(?:s|del|strike|su[bp])>)[A-Za-z][\w-]{0,30}>")
CLOSING_TAG = re.compile(r"</(?!(?:del|strike|su[bp])>)[A-Za-z][\w-]{0,30}>|<[|\uff5c][^<>\n]{1,40}[|\uff5c]>")
_TAGS_AROUND = re.compile(rf"\A(?:\s*{OPENING_TAG.pattern})+|(?:(?:{CLOSING_TAG.pattern})\s*)+\Z")
_MARKUP = r"\s*_`()\[\]{}\\"
_NUMBER = re.compile(
    rf"(?P<before>[{_MARKUP}$¤]*(?P<sign>[-+\N{{MINUS SIGN}}](?!\s))?[{_MARKUP}$¤]*)"
    r"(?P<whole>[1-9]\d{0,2}(?:,\d{3})+|\d*)(?:\.(?P<decimals>\d*))?(?P<after>\D*)",
)
_SEVERAL = re.compile(r"\d[.,]*[^\d.,].*\d", re.DOTALL)
_BRACKETS = re.compile(r"\(\)|\[\]|\{\}")
# One behind a digit separates it from what follows.
_LATEX_WRAPPERS = re.compile(r"([\d.,])?\\(?:boxed|textbf|text|mathbf|mathrm)(?![A-Za-z])")
_LATEX_SPACES = re.compile(r"\\[,;: ]|~")
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
    text = without_tags(text)
    _refuse_characters(text)
    text = _LATEX_WRAPPERS.sub(lambda wrapper: f"{wrapper[1]} " if wrapper[1] else "", text)
    if not re.search(r"\d", text):
        raise Unreadable("no number")
    # Currencies are one character.
    currencies = "".join("¤" if unicodedata.category(one) == "Sc" and one != "$" else one for one in text)
    number = _NUMBER.fullmatch(currencies)
    if number is None and _SEVERAL.search(text):
        raise Unreadable("several numbers")
    if number is None:
        raise Unreadable("text before the number, or commas that do not group thousands")
    before, after = number["before"], text[number.start("after") :]
    _refuse_open_brackets(before + after)
    _refuse_text_after(before, after)
    sign = "-" if number["sign"] not in (None, "+") else ""
    return sign + (number["whole"].replace(",", "") or "0"), (number["decimals"] or "").rstrip("0")


def without_tags(text: str) -> str:
    """A line without the tags of a format around it, such as `</answer>`, and without its line's end."""
    return _TAGS_AROUND.sub("", text.removesuffix("\r"))


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
        if category.startswith("N") and not character.isascii():
            raise Unreadable("digits that are not ASCII")
    if len(re.findall(r"\d", text)) > MAX_DIGITS:
        raise Unreadable(f"more than {MAX_DIGITS} digits")


def _refuse_open_brackets(text: str) -> None:
    """Wrappers close in the order in which they were opened."""
    brackets = re.sub(r"[^()\[\]{}]", "", text)
    while (fewer := _BRACKETS.sub("", brackets)) != brackets:
        brackets = fewer
    if brackets:
        raise Unreadable("brackets that do not match")


def _refuse_text_after(before: str, after: str) -> None:
    """Only markup, a unit and punctuation may stand after the number."""
    # A dollar sign that closes is the end of `$18$`; one that stays open is money.
    opened, closed = before.count("$"), after.count("$")
    unit = _LATEX_DEGREE.sub("\N{DEGREE SIGN}", _LATEX_SPACES.sub(" ", after))
    if re.search(r"\\[A-Za-z]", unit):
        raise Unreadable("LaTeX after the number")
    unit = re.sub(r"[*_`()\[\]{}\\$]" if opened else r"[*_`()\[\]{}\\]", "", unit).strip()
    if re.search(r"[.,;]{3}\Z", unit) or ".." in unit:
        raise Unreadable("punctuation that is no end")
    unit = unit.rstrip(".,;").rstrip()
    if unit and not is_unit(unit, money=opened > closed or "¤" in before):
        raise Unreadable("text after the number that is no unit")
