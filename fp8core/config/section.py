"""The base of every configuration section, and pydantic's refusals as one line."""

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from fp8core.errors import UserError, did_you_mean, nearest

UserPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""A path of this machine; `~/` is the user's home folder, as in a shell."""
UserSource = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file, likewise, or a name."""


class Section(BaseModel):
    """A frozen group of settings; an unknown key or a wrong type is refused when it is read."""

    # An infinite number could not be read back from a run.json.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def choice_of(names: Collection[str], kind: str) -> AfterValidator:
    """For a name that is shipped, or a path of the user's own `kind` of code."""

    def check(name: str) -> str:
        if name not in names and re.fullmatch(r".+:[^\W\d]\w*", name) is None:
            own = f"(module:{kind} or path/to/file.py:{kind})"
            problem = f"{name} is none of {', '.join(names)}, and no {kind.lower()} of your own {own}"
            raise ValueError(problem + did_you_mean(name, names))
        return name

    return AfterValidator(check)


def suggestion(word: str, words: Iterable[str]) -> str:
    """A close match, else all that is known."""
    choices = list(words)
    if (close := nearest(word, choices)) is not None:
        return f"did you mean {close}?"
    return f"known here: {', '.join(choices)}" if choices else "none is known here"


def refusal(
    error: ValidationError,
    model: type[BaseModel],
    values: Mapping[str, Any],
    prefix: str = "",
    places: Mapping[str, str] | None = None,
) -> UserError:
    """Pydantic's errors about `values` as one line: the first mistake, where it was written, how many more there are.

    `places`: dotted key -> the file and line, or the override, that set it.
    """
    # A misspelt key also leaves its field missing: the spelling is the mistake to report.
    details = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    keys = [_key_of(item, values) for item in details]
    key = keys[0]
    first = details[0]
    place = ".".join(part for part in (prefix, key) if part)
    origin = (places or {}).get(key)
    reason = _reason(first, model)
    if first["type"] == "string_type":
        reason += "; quote it to make it a string"
    if first["type"] == "missing" and place == "pipeline":
        reason += "; a configuration has it from its base, as in `base: tiny`"
    line = (f"{place}: " if place else "") + reason
    more = len(set(keys)) - 1
    return UserError(line + (f" ({origin})" if origin else "") + (f" (and {more} more)" if more else ""))


def _key_of(error: ErrorDetails, values: Mapping[str, Any]) -> str:
    """The key as a user writes it: steps by name, without the branches of unions that pydantic adds."""
    parts: list[str] = []
    value: Any = values
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(value, list):
            value = value[part]
            parts.append(step_name(value) or str(part))
        elif isinstance(value, Mapping) and part in value:
            value = value[str(part)]
            parts.append(str(part))
    if error["type"] == "missing":
        parts.append(str(error["loc"][-1]))
    return ".".join(parts)


def step_name(item: Any) -> str | None:
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else None


def _reason(error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        word = str(error["loc"][-1])
        if elsewhere := [*places_of(model, word)]:
            return f"unknown key; did you mean {' or '.join(elsewhere)}?"
        return f"unknown key; {suggestion(word, _known_keys(model, error['loc'][:-1]))}"
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    expected = error["msg"].partition(" should ")[2] or error["msg"]
    expected = expected.replace("an object", "a mapping").replace("a valid array", "a list")
    reason = f"must {expected}, got {_value_text(error['input'])}"
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        reason += did_you_mean(error["input"], re.findall("'([^']*)'", error["ctx"]["expected"]))
    return reason


def _value_text(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _known_keys(model: type[BaseModel], section: Sequence[int | str]) -> list[str]:
    choices: list[type[BaseModel]] = []
    for part in section:
        # The name of a field, else pydantic's of a branch of its union.
        annotations = [info.annotation for name, info in model.model_fields.items() if part == (info.alias or name)]
        choices = [each for annotation in annotations for each in _models_in(annotation)] or choices
        model = next((each for each in choices if annotations or each.__name__ == part), model)
    return [info.alias or name for name, info in model.model_fields.items()]


def places_of(model: type[BaseModel], word: str, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        if word == (info.alias or name):
            yield key
        if (section := next(_models_in(info.annotation), None)) is not None:
            yield from places_of(section, word, f"{key}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
