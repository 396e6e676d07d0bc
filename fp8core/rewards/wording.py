"""Words that deny, alter or doubt the number beside them, in the languages of wording.toml."""

import re
import tomllib
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_BEGINNING = re.compile(r"[\s$*_\"'(]*([^\d\n.!,;:。，；：—]{1,24}?)\s*(?:[-.!,;:。，；：—0]|\Z)")
# Kilograms and kilometres are no thousands.
_THOUSAND_IN_UNIT = re.compile("千(?=[克米瓦])")
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI")


class _Wording(NamedTuple):
    words: frozenset[str]
    stems: tuple[str, ...]
    parts: tuple[str, ...]

    def holds(self, word: str) -> bool:
        return word in self.words or word.startswith(self.stems)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, of any script."""
    return "".join(map(_of_word, unicodedata.normalize("NFC", text).casefold())).split()


def is_denied(text: str) -> bool:
    """True if a word of the text denies."""
    return _has(_DENIED, words_of(text))


def is_altered(text: str) -> bool:
    """True if a word of the text denies, alters or doubts the number before it."""
    return _has(_ALTERED, words_of(text))


def is_altered_after(text: str) -> bool:
    """True if the last word of the text alters or doubts the number that follows."""
    words = words_of(text)
    while words and words[-1] in _PARTICLES:
        words.pop()
    return bool(words) and (_ALTERING.holds(words[-1]) or f" {' '.join(words)}".endswith(_ALTERING.parts))


def is_retraction(text: str) -> bool:
    """True if the text begins with a word that takes back what was said before: `No, 6`, `Wait, ...`, `Not 5`."""
    beginning = _BEGINNING.match(text)
    words = words_of(beginning[1]) if beginning else []
    return bool(words) and all(_has(_RETRACTED, [word]) for word in words)


def _has(wording: _Wording, words: list[str]) -> bool:
    text = _THOUSAND_IN_UNIT.sub("", f" {' '.join(words)} ")
    return any(wording.holds(word) or word.endswith("n't") for word in words) or any(
        part in text for part in wording.parts
    )


def _wording(*lists: str) -> _Wording:
    entries = unicodedata.normalize("NFC", " ".join(lists)).casefold().split()
    parts = [entry for entry in entries if unicodedata.name(entry[0]).startswith(_UNSPACED)]
    phrases = [f" {entry} " for entry in entries if "_" in entry and entry not in parts]
    return _Wording(
        words=frozenset(entries) - {*parts},
        stems=tuple(entry.rstrip("*") for entry in entries if entry.endswith("*")),
        parts=tuple(part.replace("_", " ") for part in (*parts, *phrases)),
    )


@lru_cache(maxsize=4096)
def _of_word(character: str) -> str:
    if character in "'\N{RIGHT SINGLE QUOTATION MARK}":
        return "'"
    return character if unicodedata.category(character)[0] in "LM" else " "


_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_DENIED = _wording(_LISTS["denials"])
_ALTERED = _wording(_LISTS["denials"], _LISTS["alterations"], _LISTS["doubts"])
_RETRACTED = _wording(_LISTS["denials"], _LISTS["retractions"])
_ALTERING = _wording(_LISTS["denials"], _LISTS["alterations"], _LISTS["doubts"], _LISTS["leading"])
_PARTICLES = frozenset(_LISTS["particles"].split())
HARMLESS = frozenset(_LISTS["harmless"].split())
