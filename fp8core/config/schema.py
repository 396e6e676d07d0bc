"""JSON schemas (draft 2020-12): of a configuration file, for editors, and of overrides, for who submits them.

A file may leave out whatever its base gives, and overrides everything. Rules between settings, such as two that exclude
each other, are left to loading.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fp8core.config.run import RunConfig

_NULL = {"type": "null"}
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
        "additionalProperties": {"type": "object", "additionalProperties": {"anyOf": [{"type": "string"}, _NULL]}},
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
    schema["properties"] = {"base": {"description": _BASE, "type": "string"}, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "fp8-grpo run"}


def override_schema() -> dict[str, Any]:
    """The schema of overrides as a mapping: a key is a section or a dotted path, and its value has type and bounds.

    Nothing in it refers to a definition or describes, as it becomes a part of other schemas. Below an open mapping,
    such as the options of a verifier, every key is allowed.
    """
    schema = file_schema()
    del schema["properties"]["base"]
    paths = dict(_paths(_inlined(schema, schema["$defs"]), ""))
    opened = sorted(path for path, value in paths.items() if _is_open(value))
    return {
        "type": "object",
        "properties": paths,
        "patternProperties": {rf"^({'|'.join(map(re.escape, opened))})\.": {}},
        # Beside a pattern it is refused in fewer words than by `additionalProperties`, which would quote the pattern.
        "unevaluatedProperties": False,
    }


# A section that is merged into the one below may leave out every key.
_DROPPED = ("title", "description", "default", "format", "required", "oneOf", "$defs")


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    return {
        key: {name: _inlined(inner, definitions) for name, inner in value.items()}
        if key == "properties"
        else _inlined(value, definitions)
        for key, value in node.items()
        if key not in _DROPPED
    }


def _paths(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in section["properties"].items():
        yield prefix + key, value
        options = [option for option in value.get("anyOf", [value]) if option != _NULL]
        if len(options) == 1 and "properties" in options[0]:
            yield from _paths(options[0], f"{prefix}{key}.")


def _is_open(value: Mapping[str, Any]) -> bool:
    options = value.get("anyOf", [value])
    return any(option.get("type") == "object" and option.get("additionalProperties") is not False for option in options)
