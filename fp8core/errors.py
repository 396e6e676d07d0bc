"""The exceptions for what people can correct: their message is a line that names the place and the cure."""


class UserError(Exception):
    """A mistake in the configuration, the data, the checkpoint or the environment; shown without a traceback."""


class StoredFileError(UserError):
    """A file of a run that is missing, cannot be read, or does not hold what such a file holds: the file and field."""


def first_line(error: BaseException) -> str:
    """The first line of an error: libraries go on with hints and addresses."""
    return str(error).partition("\n")[0]


def not_unicode(text: str) -> int | None:
    """Index of the first lone surrogate, which stands for a byte that is not UTF-8; None: the text is valid."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def printable(text: str) -> str:
    """Text with its control characters, line ends and lone surrogates escaped: one line on any terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
