"""Types of the flows' parameters, with the schemas by which a server checks them at submission."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from fp8core.config.load import BARE_NAME, shipped_names
from fp8core.config.run import RUN_NAME
from fp8core.config.schema import override_schema

# With `properties` of its own the mapping would be a form of 200 fields in Prefect's UI; now it is one field for JSON.
_CHECKED = {"anyOf": [{"type": "object"}, {"type": "null"}], "if": {"type": "object"}, "then": override_schema()}
FlowOverrides = Annotated[dict[str, Any] | list[str] | None, WithJsonSchema(_CHECKED)]
"""Overrides of a flow. A server takes them as a mapping, and refuses a wrong name, type or bound at submission."""

_BARE = {"type": "string", "pattern": BARE_NAME}
_NAMED: dict[str, Any] = {"if": _BARE, "then": {"enum": shipped_names()}}
ConfigName = Annotated[str, WithJsonSchema({"type": "string", **_NAMED})]
OptionalConfigName = Annotated[str | None, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}], **_NAMED})]
"""Configuration of a flow. A server refuses a bare name that is not shipped; the worker alone can look for a path."""
RunName = Annotated[str, Field(max_length=120, pattern=RUN_NAME)]
ParityName = Annotated[RunName, Field(max_length=80)]
