"""Layers of a configuration: YAML with the place of each key, how layers merge, and edits of the pipeline.

A mapping merges into the mapping below it, anything else replaces it. An empty `options` or `with` replaces what is
below, too. A mapping over a list of named items (the steps of the pipeline) merges into the items of those names. Under
`pipeline` a layer may also edit the steps below it, in this order:

    replace: {reward: {uses: "mine:score", needs: [prompts, rollouts]}}
    insert:  [{after: reward, step: {name: keep, uses: "mine:keep", needs: [rewards], provides: {rewards: kept}}}]
    remove:  [evaluate]
    rewire:  {train: {rewards: kept}}      # port -> artifact; null disconnects an optional port
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from fp8core.config.pipeline import PipelineConfig
from fp8core.config.section import step_name, suggestion
from fp8core.errors import UserError


class Layer(NamedTuple):
    """`places`: dotted key -> `file:line`, `--set` or `overrides`."""

    values: dict[str, Any]
    places: dict[str, str]


class _Loader(yaml.SafeLoader):
    """The scalars of YAML 1.2, in decimal: `1e-4` is a number, `on` and `2024-01-01` are text. No key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not text", key.start_mark)
            if key.value in lines:
                problem = f"key {key.value} is already given in line {lines[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return {str(key): value for key, value in super().construct_mapping(node, deep=True).items()}


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9](?:_?[0-9])*)", list("-+0123456789")),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, source: str) -> tuple[Any, dict[str, str]]:
    """With `source:line` of each dotted key. Raises UserError: with line and column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise UserError(f"{where}: {error.problem or 'not valid YAML'}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from None
    return value, {} if node is None else dict(_lines(node, source, ""))


def _lines(node: yaml.Node, source: str, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", f"{source}:{key.start_mark.line + 1}"
            yield from _lines(value, source, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            fields = item.value if isinstance(item, yaml.MappingNode) else []
            name = next((value.value for key, value in fields if key.value == "name"), index)
            yield f"{prefix}{name}", f"{source}:{item.start_mark.line + 1}"
            yield from _lines(item, source, f"{prefix}{name}.")


def layer_of(values: Mapping[str, Any], place: str) -> Layer:
    return Layer(dict(values), {key: place for key, _ in nodes(values)})


def nodes(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Everything below a value with its dotted key; named items of a list by name."""
    for part, child in _children(value):
        yield f"{prefix}{part}", child
        yield from nodes(child, f"{prefix}{part}.")


def leaves(dump: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in nodes(dump) if not _children(value)}


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return [(item["name"], item) for item in value] if _is_named_list(value) else []


def _is_named_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(step_name, value))


def stack(layers: Iterable[Layer]) -> Layer:
    """The lowest first, each with its edits of the pipeline carried out.

    Raises UserError: an edit or a mapping over steps names what is not there.
    """
    tree: dict[str, Any] = {}
    places: dict[str, str] = {}
    for values, place_of in layers:
        if isinstance(services := values.get("tracking"), list):
            values = {**values, "tracking": {"services": services}}
            place_of = {**place_of, "tracking.services": place_of["tracking"]}
        edits: dict[str, Any] = {}
        if isinstance(pipeline := values.get("pipeline"), Mapping):
            edits = {edit: pipeline[edit] for edit in EDITS if edit in pipeline}
            values = {**values, "pipeline": {key: value for key, value in pipeline.items() if key not in edits}}
            known_keys = [*PipelineConfig.model_fields, *EDITS]
            for key in values["pipeline"].keys() - known_keys:
                raise UserError(
                    f"pipeline.{key}: unknown key; {suggestion(key, known_keys)} ({place_of[f'pipeline.{key}']})"
                )
        tree, places = _merge(tree, values, "", place_of), places | place_of
        for edit, value in edits.items():
            before, place = dict(nodes(tree)), place_of[f"pipeline.{edit}"]
            try:
                tree["pipeline"]["steps"] = _apply_edit(tree["pipeline"].get("steps"), edit, value)
            except UserError as error:
                raise UserError(f"{error} ({place})") from error
            changed_keys = (key for key, value in nodes(tree) if key not in before or before[key] != value)
            places |= dict.fromkeys(changed_keys, place)
        # A port that a list named, and a value of a mapping that was replaced, are no keys any more.
        present = {key for key, _ in nodes(tree)}
        places = {key: place for key, place in places.items() if key in present}
    return Layer(tree, places)


_FREE = ("options", "with")
"""Mappings whose keys depend on a name beside them: those of another function are of no use, and nothing else could
drop them."""


def _merge(below: Any, above: Any, key: str, places: Mapping[str, str]) -> Any:
    if not isinstance(above, Mapping):
        return above
    if _is_named_list(below):
        names = [item["name"] for item in below]
        for name in above:
            if name not in names:
                place = places[f"{key}.{name}"]
                kind = "step" if key == "pipeline.steps" else "item"
                raise UserError(f"{key}.{name}: there is no {kind} {name}; {suggestion(name, names)} ({place})")
        return [_merge(item, above.get(item["name"], {}), f"{key}.{item['name']}", places) for item in below]
    result = dict(below) if isinstance(below, Mapping) else {}
    for part, value in above.items():
        under = None if part in _FREE and value == {} else result.get(part)
        result[part] = _merge(under, value, f"{key}.{part}" if key else part, places)
    return result


EDITS = {
    "replace": "must map the name of a step to the new step",
    "insert": "must list items {after: STEP, step: {name: ...}} or before:",
    "remove": "must list the names of steps",
    "rewire": "must map the name of a step to {port: artifact}",
}
"""Edits of the pipeline, in the order in which they are carried out, with their form."""


def _apply_edit(below: Any, edit: str, value: Any) -> list[dict[str, Any]]:
    if not _is_named_list(below):
        raise UserError("pipeline: there are no named steps to edit")
    if not _is_well_formed(edit, value):
        raise UserError(f"pipeline.{edit}: {EDITS[edit]}")
    steps = list(below)

    def index(name: Any) -> int:
        names = [step["name"] for step in steps]
        if name not in names:
            raise UserError(f"pipeline.{edit}: there is no step {name}; {suggestion(str(name), names)}")
        return names.index(name)

    if edit == "replace":
        for name, step in value.items():
            steps[index(name)] = {"name": name, **step}
    elif edit == "insert":
        for item in value if isinstance(value, list) else [value]:
            side = "after" if "after" in item else "before"
            steps.insert(index(item[side]) + (side == "after"), item["step"])
    elif edit == "remove":
        for name in value:
            del steps[index(name)]
    else:
        for name, ports in value.items():
            old_needs = steps[index(name)].get("needs", [])
            needs = dict(old_needs) if isinstance(old_needs, Mapping) else {port: port for port in old_needs}
            steps[index(name)] = {**steps[index(name)], "needs": needs | ports}
    return steps


def _is_well_formed(edit: str, value: Any) -> bool:
    if edit == "remove":
        return isinstance(value, list)
    if edit != "insert":
        return isinstance(value, Mapping) and all(isinstance(value, Mapping) for value in value.values())
    return all(
        isinstance(item, Mapping)
        and item.keys() in ({"after", "step"}, {"before", "step"})
        and step_name(item["step"]) is not None
        for item in (value if isinstance(value, list) else [value])
    )
