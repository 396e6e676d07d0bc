"""JSON files that a user names and a command reads."""

import json
from pathlib import Path
from typing import Any

from fp8core.errors import UserError

_KINDS = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list",
    dict: "an object",
}  # fmt: skip


def json_kind(value: object) -> str:
    """Name of a value's type in JSON; of another type, as a dataset of the hub may have, its name in Python."""
    return next((_KINDS[kind] for kind in type(value).__mro__ if kind in _KINDS), type(value).__name__)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a missing, unreadable or malformed file is a UserError that names it."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise UserError(f"{path}: line {error.lineno}, column {error.colno}: not JSON: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {json_kind(content)}")
    return content
