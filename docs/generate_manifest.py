"""Write what docs/reference/manifest.md takes from the models: its tables, and the JSON schemas in docs/schemas/.

    python docs/generate_manifest.py

A test fails where they are out of date. A change of what a manifest holds needs a new schema version first. The schema
file of a version that runs were made with must stay as it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from fp8core.store.artifacts import Ref
from fp8core.store.deletion_log import Deletion
from fp8core.store.ledger import BoundEntry, CheckpointEntry, Entry, RedoEntry, SegmentEntry, StepEntry, TaskEntry
from fp8core.store.manifest import Content, Signature, StepManifest, StepObservations, StepRecord
from fp8core.store.run_directory import RunDescription

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "manifest.md"
_VERSION = StepManifest.model_fields["schema_version"].default
_MODELS: dict[str, type[BaseModel]] = {
    "manifest": StepManifest,
    "record": StepRecord,
    "content": Content,
    "observed": StepObservations,
    "task": TaskEntry,
    "step": StepEntry,
    "checkpoint": CheckpointEntry,
    "segment": SegmentEntry,
    "redo": RedoEntry,
    "bound": BoundEntry,
    "ref": Ref,
    "tombstone": Deletion,
    "signature": Signature,
    "run": RunDescription,
}
_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}


def main() -> None:
    PAGE.write_text(rewritten(PAGE.read_text(), tables()))
    for path, text in schemas().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def tables() -> dict[str, str]:
    """The Markdown between each pair of markers."""
    return {name: table(model) for name, model in _MODELS.items()}


def schemas() -> dict[Path, str]:
    """The schema files and what they hold."""
    entry: TypeAdapter[Entry] = TypeAdapter(Entry)
    content = {
        f"manifest-{_VERSION}.json": StepManifest.model_json_schema(),
        "ledger.json": entry.json_schema(),
        "tombstone.json": Deletion.model_json_schema(),
    }
    return {DOCS / "schemas" / name: json.dumps(schema, indent=2) + "\n" for name, schema in content.items()}


def table(model: type[BaseModel]) -> str:
    """A row for each field. Raises ValueError when a field does not say what it means."""
    rows = ["| field | type | meaning |", "| --- | --- | --- |"]
    for name, field in model.model_fields.items():
        meaning = field.description or ("What kind of line this is." if name == "event" else None)
        if meaning is None:
            raise ValueError(f"{model.__name__}.{name} has no description")
        rows.append(f"| `{name}` | {type_name(field.annotation)} | {meaning} |")
    return "\n".join(rows)


def type_name(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is dict:
        return f"map of {type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"`{annotation.__name__}`"
    return _NAMES.get(annotation, "any")


def rewritten(page: str, parts: Mapping[str, str]) -> str:
    """The page with the text between the markers of each part replaced; each pair must occur exactly once."""
    for name, text in parts.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{PAGE.name}: the markers of {name} must occur once")
        before, after = page.partition(begin)[0], page.partition(end)[2]
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    main()
