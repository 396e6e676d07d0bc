"""What a parity run leaves for the next one: its verdict, and the code, libraries and settings that made it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from fp8core.config.load import leaves
from fp8core.parity.verdict import PASS, Check, Outcome
from fp8core.store import durable

RECORD = "verdict.json"


class Night(BaseModel):
    """The content of verdict.json. `settings` are those of the configuration, of which no variant is made yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: str
    ended: str
    outcome: Outcome
    headline: str
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    code_version: str
    git: dict[str, JsonValue]
    versions: dict[str, str]
    hardware: dict[str, JsonValue]
    settings: dict[str, JsonValue]
    checks: tuple[Check, ...]


class Change(BaseModel):
    """Something that is not as it was in the night before."""

    model_config = ConfigDict(frozen=True)

    kind: str
    what: str
    before: str
    now: str


def write_night(night: Night, folder: Path) -> None:
    """Write the record of a night into its folder."""
    durable.write_file(folder / RECORD, (night.model_dump_json(indent=2) + "\n").encode())


def last_passing(shelf: Path, config: str, before: str) -> Night | None:
    """The newest night of a configuration that passed, of those in folders of `shelf`, but for the one named `before`.

    A record that this version cannot read is passed over.
    """
    nights = [night for night in _nights(shelf) if night.config == config and night.name != before]
    passing = [night for night in nights if night.outcome == PASS]
    return max(passing, key=lambda night: night.ended, default=None)


def changes(before: Night, now: Night) -> list[Change]:
    """What differs: code, libraries, machine, settings, outcomes, and every number that was measured."""
    found = [
        *_differing("code", {"version": before.code_version}, {"version": now.code_version}),
        *_differing("code", before.git, now.git),
        *_differing("library", before.versions, now.versions),
        *_differing("machine", before.hardware, now.hardware),
        *_differing("setting", leaves(before.settings), leaves(now.settings)),
    ]
    old, new = ({f"{check.variant}: {check.name}": check for check in night.checks} for night in (before, now))
    outcomes = [{name: check.outcome for name, check in checks.items()} for checks in (old, new)]
    numbers = [
        {name: f"{check.number:.6g}" for name, check in checks.items() if check.number is not None}
        for checks in (old, new)
    ]
    return [*found, *_differing("outcome", *outcomes), *_differing("metric", *numbers)]


def _differing(kind: str, before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[Change]:
    for key in {**before, **now}:
        old, new = (_shown(values[key]) if key in values else "absent" for values in (before, now))
        if old != new:
            yield Change(kind=kind, what=key, before=old, now=new)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _nights(shelf: Path) -> Iterator[Night]:
    for path in sorted(shelf.glob(f"*/{RECORD}")):
        try:
            yield Night.model_validate_json(path.read_bytes())
        except ValidationError:
            continue
