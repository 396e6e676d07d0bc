"""Reading configurations: YAML files with bases, overrides, and where each value came from.

A configuration is a stack of layers (`config.layers`): the deepest `base` first, then the file, then each override.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from fp8core.config.layers import Layer, layer_of, leaves, nodes, parse_yaml, stack
from fp8core.config.run import RunConfig, public_dump
from fp8core.config.section import refusal
from fp8core.errors import StoredFileError, UserError, did_you_mean, nearest, without_passwords

Overrides = Mapping[str, Any] | Sequence[str]

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Settings that may differ between two runs that compute the same numbers.
NON_NUMERIC_KEYS = (
    *("steps", "run", "runs", "alignment", "checkpoint", "artifacts", "replay", "tracking", "cluster", "parity"),
)
_NON_NUMERIC_OF_ROLLOUT = ("speculation",)


def load_config(name_or_path: str, overrides: Overrides = ()) -> RunConfig:
    """The configuration of a shipped name (`tiny`) or a YAML file, with overrides.

    `overrides` are `key.path=value` strings, whose values are YAML, or a mapping from (dotted) keys to values. Raises
    UserError, with the key and its place.
    """
    tree = _tree(name_or_path, overrides)
    if tree.values.get("model") is None and tree.values.get("architecture") is None:
        raise UserError(
            "model: not set, and there is no architecture to build; add the checkpoint to train, a folder or a hub id: "
            "--set model=FOLDER_OR_HUB_ID"
        )
    return _validate(tree)


def reload_config(content: Mapping[str, JsonValue], overrides: Overrides = ()) -> RunConfig:
    """From a run.json (`public_dump`). Raises StoredFileError: it is damaged."""
    layer = layer_of(content, "run.json")
    try:
        config = _validate(layer)
    except UserError as error:
        raise StoredFileError(f"run.json: config: {error}") from error
    return _validate(stack([layer, *_override_layers(overrides)])) if overrides else config


def origins(name_or_path: str, overrides: Overrides = ()) -> dict[str, str]:
    """Dotted key -> `file:line`, `--set`, `overrides` or `default`."""
    places = _tree(name_or_path, overrides).places
    return {key: places.get(key, "default") for key in leaves(public_dump(load_config(name_or_path, overrides)))}


def config_digest(config: RunConfig) -> str:
    """SHA-256 of all that determines the numbers of a run, and of the configuration's `name`."""
    dump = public_dump(config)
    values = _numeric(dump, dump)
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def config_digest_at(config: RunConfig, level: str) -> str:
    """With another `replay.level`, at which a run may go on; each record names its own."""
    return config_digest(config.model_copy(update={"replay": config.replay.model_copy(update={"level": level})}))


