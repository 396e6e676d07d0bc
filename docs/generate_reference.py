"""Write the pages of docs/reference/ and the JSON schemas of docs/schemas/ from the code.

    python docs/generate_reference.py

config.md comes from the models of the configuration, cli.md from the parser. The tables of manifest.md and the schemas
come from the models of a run's files, the lists of metrics from their declarations.
A test fails where one of them is out of date.

A change of what a manifest holds needs a new schema version first. The schema file of a version that runs were made
with must stay as it is.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from flows.cli.commands import build_parser
from flows.tracking.backlog import CORE
from fp8core.config.reward import OPTIONS
from fp8core.config.run import RunConfig
from fp8core.metric import Metric
from fp8core.metrics.registry import GROUPS
from fp8core.rl.correction import PRESETS
from fp8core.store.ledger import Entry
from fp8core.store.manifest import StepManifest, StepRecord
from fp8core.store.run_directory import RunDescription

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REFERENCE, SCHEMAS = DOCS / "reference", DOCS / "schemas"
MANIFEST, NUMERICS, METRICS = (REFERENCE / f"{name}.md" for name in ("manifest", "numerics", "metrics"))
# Commands that have an option in the same words, for which it is described once.
COMMON = 3
Schema = Mapping[str, Any]

_CONFIG = """# Configuration

A configuration file lists differences from its `base`. `--set key=value` is the last layer, with the keys below joined
by points. `fp8-grpo config CONFIG` prints every value with its place.
Of choices the default is bold; a setting with `?` is null by default.

Files and values of `--set` are YAML 1.2: `on` and `010` are texts. Quote a text that looks like a number, begins with
`{` or has ` #` or `: ` in it. Numbers are decimal: `80`, `1_000`, `1e-4`.
"""
_CLI = """# Command line

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | the training failed, a file is damaged, or a check found a difference |
| 2 | a user's mistake, before any work |
| 3 | paused by a bound of `alignment.stop` |
| 4 | not enough data (`parity`) |
| 130, 141, 143 | Ctrl-C; closed pipe; SIGTERM, after the step |
"""
_VERSION = StepManifest.model_fields["schema_version"].default
_MANIFEST_MODELS: dict[str, type[BaseModel]] = {
    "record": StepRecord,
    "run": RunDescription,
}
_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}
_BLOCK = "\n<!-- begin: {0} -->\n\n{1}\n<!-- end: {0} -->\n"


def main() -> None:
    for path, text in {**pages(), **manifest_schemas()}.items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    metrics = {name: metric_lines(group) for name, group in GROUPS.items()}
    return {
        REFERENCE / "config.md": _CONFIG
        + _BLOCK.format("settings", config_sections(RunConfig.model_json_schema(by_alias=True)) + option_sections()),
        REFERENCE / "cli.md": _CLI + _BLOCK.format("commands", cli_sections(build_parser())),
        MANIFEST: rewritten(MANIFEST.read_text(), {name: fields(model) for name, model in _MANIFEST_MODELS.items()}),
        NUMERICS: rewritten(NUMERICS.read_text(), {"presets": preset_names(), "alignment": metrics.pop("alignment")}),
        METRICS: rewritten(METRICS.read_text(), metrics),
    }


def manifest_schemas() -> dict[Path, str]:
    """The schemas of the manifest and the ledger, and their text."""
    entry: TypeAdapter[Entry] = TypeAdapter(Entry)
    content = {f"manifest-{_VERSION}.json": StepManifest.model_json_schema(), "ledger.json": entry.json_schema()}
    return {SCHEMAS / name: json.dumps(schema, indent=2) + "\n" for name, schema in content.items()}


def config_sections(schema: Schema) -> str:
    """A table for each section, in the order of the schema, and then for each type that these tables name."""
    sections = list(_sections(schema, schema["$defs"], "", ()))
    parts = [_settings(f"## `{name}`" if name else "## Top level", section, schema) for name, section in sections]
    tables = "\n".join(filter(None, parts))
    shown = [section for _, section in sections]
    types = {
        name: {**each, "properties": _own_properties(each, shown)}
        for name, each in schema["$defs"].items()
        if "properties" in each and f"`{name}`" in tables and each not in shown
    }
    return "\n".join([tables, *(_settings(f"## Values: `{name}`", each, schema) for name, each in types.items())])


def _own_properties(model: Schema, shown: Sequence[Schema]) -> Schema:
    """Without those of a section that it has as a whole: its base."""
    bases = [each["properties"] for each in shown if each["properties"].items() <= model["properties"].items()]
    return {key: value for key, value in model["properties"].items() if not any(key in base for base in bases)}


def option_sections() -> str:
    titles = {name: f"\n## Options of `reward.verifier={name}`" for name in OPTIONS}
    schemas = {name: model.model_json_schema() for name, model in OPTIONS.items()}
    return "".join(_settings(titles[name], schema, {"$defs": {}}) for name, schema in schemas.items())


def _settings(title: str, section: Schema, schema: Schema) -> str:
    """The list of a section without those inside it; empty where it has nothing else."""
    required = section.get("required", ())
    lines = [
        _setting(key, value, key in required)
        for key, value in section["properties"].items()
        if not _section_of(value, schema) or "oneOf" in value
    ]
    return "\n".join([title, "", *lines, ""]) if lines else ""


def _sections(section: Schema, definitions: Schema, name: str, above: Sequence[str]) -> Iterator[tuple[str, Schema]]:
    """A section and those inside it, with their dotted names."""
    yield name, section
    for key, value in section["properties"].items():
        inner = _section_of(value, {"$defs": definitions})
        if inner and inner not in above:
            yield from _sections(definitions[inner], definitions, f"{name}.{key}".strip("."), (*above, inner))


def _section_of(value: Schema, schema: Schema) -> str | None:
    """The definition of a setting that is a section of its own; one with a default is a value."""
    if value.get("default") is not None:
        return None
    for choice in (value, *value.get("anyOf", ()), *value.get("oneOf", ())):
        name = choice.get("$ref", "").rpartition("/")[2]
        if name and "properties" in schema["$defs"].get(name, {}):
            return name
    return None


def _setting(key: str, value: Schema, required: bool) -> str:
    """A default that shows its type stands for it, and of choices it is bold; bounds are in the code."""
    default, words = value.get("default"), _values(value)
    shown = f"`{json.dumps(default, ensure_ascii=False)}`"
    if "enum" in value and default is not None:
        about = words.replace(f"`{default}`", f"**`{default}`**")
    elif isinstance(default, int | float | str):
        about = shown
    else:
        end = ", required" if required else "" if default in (None, [], {}) else f", {shown}"
        about = words.replace(", `null`", "?") + end
    return f"- `{key}` ({about}): {value.get('description', '').replace(chr(10), ' ')}"


def _values(value: Schema) -> str:
    """The values that a setting takes, in words."""
    if choices := [*value.get("anyOf", ()), *value.get("oneOf", ())]:
        return ", ".join(dict.fromkeys(map(_values, choices)))
    if "enum" in value or "const" in value:
        return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")]))
    if "$ref" in value:
        return f"`{value['$ref'].rpartition('/')[2]}`"
    if value.get("type") == "array":
        return f"list of {_values(value.get('items', {}))}"
    kinds = {"object": "mapping", "string": "text", "boolean": "boolean", "null": "`null`"}
    kind = value.get("type", "any")
    return kinds.get(kind, kind)


def cli_sections(parser: argparse.ArgumentParser) -> str:
    """Options that several commands share, and a section for each command: its description, its other arguments."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    lines = {
        name: [_argument(action) for action in command._actions if action.dest != "help"]
        for name, command in commands.choices.items()
    }
    counts = Counter(line for own in lines.values() for line in own)
    common = [line for line, count in counts.items() if count >= COMMON]
    parts = ["\n".join(["## Arguments of several commands", "", *common, ""])]
    for name, own in lines.items():
        shared = [line.split("`")[1].split()[0] for line in own if line in common]
        also = [f"- also {', '.join(f'`{option}`' for option in shared)}"] if shared else []
        others = [line for line in own if line not in common]
        parts.append(
            "\n".join([f"## `fp8-grpo {name}`", "", _sentence(summaries.get(name, "")), "", *others, *also, ""])
        )
    return "\n".join(parts)


