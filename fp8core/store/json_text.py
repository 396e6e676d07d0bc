"""The JSON of stored files: canonical text, checked reading, ranges of numbers, and differences of values."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, JsonValue, ValidationError
from pydantic_core import from_json

from fp8core.errors import StoredFileError, UserError, printable

_MAX_CHARACTERS = 80
_SHOWN_DIGITS = 16

_Model = TypeVar("_Model", bound=BaseModel)


def canonical_json(value: Any, name: str) -> bytes:
    """JSON with one spelling for one value. Raises UserError: NaN or infinity, with its path of keys; TypeError."""
    _check_json(value, name)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_json(data: bytes, place: object) -> Any:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise StoredFileError(f"{place}: not JSON: {error}") from error


def parse_model(data: bytes, model: type[_Model], place: object) -> _Model:
    """Raises StoredFileError: `place: field: problem`."""
    try:
        return model.model_validate(parse_json(data, place))
    except ValidationError as error:
        raise StoredFileError(f"{place}: {mistake(error)}") from error


def mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    parts = [printable(part)[:_MAX_CHARACTERS] for part in (field, first["msg"]) if part]
    more = error.error_count() - 1
    return ": ".join(parts) + (f" (and {more} more)" if more else "")


@dataclass(frozen=True)
class Difference:
    """`path`: such as `outputs.train.next_policy`; None: absent."""

    path: str
    ours: JsonValue
    theirs: JsonValue

    def __str__(self) -> str:
        return f"{self.path}: {value_text(self.ours)} against {value_text(self.theirs)}"

    def change(self, above: str) -> str:
        key = self.path.removeprefix(above).removeprefix(".")
        return f"{key} {value_text(self.ours)} -> {value_text(self.theirs)}".strip()


def value_differences(path: str, ours: JsonValue, theirs: JsonValue) -> Iterator[Difference]:
    """Lists of different lengths are leaves."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from value_differences(f"{path}.{key}", ours.get(key), theirs.get(key))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            yield from value_differences(f"{path}[{i}]", left, right)
    elif ours != theirs:
        yield Difference(path, ours, theirs)


def value_text(value: JsonValue) -> str:
    match value:
        case None:
            return "absent"
        case {"digest": str(digest), "size": int(size)}:
            return f"{digest[:_SHOWN_DIGITS]} ({size} bytes)"
        case str() if len(value) == 64:
            return value[:_SHOWN_DIGITS]
        case _:
            return str(value)


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} is {value}: JSON has no such number")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is not a string")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]")


StepNumber = Annotated[int, Field(ge=0, description="Number of the step; 0 precedes the first iteration.")]
UnixSeconds = Annotated[float, Field(ge=0)]
UnixMilliseconds = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
