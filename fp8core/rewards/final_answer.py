r"""The final answer of a completion: what its last `####` or `\boxed{...}` announces.

After `####` it is the whole rest of the line. A box counts where the words around it leave its value as it is. Before
it stands nothing, a word, a dash after a word, or what ends in `=`, a colon or an arrow. After it, up to the end of
the sentence, stand a unit or words, and no digit or symbol. No word may deny, alter or doubt the value (`wording`). No
later sentence may begin with a retraction. A tag of a format, such as `</answer>`, ends a sentence.

Characters are known by their Unicode category and name, so that the rule is the same in every script.
"""

import re
import unicodedata
from functools import lru_cache

from fp8core.rewards.integer import CLOSING_TAG, MARKER, OPENING_TAG, Unreadable, is_unit, without_tags
from fp8core.rewards.wording import HARMLESS, is_altered, is_altered_after, is_denied, is_retraction, words_of

MAX_ANSWER_CHARACTERS = 400
_NEAR = 2 * MAX_ANSWER_CHARACTERS

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
_MARKUP = r"[ \t\r$*_`&\"]|\\[$()\[\],;:! ]|\\\\|\\(?:quad|qquad|displaystyle)(?![A-Za-z])|\\(?:begin|end)\{[a-z]+\*?\}"
# Runs are tried from their beginning alone: spaces are cheap to write.
_MARKUP_AT_END = re.compile(rf"(?<![ \t\r$*_`&\"])(?:{_MARKUP})+\Z")
_CLAUSE_END = re.compile(
    r"[。，；：？](?!0)|[.?!,;:](?=[\s*$\"])|\b(?:so|thus|hence|therefore|then|but)\b|所以|因此", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"。(?!0)|\.(?=[\s$*_`)\\\]\"。]|\Z)")
_LEADS_TO = re.compile(
    r"(?:(?<![<>!=:/])(?<!\\not)(?<!\\not )=|[:→]|\\(?:therefore|implies|[Rr]ightarrow|[Ll]ongrightarrow|to))\Z"
)
_WORD_AT_END = re.compile(r"(?:\A|[\s*_$\"'(}—]|(?<=[^\W\d_]{2})-)([^\W\d_]+)\Z")
_DASH_AT_END = re.compile(r"(?<=\S)(?: *—+| +–)\Z")
_DASH_BETWEEN = re.compile(r"(?<=\s)[–-](?=\s)")
_LIST_OF_NUMBERS = re.compile(r"[^\w=]*0(?:[^\w=]|0)*\Z")
_LETTER_JOINT = re.compile(r"(?<=[^\W\d_])[.-](?=[^\W\d_])")
_CONJUNCTIONS = frozenset("aeiouyzwkvs")
_MULTIPLIERS = frozenset("십백천만억조十")
_PUNCTUATION = {
    "SEMICOLON": "；", "COLON": "：", "COMMA": "，", "QUESTION": "？", "FULL STOP": "。", "DANDA": "。",
    "EXCLAMATION": "。", "ELLIPSIS": "... ", "EM DASH": "—", "HORIZONTAL BAR": "—", "EN DASH": "–", "HYPHEN": "-",
    "WORDSPACE": " ", "ANGLE": '"', "SINGLE": "'", "QUOTATION": '"', "BRACKET": '"', "PARENTHESIS": '"',
}  # fmt: skip


def final_answer(completion: str) -> str:
    r"""The text of the last announcement: what is in the box, or the rest of the line after `####`.

    Raises Unreadable: there is none, it is too long, or what stands around the box may change it.
    """
    marker = completion.rfind(MARKER)
    announced = max(marker, completion.rfind(r"\boxed"), completion.rfind(r"\fbox"))
    if announced < 0:
        raise Unreadable(rf"no {MARKER} and no \boxed")
    if marker <= completion.rfind("\n", 0, announced):
        return _boxed(completion[max(0, announced - _NEAR) :], alone=False)
    line = completion[marker + len(MARKER) :].partition("\n")[0]
    if len(line) > MAX_ANSWER_CHARACTERS:
        raise Unreadable(f"more than {MAX_ANSWER_CHARACTERS} characters after {MARKER}")
    return _boxed(line, alone=True) if _BOX.search(line) else plain_answer(without_tags(line))


def plain_answer(text: str) -> str:
    """An answer with the digits and the punctuation of ASCII, and without marks of direction at its ends."""
    text = "".join(map(_ascii, text.strip("\u200e\u200f\u061c\u2066\u2067\u2068\u2069")))
    return text.rstrip("。۔। ")


@lru_cache(maxsize=4096)
def _ascii(character: str) -> str:
    if character.isascii():
        return character
    if character.isdecimal() or character.isspace():
        return str(unicodedata.decimal(character, " "))
    if unicodedata.east_asian_width(character) == "F":
        return unicodedata.normalize("NFKC", character)
    return {"،": ",", "、": ",", "؛": ";", "٫": ".", "٬": ",", "٪": "%"}.get(character, character)


