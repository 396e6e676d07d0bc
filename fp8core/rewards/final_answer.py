r"""The final answer of a completion: what its last `####` or `\boxed{...}` announces.

After `####` it is the whole rest of the line; of a box it is the content. A box must stand alone on its line, and be no
part of a larger expression: `-\boxed{18}` and `\boxed{18}^2` are other numbers. Words around it do not matter.
"""

import re
import unicodedata

MARKER = "####"
MAX_CHARACTERS = 400

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_OPERATORS = r"cdot|times|div|pm|mp|ne|neq|le|leq|lt|ge|geq|gt|approx"
_JOINED_BEFORE = re.compile(
    rf"(?:[-+*/^_<>±≠−×÷][ $]*|\d|\\(?:sqrt|[dt]?frac|{_OPERATORS})(?:\{{[^{{}}]*\}}|\[[^][]*\])?\s*)\{{?\Z"
)
_JOINED_AFTER = re.compile(rf"[ $]*(?:[\^!/_×÷]|\*(?!\*)|[-+−]\s*[\d\\]|\\(?:{_OPERATORS})(?![A-Za-z]))|\d|\s*\{{")
# Tags that strike out, raise or lower their content are none of a format.
_OPENING_TAG = r"<(?!(?:s|del|strike|su[bp])>)[A-Za-z][\w-]{0,30}>"
_CLOSING_TAG = r"(?:</(?!(?:s|del|strike|su[bp])>)[A-Za-z][\w-]{0,30}>|<[|｜][^<>\n]{1,40}[|｜]>)"
_TAGS_AROUND = re.compile(rf"\A(?:\s*{_OPENING_TAG})+|(?:{_CLOSING_TAG}\s*)+\Z")
_NO_VALUE = re.compile(rf"\A\s*[-*+] |{_OPENING_TAG}|\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{{[^{{}}]*\}}")


class Unreadable(Exception):
    """No answer can be read; the message gives the reason."""


def final_answer(completion: str) -> str:
    """Raises Unreadable: there is none, it is too long, or the box is part of a larger expression."""
    marker = completion.rfind(MARKER)
    start = max(marker, completion.rfind(r"\boxed"), completion.rfind(r"\fbox"))
    if start < 0:
        raise Unreadable(rf"no {MARKER} and no \boxed")
    line_start = completion.rfind("\n", 0, start) + 1
    if marker < line_start:
        return _box_content(completion[line_start:start], completion[start:])
    line = completion[marker + len(MARKER) :].partition("\n")[0]
    if len(line) > MAX_CHARACTERS:
        raise Unreadable(f"more than {MAX_CHARACTERS} characters after {MARKER}")
    box = _BOX.search(line)
    return plain_answer(line) if box is None else _box_content(line[: box.start()], line[box.start() :])


def plain_answer(text: str) -> str:
    """An answer without tags of a format around it, and with the digits of ASCII."""
    text = _TAGS_AROUND.sub("", text)
    return "".join(str(unicodedata.decimal(character, character)) for character in text).strip()


def _box_content(before: str, text: str) -> str:
    """The content of the box that begins `text`; `before` is what precedes it on its line."""
    box = _BOX.match(text)
    if box is None:
        raise Unreadable("no box")
    if _BOX.search(before) or _BOX.search(text.partition("\n")[0], box.end()):
        raise Unreadable("several boxes on one line")
    inside, after = _brace_content(text[box.end() :][: 2 * MAX_CHARACTERS])
    if _JOINED_BEFORE.search(_NO_VALUE.sub("", before[-MAX_CHARACTERS:])) or _JOINED_AFTER.match(after):
        raise Unreadable("a box that is part of a larger expression")
    return plain_answer(inside)


def _brace_content(text: str) -> tuple[str, str]:
    """The text in the braces that open `text`, and the text that follows them."""
    depth = 0
    for brace in _BRACE.finditer(text):
        if depth == 0 and (brace[0] != "{" or text[: brace.start()].strip()):
            break
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            inside = text[text.index("{") + 1 : brace.start()]
            if len(inside) > MAX_CHARACTERS:
                break
            return inside, text[brace.end() :]
    raise Unreadable(f"a box that does not close within {MAX_CHARACTERS} characters")
