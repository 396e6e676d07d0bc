"""Verifier of mathematical expressions, by `math-verify` (extra `math`). It may hang: for child processes only.

The answer is what the completion announces last (`final_answer`). The library parses and compares it. Two plain numbers
are compared digit by digit, two texts word by word. The reference is what stands after its last `####`, else in its
last box, else the whole of it. A completion counts when it ended by itself.

The library drops what it cannot parse: units, words, the left side of an equation, the base of a number. It computes
any expression in an answer, however long that takes. So an answer is first put into a plain form in which nothing is
left to drop. An answer that is no plain expression, or too large in shape, is refused with a reason. It may have what
its reference has as well: as many commas, the same relations, words and bases. The second table of math-verify in
docs/reference/verifiers.md shows the policy row by row.
"""

import logging
import math
import re
import unicodedata
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import math_verify
from sympy import I, Symbol
from sympy.core.cache import clear_cache

from fp8core.errors import UserError, described_error
from fp8core.rewards.final_answer import MAX_ANSWER_CHARACTERS, final_answer, keeps_value, plain_answer
from fp8core.rewards.integer import MARKER, Unreadable, is_unit, read_number
from fp8core.rewards.scorer import RIGHT, Verdict, crashed, unparsed, wrong

MAX_TOKENS, MAX_DEPTH, MAX_DIGITS, MAX_CELLS = 160, 12, 40, 36
MAX_POWERS, MAX_LAYERS, MAX_FUNCTIONS, MAX_FACTORIAL, MAX_CHOICE = 16, 12, 6, 100, 1_000
MAX_EXPONENT, MAX_DEGREE, MAX_TOWER = 4_000, 120, 4
"""Of numbers; of letters, all powers together; of a number in an exponent's exponent."""