def _boxed(text: str, *, alone: bool) -> str:
    """The content of the last box of `text`; `alone` refuses words before it."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        raise Unreadable("no box")
    before, rest = text[: boxes[-1].start()], text[boxes[-1].end() :][: MAX_ANSWER_CHARACTERS + _NEAR]
    if _BOX.search(before.rpartition("\n")[2]):
        raise Unreadable("several boxes on one line")
    inside, after = _braced(rest)
    _refuse_before(_plain(before), alone)
    unit = _unit_after(_plain(after))
    return plain_answer(rf"{inside}\%" if unit == "%" and "%" not in inside else inside)


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


def _plain(text: str) -> str:
    """Text around a box in few characters: letters, 0 for any digit, one sign for each kind of punctuation."""
    text = OPENING_TAG.sub(" ", CLOSING_TAG.sub("。 ", text)).replace(r"\%", "%")
    signs: list[str] = []
    for character in unicodedata.normalize("NFC", _TEXT.sub(r" \1 ", text)):
        # A mark that is on no letter may strike out a number.
        struck = unicodedata.category(character)[0] == "M" and not (signs and _is_letter(signs[-1][-1:]))
        signs.append("^" if struck else _sign(character))
    return "".join(signs)


@lru_cache(maxsize=4096)
def _sign(character: str) -> str:
    category, name = unicodedata.category(character), unicodedata.name(character, "")
    if category[0] == "N":
        return "0"
    if character in "\n\t\r" or (category[0] != "C" and character.isascii()):
        return character
    if category[0] == "C":
        # Formats are invisible, save those that turn text around.
        return "" if category == "Cf" and unicodedata.bidirectional(character) not in ("LRO", "RLO") else "^"
    if category[0] == "Z":
        return " "
    if name.startswith("RIGHTWARDS") or name == "THEREFORE":
        return "→"
    plain = unicodedata.normalize("NFKC", character)
    if category[0] == "P" and plain != ".":
        return next((sign for part, sign in _PUNCTUATION.items() if part in name), character)
    return plain if plain.isascii() else character


def _is_letter(character: str) -> bool:
    return character != "" and unicodedata.category(character)[0] in "LM"


def _has_case(character: str) -> bool:
    """False in scripts without capitals, where words may touch a number."""
    return character.lower() != character.upper()


def _refuse_before(before: str, alone: bool) -> None:
    *earlier, line = before.split("\n")
    line = re.sub(r"\A\s*#+ ", "", line)
    clause = _last_clause(line)
    if is_denied(clause):
        raise Unreadable("a denial before the box")
    lead = _MARKUP_AT_END.sub("", clause)
    if alone and _MARKUP_AT_END.sub("", line):
        raise Unreadable("text before the box")
    if lead:
        _refuse_lead(lead, apart=len(lead) < len(clause))
    elif _LIST_OF_NUMBERS.match(line) and _MARKUP_AT_END.sub("", line)[-1] in ",，":
        raise Unreadable("several answers")
    elif not _MARKUP_AT_END.sub("", line):
        above = _last_clause(next(filter(str.strip, (_MARKUP_AT_END.sub("", one) for one in reversed(earlier))), ""))
        if is_denied(above) or (_is_letter(above[-1:]) and is_altered_after(above)):
            raise Unreadable("a denial above the box")


def _last_clause(text: str) -> str:
    return text[max((end.end() for end in _CLAUSE_END.finditer(text)), default=0) :]


def _refuse_lead(lead: str, apart: bool) -> None:
    """Refuse what stands before the box, unless it ends in a word or leads to the box."""
    if _LEADS_TO.search(lead):
        return
    lead = _DASH_AT_END.sub("", lead)
    if _is_letter(lead[-1]) and not _has_case(lead[-1]):
        named = True
    else:
        word = _WORD_AT_END.search(lead)
        named = apart and word is not None and (word[1] in "aAI" or not _is_variable(word[1]))
    if not named or is_altered_after(lead):
        raise Unreadable("what stands before the box may change it")


def _is_variable(word: str) -> bool:
    """True for a single letter of ASCII or Greek."""
    return len(word) == 1 and (word.isascii() or unicodedata.name(word).startswith("GREEK"))


def keeps_value(phrase: str) -> bool:
    """True if a phrase right after a number leaves its value as it is."""
    try:
        _unit_after(phrase)
    except Unreadable:
        return False
    return True


def _unit_after(after: str) -> str:
    """The text between the box and the first pause. Raises Unreadable where something after it may change it."""
    line, _, below = after.partition("\n")
    sentence, *later = _SENTENCE_END.split(line)
    clause = _DASH_BETWEEN.sub("—", re.sub(_MARKUP, " ", sentence))
    pause = re.search(r"[,，;；:：(—]|\Z", clause)
    assert pause is not None  # At its end at the latest.
    head, tail = clause[: pause.start()].strip(), clause[pause.start() :]
    if head and not is_unit(head, money=False):
        _refuse_head(head, sentence[:1])
        tail = head + tail
    _refuse_words(tail)
    if any(is_retraction(one) for one in (*later, *below.split("\n"))):
        raise Unreadable("a retraction after the box")
    return head


def _refuse_head(head: str, touching: str) -> None:
    """Refuse what binds to the number: letters that touch it, a letter, or one word that is no unit."""
    words = words_of(head)
    if (touching.isascii() and touching.isalpha()) or touching == "-" or head[0] in _MULTIPLIERS:
        named = False
    elif head[0] == "'":
        named = _is_letter(head[1:2])
    elif len(words) == 1 and words[0].isascii():
        named = words[0] in HARMLESS
    else:
        named = bool(words) and (len(words[0]) > 1 or not _has_case(words[0]))
    if not named:
        raise Unreadable("what stands after the box may change it")


def _refuse_words(text: str) -> None:
    """Refuse all but words that leave the number before them as it is."""
    words = words_of(text)
    signs = {sign for sign in _LETTER_JOINT.sub("", text) if not _is_letter(sign)}
    letters = [word for word in words if _is_variable(word)]
    if (
        signs - set(" ,，;；:：()—'")
        or text.count("(") != text.count(")")
        or any(letter not in _CONJUNCTIONS for letter in letters)
        or letters == words != []
        or is_altered(text)
    ):
        raise Unreadable("what stands after the box may change it")
