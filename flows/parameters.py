"""Types of the flows' parameters."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from fp8core.config.run import RUN_NAME

FlowOverrides = Annotated[
    dict[str, Any] | list[str] | None, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
]
"""Overrides of a flow, which a server takes as a mapping."""
RunName = Annotated[str, Field(max_length=120, pattern=RUN_NAME)]
ParityName = Annotated[RunName, Field(max_length=80)]