_SYMBOLS = str.maketrans({
    "\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": r"\times ", "\N{DIVISION SIGN}": r"\div ",
    "\N{MIDDLE DOT}": r"\cdot ", "\N{DOT OPERATOR}": r"\cdot ", "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{INFINITY}": r"\infty ", "\N{LESS-THAN OR EQUAL TO}": r"\le ", "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ", "\N{UNION}": r"\cup ", "\N{ELEMENT OF}": r"\in ", "\N{DEGREE SIGN}": r"^\circ",
    "\N{PLUS-MINUS SIGN}": r"\pm ", "\N{NO-BREAK SPACE}": " ", "\t": " ", "\n": " ",
})  # fmt: skip
_FUNCTION_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt frac binom"
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_GREEK = "alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi omega Delta Omega pi"
_OTHER_COMMANDS = (
    "cdot times div pm mp infty cup cap emptyset varnothing le leq ge geq lt gt ne neq in notin approx equiv sim cong "
    "lfloor rfloor lceil rceil mathbb vert lvert rvert setminus"
)
_COMMANDS = frozenset(f"{_FUNCTION_NAMES} {_GREEK} {_OTHER_COMMANDS}".split())
# The library reads `3 > x` as `x < 3`, so both count as the same relation.
_RELATIONS = {"=": "=", "<": "<", ">": "<", r"\lt": "<", r"\gt": "<"}
_RELATIONS |= dict.fromkeys((r"\le", r"\leq", r"\ge", r"\geq"), "<=")
_RELATIONS |= {rf"\{name}": name for name in ("ne", "neq", "in", "notin", "approx", "equiv", "sim", "cong")}
_TOKEN = re.compile(
    r"(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<matrix>\\(?:begin|end)\{[pb]matrix\})|(?P<command>\\[A-Za-z]+)"
    r"|(?P<row>\\\\)|(?P<escaped>\\[{}%|])|(?P<word>[A-Za-z]+)|(?P<sign>[-+*/^_(){}\[\]|,;:!=<>&])|(?P<space> +)"
)
_WRAPPED = re.compile(
    r"\s*(?:\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>.+)\\\)|\\\[(?P<d>.+)\\\]|\*\*(?P<e>[^*]+)\*\*"
    r"|\*(?P<f>[^*]+)\*|`(?P<g>[^`]+)`|\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{(?P<h>[^{}]*)\})[\s.,]*",
    re.DOTALL,
)
_TEXT_AT_END = re.compile(
    r"(?:\\(?:text|mathrm|mbox|textrm)\s*\{\s*([^{}]*?)\s*\}|(?<=[\d})]) ([A-Za-z][A-Za-z /.]+)"
    r"|(?<=[\d})])( ?[^\W\d_][^\d{}\\$^_=]*))(?:\^\{?[23]\}?)?\Z"
)
# A dot over the first and the last digit means the same as a line over all of them.
_DOTS = re.compile(r"\\dot *\{? *(\d) *\}?(?:(\d*)\\dot *\{? *(\d) *\}?)?")
_REPEATING = re.compile(
    r"(?<![\d.,])(\d{0,20})\.(\d{0,20})\\(?:overline|bar) *(?:\{ *(\d{1,20}) *\}|(\d))(?! *[\d.^!])( *\\%)?"
)
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ|\{\\circ\})\s*[CF]?\Z")
_LEFT_SIDE = re.compile(
    rf"(?:[A-Za-z]|\\(?!pi)(?:{_GREEK.replace(' ', '|')}))(?:_(?:\w|\{{\w+\}}))?(?:\([A-Za-z]\))? *"
    r"(?:=|\\in(?![A-Za-z])) *(?=\S)"
)
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_EXPONENT_NOTATION = re.compile(r"\d *[eE] *[-+]? *\d")
_BASE = re.compile(r"\d[)}\]]* *_ *\{? *(?:\d+|\\?[A-Za-z]+)?")
_PAIRS = {("(", ")"), ("[", "]"), ("[", ")"), ("(", "]"), ("{", "}"), (r"\{", r"\}")}
_LETTER_I = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]?i|i[A-Za-z]?)(?![A-Za-z])")
_INDEX_LETTERS = frozenset("jklmnpqN")
# Of the imaginary unit, a reference has no quotient by it left, and no absolute value.
_INDEX = re.compile(
    r"_ *\{?[^{}]*i|\\(?:sum|prod|binom|pmod|bmod)|i *[!=_]|= *i(?![A-Za-z])"
    r"|\\[dt]?frac *\{[^{}]*\} *\{[^{}]*i|/ *\(?[^+\-,;()]*i|\|[^|]*i[^|]*\|"
)
# Powers, and products in which more than one factor has the letter.
_MULTIPLIED = re.compile(r"i *\^|i[^+\-,;]*\([^()]*i|\([^()]*i[^()]*\) *(?:\\cdot|\*)? *(?:[a-hj-z]? *i|\(|\^)")
_OPENING, _CLOSING = ({pair[side] for pair in _PAIRS} for side in (0, 1))
_WORDS = re.compile(r"\(?([A-Za-z][A-Za-z ,'-]*)\)?")


class Expression(NamedTuple):
    """An answer in its plain form, and what it has that another answer must have as well.

    values: of a list without brackets of its own, where a part with one sign of two stands for two; else 0.
    """

    text: str
    separators: int
    values: int
    relations: tuple[str, ...]
    words: frozenset[str]
    letters: frozenset[str]
    bases: tuple[str, ...]


def plain_expression(answer: str) -> Expression:
    """An answer without markup, unit and spacing. Raises Unreadable: a character that is no part of an expression."""
    if "~~" in answer:
        raise Unreadable("an answer that is struck out")
    text = _without_unit(_without_spacing(_unwrapped(answer.translate(_SYMBOLS))))
    text = _REPEATING.sub(_fraction, _DOTS.sub(r"\\overline{\1\2\3}", text))
    for character in text:
        if not " " <= character <= "~":
            raise Unreadable(f"the character U+{ord(character):04X} ({unicodedata.name(character, 'control')})")
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b", ",", text)
    text = re.sub(r",\s*,", ",", text)
    if ";" not in text and _GROUPED.sub("", text).count(",") == 0:
        text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    tokens = [match[0] for match in _TOKEN.finditer(text)]
    return Expression(
        text=text,
        separators=sum(token in (",", ";") for token in tokens),
        values=_values(tokens),
        relations=tuple(sorted(_RELATIONS[token] for token in tokens if token in _RELATIONS)),
        words=frozenset(token for token in tokens if token.isalpha() and len(token) > 2),
        letters=_letters(tokens),
        bases=tuple(re.sub(r"[\s{}]", "", match[0]) for match in _BASE.finditer(text)),
    )


