"""Reading configurations: YAML files with bases, overrides, edits of the pipeline, and where each value came from.

A configuration is a stack of layers: the deepest `base` first, then the file, then each override. A mapping merges
into the mapping below it, anything else replaces it. An empty `options` or `with` replaces what is below, too. A
mapping over a list of named items (the steps of the pipeline) merges into the items of those names. Under `pipeline` a
layer may also edit the steps below it, in this order:

    replace: {reward: {uses: "mine:score", needs: [prompts, rollouts]}}
    insert:  [{after: reward, step: {name: keep, uses: "mine:keep", needs: [rewards], provides: {rewards: kept}}}]
    remove:  [evaluate]
    rewire:  {train: {rewards: kept}}      # port -> artifact; null disconnects the port
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from fp8core.config.pipeline import PipelineConfig
from fp8core.config.run import RunConfig, public_dump, unmeant
from fp8core.config.schema import Place, whole_file
from fp8core.config.section import refusal, step_name, suggestion
from fp8core.config.shipped_steps import FILTER, RECORD
from fp8core.config.yaml_text import SETTING, Block, parse_value, parse_yaml
from fp8core.errors import StoredFileError, UserError, meant, nearest, not_unicode, printable, without_passwords
from fp8core.user_files import read_input

Overrides = Mapping[str, Any] | Sequence[str]

SHIPPED = Path(__file__).resolve().parents[2] / "configs"
BARE_NAME = r"^[\w-]+$"
"""Of a shipped configuration; anything else is a path."""

UNDECIDED = "(undecided)"

# Settings that may differ between two runs that compute the same numbers.
NON_NUMERIC_KEYS = (
    *("steps", "run", "runs", "alignment", "checkpoint", "artifacts", "replay", "tracking", "cluster", "parity"),
)


def load_config(name_or_path: str, overrides: Overrides = ()) -> RunConfig:
    """The configuration of a shipped name (`tiny`) or a YAML file, with overrides.

    `overrides` are `key.path=value` strings, or a mapping from (dotted) keys to values. In a string, the value of a
    text is that text, and any other is YAML. Raises UserError, one line with the key and the file and line, for every
    mistake in them.
    """
    tree = _tree(name_or_path, overrides)
    if tree.get("model") is None and tree.get("architecture") is None:
        raise UserError(
            "model: not set, and there is no architecture to build; add the checkpoint to train, a folder or a hub id: "
            "--set model=FOLDER_OR_HUB_ID"
        )
    config = _validated(tree)
    places = {key: place for key, _, place in _nodes(tree)}
    for key, problem in unmeant(config).items():
        raise UserError(f"{key}: {problem} ({places[key]})")
    return config


def load_open_config(name_or_path: str, overrides: Overrides = ()) -> RunConfig:
    """As `load_config`, for looking at an iteration: the model may be left open, and is then called UNDECIDED."""
    tree = _tree(name_or_path, overrides)
    if tree.get("model") is None and tree.get("architecture") is None:
        tree.put("model", UNDECIDED, "default")
    return _validated(tree)


def reload_config(described: Mapping[str, JsonValue], overrides: Overrides = ()) -> RunConfig:
    """The configuration that a run was begun with (`public_dump`, in its run.json), with overrides.

    Raises UserError, as `load_config` does, for a mistake in the overrides; StoredFileError: in run.json itself.
    """
    environment = described.get("environment")
    if isinstance(environment, Mapping):
        # Runs of earlier versions counted failed episodes.
        described = {**described, "environment": {"failed": "count", **environment}}
    try:
        _validated(_stacked([_blocks(described, "run.json")]))
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise StoredFileError(f"run.json: config: {error}") from error
    layers = _override_layers(overrides)
    _refuse_nul(layers)
    return _validated(_stacked([_blocks(described, "run.json"), *layers]))


def origins(name_or_path: str, overrides: Overrides = ()) -> dict[str, str]:
    """Where each value comes from: dotted key -> `file:line`, `--set`, `overrides` or `default`."""
    config = load_config(name_or_path, overrides)
    written = {key: place for key, _, place in _nodes(_tree(name_or_path, overrides))}
    return {key: written.get(key, "default") for key in leaves(config.model_dump(mode="json", by_alias=True))}


def written_places(name_or_path: str, overrides: Overrides = ()) -> dict[str, str]:
    """Where each key and each section was written last: dotted key -> `file:line`, `--set` or `overrides`."""
    return {key: place for key, _, place in _nodes(_tree(name_or_path, overrides)) if place}


def config_digest(config: RunConfig) -> str:
    """SHA-256 of all that determines the numbers of a run, and of the configuration's `name`.

    Its length, its own name (`run`), its upkeep and its tracking are left out (NON_NUMERIC_KEYS).
    """
    return dump_digest(public_dump(config))


def config_digest_at(config: RunConfig, level: str) -> str:
    """`config_digest` with another `replay.level`, at which a run may go on; each record names its own."""
    return config_digest(config.model_copy(update={"replay": config.replay.model_copy(update={"level": level})}))


def dump_digest(dump: Mapping[str, Any]) -> str:
    values = _numeric(dump, dump)
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Values that differ between two dumped configurations, as `key: old -> new`."""
    before, after = ({key: json.dumps(value) for key, value in leaves(dump).items()} for dump in (old, new))
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]


