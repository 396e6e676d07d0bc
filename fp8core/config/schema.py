"""JSON schemas (draft 2020-12): of a configuration file, for editors, and of overrides, for who submits them.

A file may leave out whatever its base gives, and overrides everything. Rules between settings, such as two that exclude
each other, are left to loading.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from fp8core.config.run import RunConfig
from fp8core.config.section import WORD

_NULL = {"type": "null"}
_WORDS = ("title", "description", "default", "format")
_BASE = "File or shipped name that this one builds on; a file is looked for beside this one."
_EDIT_SCHEMAS: dict[str, dict[str, Any]] = {
    "replace": {
        "description": "Name of a step -> the new step.",
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/ChangedStep"},
    },
    "insert": {
        "description": "Steps to put after or before another one.",
        "anyOf": [{"$ref": "#/$defs/Insertion"}, {"type": "array", "items": {"$ref": "#/$defs/Insertion"}}],
    },
    "remove": {"description": "Names of steps to leave out.", "type": "array", "items": {"type": "string"}},
    "rewire": {
        "description": "Name of a step -> port -> the artifact it reads; null disconnects the port.",
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "string", "pattern": WORD}, _NULL]},
        },
    },
}
_INSERTION = {
    "type": "object",
    "properties": {
        "after": {"description": "Name of the step that the new one comes after.", "type": "string"},
        "before": {"description": "Name of the step that the new one comes before; or `after`.", "type": "string"},
        "step": {"$ref": "#/$defs/StepConfig"},
    },
    "required": ["step"],
    "oneOf": [{"required": ["after"]}, {"required": ["before"]}],
    "additionalProperties": False,
}


def file_schema() -> dict[str, Any]:
    schema = RunConfig.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    changed = {key: value for key, value in definitions["StepConfig"].items() if key != "required"}
    pipeline = definitions["PipelineConfig"]
    # A mapping over the list of steps below merges into the steps of those names.
    by_name = {"type": "object", "additionalProperties": {"$ref": "#/$defs/ChangedStep"}}
    steps = pipeline["properties"]["steps"]
    described = {"description": steps.pop("description")}
    pipeline["properties"]["steps"] = {**described, "anyOf": [steps, by_name]}
    pipeline["properties"] |= _EDIT_SCHEMAS
    definitions |= {"ChangedStep": {**changed, "title": "ChangedStep"}, "Insertion": _INSERTION}
    for layered in (schema, pipeline):
        del layered["required"]
    schema["properties"] = {
        "base": {"description": _BASE, "type": "string", "pattern": "^[^#]*$"},
        **schema["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "fp8-grpo run"}


class Place:
    """The values that a file may have at a place, by its schema."""

    def __init__(self, schemas: Iterable[Mapping[str, Any]], definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._options = [option for schema in schemas for option in _alternatives(schema, definitions)]
        texts = [option for option in self._options if option.get("type") == "string" and "enum" not in option]
        self._patterns = [option.get("pattern", "") for option in texts]
        self.is_open = {} in self._options
        self.is_text = bool(texts) and not self.is_open
        self.is_nullable = _NULL in self._options

    def at(self, key: str) -> "Place | None":
        """The place of a key; of an item with that name, in a list; None: there is none."""
        return self._below(
            option.get("properties", {}).get(key, option.get("items", option.get("additionalProperties")))
            for option in self._options
        )

    def item(self) -> "Place | None":
        return self._below(option.get("items") for option in self._options)

    def fits(self, text: str) -> bool:
        return self.is_open or any(re.search(pattern, text) for pattern in self._patterns)

    def _below(self, found: Iterable[Any]) -> "Place | None":
        schemas = [
            {} if schema is True else schema for schema in found if isinstance(schema, Mapping) or schema is True
        ]
        return self if self.is_open else Place(schemas, self._definitions) if schemas else None


@cache
def whole_file() -> Place:
    schema = file_schema()
    return Place([schema], schema["$defs"])


def _alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    schema = _resolved(schema, definitions)
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _alternatives(option, definitions)
    else:
        yield {key: value for key, value in schema.items() if key not in _WORDS}


def override_schema() -> dict[str, Any]:
    """The schema of overrides as a mapping: a key is a section or a dotted path, and its value has type and bounds.

    Nothing in it refers to a definition or describes, as it becomes a part of other schemas. Below an open mapping,
    such as the options of a verifier, every key is allowed.
    """
    schema = file_schema()
    del schema["properties"]["base"]
    settings = _layer(schema, schema["$defs"])
    paths = dict(_paths(settings, ""))
    opened = sorted(path for path, value in paths.items() if _is_open(value))
    return {
        "type": "object",
        "properties": paths,
        "patternProperties": {rf"^({'|'.join(map(re.escape, opened))})\.": {}},
        # Beside a pattern it is refused in fewer words than by `additionalProperties`, which would quote the pattern.
        "unevaluatedProperties": False,
    }


def whole(pattern: str) -> str:
    """A pattern that ends with `$`, for a JSON schema: in Python, and so in Prefect's server, that allows a newline."""
    return rf"{pattern}(?!\n)"


def _layer(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a value that is merged into the one below it: a section may leave out every key."""
    node = _resolved(node, definitions)
    options = [option for option in node.get("anyOf", []) if option != _NULL]
    if len(options) == 1:
        return {"anyOf": [_layer(options[0], definitions), _NULL]}
    if "properties" in node:
        inner = {key: _layer(value, definitions) for key, value in node["properties"].items()}
        return {"type": "object", "properties": inner, "additionalProperties": False}
    inlined: dict[str, Any] = _inlined(node, definitions)
    return inlined


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, Mapping):
        return node
    kept = {key: value for key, value in _resolved(node, definitions).items() if key not in _WORDS}
    if isinstance(kept.get("pattern"), str):
        kept["pattern"] = whole(kept["pattern"])
    return {
        key: {name: _inlined(inner, definitions) for name, inner in value.items()}
        if key == "properties"
        else _inlined(value, definitions)
        for key, value in kept.items()
    }


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    return found


def _paths(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in section["properties"].items():
        yield prefix + key, value
        options = [option for option in value.get("anyOf", [value]) if option != _NULL]
        if len(options) == 1 and "properties" in options[0]:
            yield from _paths(options[0], f"{prefix}{key}.")


def _is_open(value: Mapping[str, Any]) -> bool:
    options = value.get("anyOf", [value])
    return any(option.get("type") == "object" and option.get("additionalProperties") is not False for option in options)
