"""The JSON schema (draft 2020-12) of a configuration file, for editors.

A file may leave out whatever its base gives, and overrides everything. Rules between settings, such as two that exclude
each other, are left to loading.
"""

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