def may_continue(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences that forbid continuing the run of `old` as `new`: fewer `steps`, and all that makes the numbers."""
    before, after = (
        {key: json.dumps(value) for key, value in leaves(_numeric(dump, new)).items()} for dump in (old, new)
    )
    changes = [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    if new["steps"] < old["steps"]:
        changes.insert(0, f"steps: {old['steps']} -> {new['steps']} (a run may get more steps, not fewer)")
    return changes


def _numeric(dump: Mapping[str, Any], measure: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `measure` decide whether ranks do."""
    values = {key: value for key, value in dump.items() if key not in NON_NUMERIC_KEYS}
    rollout = {key: value for key, value in dump["rollout"].items() if key not in _NON_NUMERIC_OF_ROLLOUT}
    values["rollout"] = rollout
    training = measure["training"]
    repeats = training["device"] == "cuda" and measure["replay"]["level"] != "tolerant"
    # Sums over GPUs depend on the number of ranks, and Megatron's digest of weights on what each of them holds.
    if repeats or training["trainer"] == "megatron":
        values["cluster"] = {"ranks": dump["cluster"]["ranks"]}
    return values


def merged_overrides(overrides: Overrides, flat: Mapping[str, Any]) -> Overrides:
    if isinstance(overrides, Mapping):
        return {**overrides, **flat}
    return [*overrides, *(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in flat.items())]


def shipped_names() -> list[str]:
    """Names of the configurations that come with the package; a file without `name:` is only a base for others."""
    return [
        path.stem
        for path in sorted(CONFIGS.glob("*.yaml"))
        if re.search("^name:", path.read_text("utf-8"), re.MULTILINE)
    ]


def _validate(tree: Layer) -> RunConfig:
    try:
        # JSON mode, so that a path may be a string while every other type is strict.
        config = RunConfig.model_validate_json(json.dumps(tree.values, default=os.fspath), strict=True)
    except ValidationError as error:
        raise refusal(error, RunConfig, tree.values, places=tree.places) from error
    training = config.training
    schedule = config.training.learning_rate_schedule
    if schedule.kind == "constant" or schedule.over_steps is not None:
        return config
    # Stored with the run: a run that gets more steps keeps its schedule.
    ending = schedule.model_copy(update={"over_steps": config.steps})
    return config.model_copy(update={"training": training.model_copy(update={"learning_rate_schedule": ending})})


def _tree(name_or_path: str, overrides: Overrides) -> Layer:
    path = _locate(name_or_path)
    tree = stack([*_file_layers(path), *_override_layers(overrides)])
    if path.resolve().parent == CONFIGS and tree.values.get("name") is None:
        names = ", ".join(shipped_names())
        raise UserError(f"configuration {name_or_path}: only a base for others; shipped: {names}")
    return tree


def _locate(name_or_path: str) -> Path:
    # Anything else is a path.
    bare = re.fullmatch(r"[\w-]*", name_or_path)
    path = CONFIGS / f"{name_or_path}.yaml" if bare else Path(name_or_path)
    if path.is_file():
        return path
    kind = "shipped configuration" if bare else "file"
    near = nearest(Path(name_or_path).stem, shipped_names())
    hint = f"shipped: {', '.join(shipped_names())}" if near is None else f"did you mean {near}?"
    raise UserError(f"configuration {name_or_path or repr(name_or_path)}: there is no such {kind}; {hint}")


def _file_layers(path: Path, readers: tuple[Path, ...] = ()) -> list[Layer]:
    """The file's bases, deepest first, and the file."""
    layer = _file_layer(path)
    if "base" not in layer.values:
        return [layer]
    base = layer.values.pop("base")
    place = layer.places.pop("base")
    if not isinstance(base, str):
        raise UserError(f"{place}: base: must be one file or shipped name")
    chain = (*readers, path.resolve())
    choices = (path.parent / base, CONFIGS / base, CONFIGS / f"{base}.yaml")
    below = next((choice.resolve() for choice in choices if choice.is_file()), None)
    if below is None:
        near = did_you_mean(base, [*shipped_names(), *(beside.name for beside in path.parent.glob("*.yaml"))])
        missing = f"there is no file {base} in {path.parent} and no shipped one of this name"
        raise UserError(f"{place}: base: {missing}{near}")
    if below in chain:
        raise UserError(f"{place}: base: {' -> '.join(each.name for each in (*chain, below))} is a cycle")
    return [*_file_layers(below, chain), layer]


def _file_layer(path: Path) -> Layer:
    label = f"configs/{path.relative_to(CONFIGS)}" if path.is_relative_to(CONFIGS) else str(path)
    try:
        values, places = parse_yaml(path.read_text("utf-8"), label)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{label}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{label}: must hold a mapping of keys")
    return Layer(values, places)


def _override_layers(overrides: Overrides) -> list[Layer]:
    if isinstance(overrides, Mapping):
        pairs = [*overrides.items()]
        place = "overrides"
    else:
        pairs = [_override(text) for text in overrides]
        place = "--set"
    layers = [_override_layer(str(key), value, place) for key, value in pairs]
    for layer in layers:
        if "base" in layer.values:
            raise UserError(f"base: it belongs in a configuration file, whose lowest layer it names ({place})")
        uri = dict(nodes(layer.values)).get("tracking.uri")
        if isinstance(uri, str) and without_passwords(uri) != uri:
            raise UserError(
                f"tracking.uri: {without_passwords(uri)} has a password, which `ps` shows and Prefect stores: set "
                f"MLFLOW_TRACKING_URI, or write it into a configuration file ({place})"
            )
    return layers


def _override_layer(key: str, value: Any, place: str) -> Layer:
    parts = key.split(".")
    if not all(parts):
        raise UserError(f"{place} {key}: the key has an empty part")
    for part in reversed(parts):
        value = {part: value}
    return layer_of(value, place)


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (equals and key and value):
        raise UserError(f"--set {text}: expected key=value (null for no value)")
    return key, parse_yaml(value, f"--set {key}")[0]