def numeric_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`config_differences`, of the settings that `config_digest` covers for one of the two."""
    measure = old if _ranks_count(old) else new
    return config_differences(*(_numeric(dump, measure) for dump in (old, new)))


def may_continue(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences that forbid continuing the run of `old` as `new`: fewer `steps`, and all that makes the numbers.

    `replay.level` may change: the record of each step has its own.
    """
    fewer = [{"steps": dump["steps"]} for dump in (old, new)] if new["steps"] < old["steps"] else [{}, {}]
    dumps = (_numeric(_as_begun(dump), new) for dump in (old, new))
    found = config_differences(*({**steps, **dump} for steps, dump in zip(fewer, dumps, strict=True)))
    if any(line.startswith("pipeline.mode: ") for line in found):
        # Another mode has other steps, which nobody has set.
        found = [line for line in found if not line.startswith(("pipeline.steps.", "pipeline.carries."))]
    return [f"{line} (a run may get more steps, not fewer)" if line.startswith("steps: ") else line for line in found]


# A port of a step that runs of earlier versions do not connect.
_LATER = {RECORD: "learnt", FILTER: "turns"}


def _as_begun(dump: Mapping[str, Any]) -> dict[str, Any]:
    """A dumped configuration without the inputs that runs of earlier versions lack, and that nobody has set."""
    steps = []
    for step in dump["pipeline"]["steps"]:
        needs = step["needs"] if isinstance(step["needs"], dict) else {port: port for port in step["needs"]}
        begun = {port: artifact for port, artifact in needs.items() if port != _LATER.get(step["uses"])}
        steps.append({**step, "needs": begun})
    return {**dump, "pipeline": {**dump["pipeline"], "steps": steps}}