def _fraction(decimals: re.Match[str]) -> str:
    """A repeating decimal such as `0.1\\overline{6}` as a fraction; unchanged behind another number."""
    if decimals.string[: decimals.start()].rstrip()[-1:].isdigit():
        return decimals[0]
    whole, first, repeated = decimals[1], decimals[2], decimals[3] or decimals[4]
    numerator = int(whole + first + repeated) - int(f"0{whole}{first}")
    value = Fraction(numerator, (10 ** len(repeated) - 1) * 10 ** len(first) * (100 if decimals[5] else 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def words_of(answer: str) -> str | None:
    r"""The words of an answer that is a text, such as `\text{(A)}` or `east`; None of anything else."""
    inner = _unwrapped(answer).strip().rstrip(".")
    match = _WORDS.fullmatch(inner)
    if match is None or (len(match[1]) < 3 and inner == answer.strip()):
        return None
    return " ".join(match[1].lower().split())


def admitted(answer: Expression, reference: Expression) -> str:
    """The text for the library. Raises Unreadable: the reference has no such parts, or the shape is too large."""
    text = answer.text
    if answer.relations in (("=",), ("in",)) and not reference.relations:
        right_side = _LEFT_SIDE.match(text)
        if right_side is None:
            raise Unreadable("an equation, where the reference has none")
        text = text[right_side.end() :]
    elif answer.relations != reference.relations and (answer.relations or reference.relations != ("=",)):
        raise Unreadable("other relations than the reference has")
    listed = answer.values and answer.values == reference.values
    if answer.separators != reference.separators and not listed:
        raise Unreadable("several answers" if answer.separators > reference.separators else "fewer answers")
    if answer.bases and answer.bases != reference.bases:
        raise Unreadable("a number of another base")
    if _EXPONENT_NOTATION.search(text):
        raise Unreadable("exponent notation")
    _refuse_tokens(text, reference)
    return text


def _unwrapped(text: str) -> str:
    while match := _WRAPPED.fullmatch(text):
        text = next(group for group in match.groups() if group is not None)
    return re.sub(r"[\s.,]+\Z", "", text)


def _letters(tokens: list[str]) -> frozenset[str]:
    """The symbols for a quantity: letters and Greek ones, save pi, e and the imaginary unit."""
    letters = {letter for token in tokens if token.isalpha() and token not in _FUNCTIONS for letter in token}
    greek = {token for token in tokens if token[1:] in _GREEK.split()}
    return frozenset((letters | greek) - {"e", "i", r"\pi"})


def _values(tokens: list[str]) -> int:
    """The number of values of `2, -2` and `\\pm 2`; 0 where brackets may make a point or an interval of a list."""
    inner = tokens[1:-1] if tokens[:1] == [r"\{"] and tokens[-1:] == [r"\}"] else tokens
    parts: list[list[str]] = [[]]
    depth = 0
    for token in inner:
        depth += (token in _OPENING) - (token in _CLOSING)
        if token in (",", ";"):
            if depth:
                return 0
            parts.append([])
        parts[-1].append(token)
    signs = [sum(token in (r"\pm", r"\mp") for token in part) for part in parts]
    return sum(count + 1 for count in signs) if max(signs) <= 1 else 0


def _without_spacing(text: str) -> str:
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"(?<!\\)%", r"\\%", text.replace(r"\!", "").replace("{,}", ","))
    text = re.sub(r"(?<!\\)\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~", " ", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(\\log *_) *(\w)(?!\w)", r"\1{\2}", text)
    return text.strip()


def _without_unit(text: str) -> str:
    match = _TEXT_AT_END.search(text)
    if match and match.start() and _is_unit(match):
        text = text[: match.start()].rstrip()
    match = _DEGREES.search(text)
    if match and not any(rf"\{name}" in text for name in ("sin", "cos", "tan", "cot", "sec", "csc")):
        text = text[: match.start()]
    return re.sub(r"\A(-?)\s*(?:\\\$|\$|\N{EURO SIGN}|\N{POUND SIGN})\s*(?=[-\\\d.])", r"\1", text)


def _is_unit(match: re.Match[str]) -> bool:
    phrase = match[1] or match[2] or match[3] or ""
    return is_unit(phrase, money=False) or (not phrase.isascii() and keeps_value(phrase))


def _refuse_tokens(text: str, reference: Expression) -> None:
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise Unreadable(f"more than {MAX_ANSWER_CHARACTERS} characters")
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise Unreadable(f"{text[position]!r} is no part of an expression")
        tokens.append((match.lastgroup, match[0]))
        position = match.end()
    tokens = [token for token in tokens if token[0] != "space"]
    if not tokens:
        raise Unreadable("nothing after the announcement")
    if len(tokens) > MAX_TOKENS:
        raise Unreadable(f"more than {MAX_TOKENS} parts")
    for (kind, token), (next_kind, following) in zip(tokens, [*tokens[1:], ("end", "")], strict=True):
        _refuse_token(kind, token, next_kind, following, reference)
    names = [token for _, token in tokens]
    if "%" in text and not re.fullmatch(r"[^%]*\d *\\%", text):
        raise Unreadable("a percent sign that is no end")
    _refuse_shape(names, reference)


def _refuse_token(kind: str, token: str, next_kind: str, following: str, reference: Expression) -> None:
    """Refuse what the library would drop, guess at or compute for long."""
    mean = token in (r"\overline", r"\bar") and token in reference.text
    if kind == "command" and token[1:] not in _COMMANDS and not mean:
        raise Unreadable(f"the command {token}")
    if token == r"\infty" and token not in reference.text:
        raise Unreadable("infinity, where the reference has none")
    if kind == "word" and len(token) > 2 and token != "sqrt" and token not in reference.words:
        raise Unreadable(f"the word {token[:20]!r}")
    if kind == "number" and next_kind == "number":
        raise Unreadable("several numbers")
    if kind == "number" and len(token) > MAX_DIGITS:
        raise Unreadable(f"more than {MAX_DIGITS} digits")
    if token in ("+", "-") and following in ("+", "-", r"\pm", r"\mp"):
        raise Unreadable("several signs")
    if following == "!" and not (
        kind == "word" or (kind == "number" and token.isdigit() and int(token) <= MAX_FACTORIAL)
    ):
        raise Unreadable("a factorial of more than a small number")
    if token == ":" and ":" not in reference.text:
        raise Unreadable("a ratio, where the reference has none")


def _refuse_shape(names: list[str], reference: Expression) -> None:
    """Bound what costs more than it is long: depth, powers, roots and fractions, functions, choices, matrices."""
    layers = sum(name in (r"\frac", r"\sqrt", "sqrt", r"\binom") for name in names)
    functions = sum(name[1:] in _FUNCTIONS for name in names if name.startswith("\\")) - layers
    if names.count("^") > MAX_POWERS or layers > MAX_LAYERS or functions > MAX_FUNCTIONS:
        raise Unreadable("too many powers, roots, fractions or functions")
    if names.count("&") + names.count(r"\\") >= MAX_CELLS:
        raise Unreadable(f"more than {MAX_CELLS} cells")
    choices = r"\binom" in names and r"\binom" not in reference.text
    if choices and ("^" in names or any(name.isalpha() or _value(name) > MAX_CHOICE for name in names)):
        raise Unreadable("a choice among too many")
    _refuse_powers(names)


def _refuse_powers(names: list[str]) -> None:
    """Bound each exponent, times the exponents within what it is the exponent of; those of letters in their sum."""
    opener = _openers(names)
    closer = {opened: closed for closed, opened in opener.items()}
    degrees: dict[int, int] = {}
    of_letters = 0
    for index in (index for index, name in enumerate(names) if name == "^"):
        base = range(opener.get(index - 1, index - 1), index)
        end = closer.get(index + 1, index + 1) + 1
        exponent = names[index + 1 : end]
        tower = names[max(0, index - 2)] == "^" or exponent.count("^") > 1 or "!" in [*exponent, *names[end : end + 1]]
        if tower or ("^" in exponent and any(_value(name) > MAX_TOWER for name in exponent)):
            raise Unreadable("a tower of powers")
        within = max((degrees[place] for place in base if place in degrees), default=1)
        degrees[index] = within * math.prod(max(1, _value(name)) for name in exponent)
        if any(names[place].isalpha() or names[place][1:] in _GREEK.split() for place in base if place >= 0):
            of_letters += degrees[index]
        if degrees[index] > MAX_EXPONENT or of_letters > MAX_DEGREE:
            raise Unreadable("an exponent that is too large")


def _value(name: str) -> int:
    return int(float(name)) if name[0] in "0123456789." else 1


def _openers(names: list[str]) -> dict[int, int]:
    """Places of closing brackets, with the place where each was opened. `[0, 1)` is an interval."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for index, name in enumerate(names):
        if name in ("(", "[", "{", r"\{"):
            opened.append(index)
        elif name in (")", "]", "}", r"\}"):
            if not opened or (names[opened[-1]], name) not in _PAIRS:
                raise Unreadable("brackets that do not match")
            pairs[index] = opened.pop()
        if len(opened) > MAX_DEPTH:
            raise Unreadable(f"deeper than {MAX_DEPTH} brackets")
    if opened:
        raise Unreadable("brackets that do not match")
    return pairs


_SHOWN_CHARACTERS = 80

# Warns once that no time limit is set: the process has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# The box alone: nothing is searched for in an answer, and nothing is dropped from it as a unit.
_WHOLE_BOX = math_verify.LatexExtractionConfig(
    try_extract_without_anchor=False,
    boxed_match_priority=0,
    normalization_config=replace(math_verify.LatexExtractionConfig().normalization_config, units=False),
)
_FIRST = ((r"\frac{1}{2}", "x"), ("(x+1)^2", "x^2+2x+1"), (r"\sin 2x", r"2\sin x\cos x"), ("[0,1)", "(0,1)"))


class Reference(NamedTuple):
    """A reference in every form that an answer is compared with. names_index: its letter i may be a variable."""

    text: str
    number: tuple[str, str] | None
    words: str | None
    shape: Expression
    parsed: list[object]
    names_index: bool


class MathScorer:
    """Right when the answer of the completion equals the reference's; see Scorer."""

    def __init__(self) -> None:
        # First calls build tables that take longer than an answer.
        for answer, reference in _FIRST:
            self.score("", rf"\boxed{{{answer}}}", reference, "stop")

    def score(self, prompt: str, completion: str, reference: str, finish: str, columns: str = "") -> Verdict:
        expected = _expected(reference, prompt)
        if finish != "stop":
            return unparsed("cut off before the end of sequence")
        try:
            return _verdict(final_answer(completion), expected)
        except Unreadable as reason:
            return unparsed(str(reason))

    def check(self, prompt: str, reference: str) -> None:
        # The library reads every plain number, and takes a thousand times as long.
        if _number(reference.rpartition(MARKER)[2].strip()) is None:
            _expected(reference, prompt)


def _verdict(answer: str, expected: Reference) -> Verdict:
    number = _number(answer)
    if answer.strip() == expected.text:
        return RIGHT
    if number and expected.number:
        return RIGHT if number == expected.number else wrong(f"answer {_shown(number)}")
    words = words_of(answer)
    if words and expected.words:
        return RIGHT if words == expected.words else wrong(f"answer {words[:_SHOWN_CHARACTERS]}")
    text = _shown(number) if number else admitted(plain_expression(answer), expected.shape)
    # Nothing in other letters is equal, and sympy takes long to say so.
    if not plain_expression(text).letters <= expected.shape.letters:
        return wrong(f"answer {text[:_SHOWN_CHARACTERS]}")
    # Results of earlier answers in sympy's cache must not decide on this one.
    clear_cache()
    found = _parsed(text)
    if not found:
        return unparsed("no expression")
    complex_values = _complex_forms(expected.parsed, found)
    if not expected.names_index:
        return _compare(*complex_values, text)
    verdict = _compare(expected.parsed, found, text)
    if verdict.outcome == "wrong" and _compare(*complex_values, text) == RIGHT:
        return unparsed("i, which may be a variable of the reference or the imaginary unit")
    return verdict


def _complex_forms(expected: list[object], found: list[object]) -> tuple[list[object], list[object]]:
    """Both sides with the imaginary unit for the letter i, which is a symbol to the library.

    Without that letter they stay as they are. With it the library lets no other symbol be real, so none is on a side.
    """
    symbols = {symbol for item in [*expected, *found] for symbol in getattr(item, "free_symbols", ())}
    if all(symbol.name != "i" for symbol in symbols):
        return expected, found
    values = {symbol: I if symbol.name == "i" else Symbol(symbol.name) for symbol in symbols}
    return [_substituted(item, values) for item in expected], [_substituted(item, values) for item in found]


def _substituted(item: object, values: dict[object, object]) -> object:
    substitute = getattr(item, "subs", None)
    try:
        return item if substitute is None else substitute(values)
    except Exception:  # noqa: BLE001 - sympy raises anything where no complex number may stand, as in `i < 3`
        return item


def _compare(expected: list[object], found: list[object], text: str) -> Verdict:
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
        return crashed(f"comparing: {described_error(failure)}")
    return wrong(f"answer {text[:_SHOWN_CHARACTERS]}")


@lru_cache(maxsize=256)
def _expected(reference: str, prompt: str) -> Reference:
    """The forms of a reference. Raises UserError, naming the prompt, when it is no expression."""
    text = reference.rpartition(MARKER)[2].strip()
    if MARKER not in reference and r"\boxed" in reference:
        text = _content(text)
    text = plain_answer(text)
    number = _number(text)
    shape = _shape(text)
    parsed = _parsed(_shown(number) if number else shape.text)
    # The data is trusted with what an answer is not: the library reads it as it can.
    parsed = parsed or [item for item in math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None)]
    if all(isinstance(item, str) for item in parsed):
        raise UserError(f"the reference of {prompt[:60]!r} ends in {reference[-40:]!r}, which is no expression")
    return Reference(text, number, words_of(text), shape, parsed, _names_index(text, shape))


def _names_index(text: str, shape: Expression) -> bool:
    """True if i may be a variable: an index, beside letters for whole numbers, in a relation or multiplied by itself.

    A reference in which it is the imaginary unit has been simplified, and has no power of it.
    """
    if not _LETTER_I.search(text):
        return False
    relation = shape.relations and not _LEFT_SIDE.match(shape.text)
    return bool(relation or shape.letters & _INDEX_LETTERS or _INDEX.search(text) or _MULTIPLIED.search(text))


def _content(reference: str) -> str:
    try:
        return final_answer(reference)
    except Unreadable:
        return reference


def _shape(text: str) -> Expression:
    try:
        return plain_expression(text)
    except Unreadable:
        return Expression(text, 0, 0, (), frozenset(), frozenset(text), ())


def _parsed(text: str) -> list[object]:
    return list(
        math_verify.parse(rf"\boxed{{{text}}}", [_WHOLE_BOX], fallback_mode="no_fallback", parsing_timeout=None)
    )


def _number(text: str) -> tuple[str, str] | None:
    """A plain number as (whole, decimals), zero without a sign; a percentage is left to the library."""
    if "%" in text or "percent" in text:
        return None
    try:
        whole, decimals = read_number(text)
    except Unreadable:
        return None
    sign = "-" if whole.startswith("-") else ""
    whole = whole.lstrip("-").lstrip("0") or "0"
    return (whole if (whole, decimals) == ("0", "") else sign + whole), decimals


def _shown(number: tuple[str, str]) -> str:
    whole, decimals = number
    return f"{whole}.{decimals}" if decimals else whole