def _argument(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = "" if action.nargs == 0 else f" {metavar}"
    name = ", ".join(f"{option}{value}" for option in action.option_strings) or metavar
    shown = action.default not in (None, False, [], argparse.SUPPRESS)
    # A folder of this checkout by its name there: the page is the same on every machine.
    default = f" (`{str(action.default).removeprefix(f'{ROOT}/')}`)" if shown else ""
    help_ = (action.help or "") % {"default": action.default, "prog": "fp8-grpo"}
    if action.choices is not None:
        help_ += f"; one of {', '.join(f'`{choice}`' for choice in action.choices)}"
    return f"- `{name}`{default}: {help_}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def preset_names() -> str:
    """Names of the presets, a line for each system."""
    systems = dict[str, list[str]]()
    for name in PRESETS:
        system, _, rule = name.rpartition("/")
        systems.setdefault(system or name, []).append(f"`{rule}`")
    return "\n".join(f"- `{system}`: {', '.join(rules)}" for system, rules in systems.items())


def metric_lines(metrics: Sequence[Metric]) -> str:
    """A line for each metric, or for several of one text: the name in MLflow, which values are good, the text."""
    lines = []
    for (text, about), group in groupby(metrics, lambda metric: (metric.text, ", ".join(_about(metric)))):
        names = ", ".join(f"`{metric.name}`" for metric in group)
        lines.append(f"- {names}{f' ({about})' if about else ''}: {text}")
    return "\n".join(lines)


def _about(metric: Metric) -> Iterator[str]:
    if metric.headline:
        yield f"`{CORE}{metric.headline}`"
    if metric.better:
        yield {"higher": "↑", "lower": "↓"}[metric.better]
    if metric.ideal is not None:
        yield f"ideal {metric.ideal:g}"


def fields(model: type[BaseModel]) -> str:
    """A line for each field but the ledger's `event` and `step`. Raises ValueError when one has no description."""
    lines = []
    for name, field in model.model_fields.items():
        if name == "event" or (name == "step" and "event" in model.model_fields):
            continue
        if field.description is None:
            raise ValueError(f"{model.__name__}.{name} has no description")
        lines.append(f"- `{name}` ({type_name(field.annotation)}): {field.description}")
    return "\n".join(lines)


def type_name(annotation: Any) -> str:
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
            raise ValueError(f"the markers of {name} must occur once")
        before, after = page.partition(begin)[0], page.partition(end)[2]
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    main()