def _numeric(dump: Mapping[str, Any], measure: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a dumped configuration that determine numbers; those of `measure` decide whether ranks do."""
    kept = {key: value for key, value in dump.items() if key not in NON_NUMERIC_KEYS}
    if (precision := kept.get("precision", {})).get("attention") is None:
        # Runs of earlier versions have no such setting, and keep their digest.
        kept["precision"] = {key: value for key, value in precision.items() if key != "attention"}
    if _ranks_count(measure):
        kept["cluster"] = {"ranks": dump.get("cluster", {}).get("ranks")}
    return kept


def _ranks_count(dump: Mapping[str, Any]) -> bool:
    """True if the number of ranks determines numbers, or what promises to repeat them.

    Sums over GPUs depend on it, and Megatron's digest of weights on what each of them holds.
    """
    repeats: bool = dump["training"]["device"] == "cuda" and dump["replay"]["level"] != "tolerant"
    megatron: bool = dump["training"]["trainer"] == "megatron"
    return repeats or megatron


def merged_overrides(overrides: Overrides, flat: Mapping[str, Any]) -> Overrides:
    if isinstance(overrides, Mapping):
        return {**overrides, **flat}
    return [*overrides, *(f"{key}={json.dumps(value)}" for key, value in flat.items())]


def refuse_contradiction(overrides: Overrides, flat: Mapping[str, Any]) -> None:
    """Raises UserError: overrides give a setting of `flat`, dotted keys, another value; null gives none."""
    given = {key: (value, place) for layer in _override_layers(overrides) for key, value, place in _nodes(layer)}
    for key, other in flat.items():
        value, place = given.get(key, (other, ""))
        if value is not None and value != other:
            shown = " and ".join(without_passwords(str(each)) for each in (other, value))
            raise UserError(f"{key}: {shown} are both given, the second in {place}; omit one")


def shipped_names() -> list[str]:
    """Names of the configurations that come with the package; a file without `name:` is only a base for others."""
    return [
        path.stem
        for path in sorted(SHIPPED.glob("*.yaml"))
        if re.search("^name:", path.read_text("utf-8"), re.MULTILINE)
    ]


def _tree(name_or_path: str, overrides: Overrides) -> Block:
    path = _locate(name_or_path)
    layers = [*_file_layers(path), *_override_layers(overrides)]
    _refuse_nul(layers)
    tree = _stacked(layers)
    if path.resolve().parent == SHIPPED and tree.get("name") is None:
        shipped = ", ".join(shipped_names())
        raise UserError(f"configuration {name_or_path}: only a base for others; shipped: {shipped}")
    return tree


def _validated(tree: Block) -> RunConfig:
    _refuse_unstorable(tree)
    try:
        # JSON mode, so that a path may be a string while every other type is strict.
        return RunConfig.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        places = {key: place for key, _, place in _nodes(tree)}
        raise refusal(error, RunConfig, tree, places=places) from error


def _refuse_unstorable(tree: Block) -> None:
    """Nothing could store text that UTF-8 cannot hold, from a shell's path or as `\\ud800`.

    A number that is not finite would be read back as another: options of one's own functions are any JSON.
    """
    for key, value, place in _nodes(tree):
        if isinstance(value, float | list) and not _is_finite(value):
            origin = f" ({place})" if place else ""
            raise UserError(f"{printable(key)}: must be a finite number, got {json.dumps(value)}{origin}")
        for text in (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)):
            if (at := not_unicode(text)) is not None and not isinstance(value, Mapping):
                origin = f" ({place})" if place else ""
                raise UserError(f"{printable(key)}: not valid text: character {at} is {text[at]!a}{origin}")


def _refuse_nul(layers: Iterable[Block]) -> None:
    """No path may have `\\0`. A run that was begun with it elsewhere is still read."""
    for key, value, place in (node for layer in layers for node in _nodes(layer)):
        for text in (key, *(() if isinstance(value, Mapping) else _texts(value))):
            if (at := text.find("\0")) >= 0:
                raise UserError(f"{printable(key)}: not valid text: character {at} is '\\x00' ({place})")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return False
    return True


def _stacked(layers: Iterable[Block]) -> Block:
    """The layers merged, the lowest first, each with its edits of the pipeline carried out."""
    tree = Block()
    for layer in layers:
        edits = _take_edits(layer)
        tree = _merged(tree, layer, "")
        for edit, value, place in edits:
            tree["pipeline"]["steps"] = _EDITS[edit](_steps_of(tree, place), value, place)
    return tree


# --- files ---


_LARGEST_FILE = 64 * 2**10
"""Bytes: many times those of the largest one shipped."""


def _shape(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else "one value"


def _locate(name_or_path: str) -> Path:
    if not_unicode(name_or_path) is not None:
        raise UserError(f"configuration {name_or_path!a}: the name is not valid text")
    bare = not name_or_path or re.fullmatch(BARE_NAME, name_or_path)
    path = SHIPPED / f"{name_or_path}.yaml" if bare else Path(name_or_path)
    # Something else than a file is named by what reads it.
    if path.is_file() or (not bare and path.exists()):
        return path
    kind = "shipped configuration" if bare else "file"
    near = nearest(Path(name_or_path).stem, shipped_names())
    hint = f"shipped: {', '.join(shipped_names())}" if near is None else f"did you mean {near}?"
    shown = name_or_path or repr(name_or_path)
    raise UserError(f"configuration {shown}: there is no such {kind}; {hint}")


def _file_layers(path: Path, readers: tuple[Path, ...] = ()) -> list[Block]:
    """The file's bases, deepest first, and the file."""
    shown = f"configs/{path.name}" if path.parent == SHIPPED else str(path)
    try:
        content = read_input(path, _LARGEST_FILE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: cannot be read: {error}") from error
    block = parse_yaml(content, shown, whole_file())
    if not isinstance(block, Block):
        raise UserError(f"{shown}: must hold a mapping of keys, not {_shape(block)}")
    for key, place in block.places.items():
        if not SETTING.fullmatch(key):
            raise UserError(f"{place}: not a name of a setting")
    if "base" not in block:
        return [block]
    base, place = block.pop("base"), block.places.pop("base")
    chain = (*readers, path.resolve())
    below = _locate_base(base, path, place)
    if below.resolve() in chain:
        names = " -> ".join(step.name for step in (*chain, below))
        raise UserError(f"{place}: base: {names} is a cycle")
    return [*_file_layers(below, chain), block]


def _locate_base(base: Any, reader: Path, place: str) -> Path:
    if not isinstance(base, str):
        raise UserError(f"{place}: base: must be one file or shipped name, not {_shape(base)}")
    for path in (reader.parent / base, SHIPPED / base, SHIPPED / f"{base}.yaml"):
        if path.is_file():
            return path
    missing = f"there is no file {base} in {reader.parent} and no shipped one of this name"
    near = meant(base, [*shipped_names(), *(path.name for path in reader.parent.glob("*.yaml"))])
    raise UserError(f"{place}: base: {missing}{near}")


# --- overrides ---


def _override_layers(overrides: Overrides) -> list[Block]:
    if isinstance(overrides, Mapping):
        layers = [_nested(str(key), value, "overrides") for key, value in overrides.items()]
    else:
        layers = [_parse_override(text) for text in overrides]
    for layer in layers:
        if "base" in layer:
            place = layer.places["base"]
            raise UserError(f"base: it belongs in a configuration file, whose lowest layer it names ({place})")
    for key, value, place in (node for layer in layers for node in _nodes(layer)):
        if key == "tracking.uri" and isinstance(value, str) and without_passwords(value) != value:
            raise UserError(
                f"{key}: {without_passwords(value)} has a password, which `ps` shows and Prefect stores: set "
                f"MLFLOW_TRACKING_URI, or write it into a configuration file ({place})"
            )
    return layers


def _parse_override(text: str) -> Block:
    return _nested(*override_value(text), "--set")


def override_value(text: str) -> tuple[str, Any]:
    """The key and the value of `key=value`. Raises UserError."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not (equals and key and value.strip()):
        raise UserError(f"--set {text}: expected key=value (null for no value)")
    if (at := not_unicode(value)) is not None:
        raise UserError(f"{printable(key)}: not valid text: character {at} of {ascii(value)[:80]} (--set)")
    place: Place | None = whole_file()
    for part in key.split("."):
        place = None if place is None else place.at(part)
    return key, parse_value(value, f"--set {printable(key)}", place)


def _nested(dotted: str, value: Any, place: str) -> Block:
    parts = dotted.split(".")
    if not all(parts):
        raise UserError(f"{place} {dotted}: the key has an empty part")
    for part in reversed(parts):
        block = Block()
        block.put(part, _blocks(value, place), place)
        value = block
    return block


def _blocks(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        block = Block()
        for key, child in value.items():
            block.put(str(key), _blocks(child, place), place)
        return block
    if isinstance(value, list | tuple):
        return [_blocks(item, place) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# --- layers ---


def _merged(below: Any, above: Any, key: str) -> Any:
    if not isinstance(above, Block):
        return above
    if _is_named_list(below):
        return _merged_by_name(below, above, key)
    result = below.duplicate() if isinstance(below, Block) else Block()
    for part, value in above.items():
        # Options of another function are of no use, and nothing else could drop them.
        below_it = None if part in _FREE and value == {} else result.get(part)
        result.put(part, _merged(below_it, value, f"{key}.{part}" if key else part), above.places[part])
    return result


_FREE = ("options", "with")
"""Mappings whose keys depend on a name beside them."""


def _merged_by_name(items: Sequence[Block], above: Block, key: str) -> list[Block]:
    names = [item["name"] for item in items]
    for name in above:
        if name not in names:
            raise UserError(f"{key}.{name}: there is no step {name}; {suggestion(name, names)} ({above.places[name]})")
    return [_merged(item, above.get(item["name"], Block()), f"{key}.{item['name']}") for item in items]


def _is_named_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(step_name(item) for item in value)


def _children(value: Any, place: str) -> list[tuple[str, Any, str]]:
    if isinstance(value, Mapping):
        places = value.places if isinstance(value, Block) else {}
        return [(key, child, places.get(key, place)) for key, child in value.items()]
    if _is_named_list(value):
        return [(str(step_name(item)), item, place) for item in value]
    return []


def _nodes(value: Any, prefix: str = "", place: str = "") -> Iterator[tuple[str, Any, str]]:
    """Everything below, sections included: dotted key, value, and where it was written."""
    for part, child, child_place in _children(value, place):
        yield f"{prefix}{part}", child, child_place
        yield from _nodes(child, f"{prefix}{part}.", child_place)


def leaves(dump: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value, _ in _nodes(dump) if not _children(value, "")}


# --- edits of the pipeline ---


def _take_edits(layer: Block) -> list[tuple[str, Any, str]]:
    """Remove the edits from a layer's pipeline; returns kind, value and place of each, in the order to apply."""
    pipeline = layer.get("pipeline")
    if not isinstance(pipeline, Block):
        return []
    for key in pipeline:
        known = [*PipelineConfig.model_fields, *_EDITS]
        if key not in known:
            raise UserError(f"pipeline.{key}: unknown key; {suggestion(key, known)} ({pipeline.places[key]})")
    return [(edit, pipeline.pop(edit), pipeline.places.pop(edit)) for edit in _EDITS if edit in pipeline]


def _steps_of(tree: Block, place: str) -> list[Block]:
    steps = tree["pipeline"].get("steps")
    if not _is_named_list(steps):
        raise UserError(f"pipeline: there are no named steps to edit ({place})")
    return list(steps)


def _index(steps: Sequence[Block], name: Any, edit: str, place: str) -> int:
    names = [step["name"] for step in steps]
    if name not in names:
        raise UserError(f"pipeline.{edit}: there is no step {name}; {suggestion(str(name), names)} ({place})")
    return names.index(name)


def _replace(steps: list[Block], edit: Any, place: str) -> list[Block]:
    if not isinstance(edit, Block) or not all(isinstance(step, Block) for step in edit.values()):
        raise UserError(f"pipeline.replace: must map the name of a step to the new step ({place})")
    for name, step in edit.items():
        new = step.duplicate()
        if "name" not in new:
            new.put("name", name, edit.places[name])
        steps[_index(steps, name, "replace", place)] = new
    return steps


def _insert(steps: list[Block], edit: Any, place: str) -> list[Block]:
    for item in edit if isinstance(edit, list) else [edit]:
        sides = [key for key in ("after", "before") if isinstance(item, Block) and item.keys() == {key, "step"}]
        if not sides or step_name(item["step"]) is None:
            raise UserError(
                f"pipeline.insert: must list items {{after: STEP, step: {{name: ...}}}} or before: ({place})"
            )
        side = sides[0]
        steps.insert(_index(steps, item[side], "insert", place) + (side == "after"), item["step"])
    return steps


def _remove(steps: list[Block], edit: Any, place: str) -> list[Block]:
    if not isinstance(edit, list):
        raise UserError(f"pipeline.remove: must list the names of steps ({place})")
    for name in edit:
        del steps[_index(steps, name, "remove", place)]
    return steps


def _rewire(steps: list[Block], edit: Any, place: str) -> list[Block]:
    if not isinstance(edit, Block) or not all(isinstance(ports, Block) for ports in edit.values()):
        raise UserError(f"pipeline.rewire: must map the name of a step to {{port: artifact}} ({place})")
    for name, ports in edit.items():
        index = _index(steps, name, "rewire", place)
        step, needs = steps[index].duplicate(), Block()
        for port, artifact in [*_inputs(step).items(), *ports.items()]:
            needs.put(port, artifact, ports.places.get(port, step.places.get("needs", place)))
        for port in [port for port, artifact in needs.items() if artifact is None]:
            del needs[port]
        step.put("needs", needs, place)
        steps[index] = step
    return steps


def _inputs(step: Block) -> dict[str, Any]:
    needs = step.get("needs", [])
    return dict(needs) if isinstance(needs, Mapping) else {str(name): name for name in needs}


_EDITS: dict[str, Callable[[list[Block], Any, str], list[Block]]] = {
    "replace": _replace,
    "insert": _insert,
    "remove": _remove,
    "rewire": _rewire,
}
