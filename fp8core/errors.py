"""The exceptions for what people can correct, and the form in which text of others may be shown or stored.

The message of an exception is a line that names the place and the cure.
"""

import re
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

Kind = TypeVar("Kind", bound=BaseException)


class UserError(Exception):
    """A mistake in the configuration, the data, the checkpoint or the environment; shown without a traceback."""


class StoredFileError(UserError):
    """A file of a run that is missing, cannot be read, or does not hold what such a file holds: the file and field."""


class ProcessLost(RuntimeError):
    """A process that a run started ended before the run did."""


class EngineLost(ProcessLost):
    """A process of an engine's own ended; the engine is of no use any more."""


class MemberLost(ProcessLost):
    """A process of a run on a cluster ended, or its node did; the message names it."""


class NotRecordedError(RuntimeError):
    """A replay needs an answer that the run has not recorded; the message names the episode in words."""


class InvalidReply(ValueError):
    """Code of the user returned what is no answer, of whatever it was asked."""

    @classmethod
    def read(cls, described: str) -> str | None:
        """The message in a line of `described_error`; None where that is of another error."""
        name, _, message = described.partition(": ")
        return message if name == cls.__name__ else None


def behind(error: BaseException, kind: type[Kind]) -> Kind | None:
    """The first error of a kind among an error and its causes: a task may run another again, whose error is its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__
    return cause


def refuse(messages: Iterable[str]) -> None:
    """Raise UserError with all messages in one line; none pass."""
    if lines := list(messages):
        raise UserError("; also ".join(lines))


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The known word of the closest spelling, else the only one that begins so; None: there is none."""
    choices = list(words)
    longer = [choice for choice in choices if word and choice.startswith(word)]
    matches = get_close_matches(word, choices, n=1) or (longer if len(longer) == 1 else [])
    return matches[0] if matches else None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The end of a message about an unknown word: `; did you mean WORD?`, or nothing."""
    match = nearest(word, words)
    return "" if match is None else f"; did you mean {match}?"


def first_line(error: BaseException) -> str:
    """The first line of an error: libraries go on with hints, addresses and lists."""
    return str(error).partition("\n")[0].rstrip(" :")


_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b")


def last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or lines or ["it said nothing"])[-1]


def whole_characters(text: str) -> str:
    """The text with halves of surrogate pairs as escapes: no tokenizer and no table holds them."""
    return text.encode("utf-8", "backslashreplace").decode()


def described_error(error: BaseException, file: str | None = None) -> str:
    """An exception in a line: the last line of `file` that it came through, its type and its first line."""
    passed = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{Path(file).name}:{passed[-1]}: " if file is not None and passed else ""
    return f"{where}{type(error).__name__}: {first_line(error)}"


def printable(text: str) -> str:
    """One line for any terminal: passwords masked; control characters, line ends and lone surrogates escaped."""
    safe_text = without_passwords(text)
    if safe_text.isprintable():
        return safe_text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in safe_text)


def printable_lines(text: str) -> str:
    """As `printable`, of a text of several lines: its line feeds and tabs stay."""
    return "".join(part if part in "\n\t" else printable(part) for part in re.split("([\n\t])", text))


# A user's name, a password that may hold any character but a blank, and the host; a web address may have a token alone.
_PASSWORD = re.compile(r"(://[^\s:/?#@]*):\S*@")
_TOKEN = re.compile(r"(https?://)[^\s:/?#@]+@")
# `odbc_connect` holds a whole connection string.
_PARAMETER = re.compile(r"(?i)([?&][\w.-]*(?:password|passwd|pwd|secret|token|api_?key|odbc_connect)=)[^\s&]*")
_MASK = "***"


def without_passwords(text: str) -> str:
    """Text with the passwords and tokens of all addresses in it masked."""
    result = _TOKEN.sub(rf"\1{_MASK}@", _PASSWORD.sub(rf"\1:{_MASK}@", text))
    return _PARAMETER.sub(rf"\1{_MASK}", result)
