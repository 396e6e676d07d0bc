"""Rows of .jsonl and .jsonl.gz files: one JSON object a line, as GSM8K is published."""

import gzip
import json
import zlib
from pathlib import Path

from fp8core.data.prompt import Problem
from fp8core.data.rows import problem_from_row
from fp8core.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz")


def read_jsonl(path: Path, question_field: str, answer_field: str) -> list[Problem]:
    """Every row in file order; blank lines are skipped.

    Raises UserError with `file:line` on a line that is no row, and with the file when it has none or cannot be read.
    """
    # Split at line feeds alone: JSON text may hold other line separators.
    lines = enumerate(_content(path).split(b"\n"), start=1)
    places = ((f"{path}:{number}", line) for number, line in lines if line.strip())
    fields = question_field, answer_field
    rows = [problem_from_row(_parse(line, place), *fields, place) for place, line in places]
    if not rows:
        raise UserError(f"{path}: the file has no rows")
    return rows


def _content(path: Path) -> bytes:
    """The whole file, so that a damaged one is known by its checksum before any line is believed."""
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: only {' and '.join(SUFFIXES)} files are read")
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip data ({error})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _parse(line: bytes, place: str) -> object:
    try:
        row: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: JSON beyond limits (a number of thousands of digits, or nested too deep)") from error
    return row
