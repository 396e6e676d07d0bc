"""Compare two steps or two runs: their records, metrics and stored contents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import pyarrow as pa
from pydantic import JsonValue

from fp8core.config.layers import leaves
from fp8core.config.load import NON_NUMERIC_KEYS
from fp8core.config.run import public_dump
from fp8core.errors import StoredFileError, UserError
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.json_text import Difference, value_differences
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, START_TASKS, stored_metrics
from fp8core.store.manifest import Content, Contents, StepRecord
from fp8core.store.run_view import RunView

CAUSES = ("config_digest", "code_version", "model_revision", "precision", "executed", "level", "versions", "steps")
"""Fields of a record that can explain why others differ."""

# Metrics in the order in which an iteration makes what they measure.
_SECTIONS = ("rollout", "reward", "alignment", "kv", "correction", "train")

Artifacts = Mapping[str, Content]


def first_difference(ours: StepRecord, theirs: StepRecord, order: Sequence[str]) -> Difference | None:
    """Tasks are sorted by `order` (the names of the pipeline's steps), those of step 0 by `START_TASKS`."""
    return next(_differences(ours, theirs, order), None)


def causes(ours: StepRecord, theirs: StepRecord) -> list[Difference]:
    left, right = (_circumstances(record) for record in (ours, theirs))
    return [difference for field in CAUSES for difference in value_differences(field, left[field], right[field])]


def metric_differences(
    ours: Mapping[str, float], theirs: Mapping[str, float], relative: float = 0.0, absolute: float = 0.0
) -> list[Difference]:
    """Two values agree within `absolute`, or within `relative` times the larger magnitude."""
    names = sorted({*ours, *theirs}, key=lambda name: (_rank(name.partition("/")[0], _SECTIONS), name))
    differences = []
    for name in names:
        left = ours.get(name)
        right = theirs.get(name)
        if left is None or right is None or abs(left - right) > max(absolute, relative * max(abs(left), abs(right))):
            differences.append(Difference(name, left, right))
    return differences


def content_differences(field: str, ours: Contents, theirs: Contents) -> Iterator[Difference]:
    for task in sorted({*ours, *theirs}):
        yield from _of_task(field, task, ours.get(task, {}), theirs.get(task, {}))


def _circumstances(record: StepRecord) -> dict[str, Any]:
    values = record.model_dump(mode="json", include=set(CAUSES))
    for component in values["executed"].values():
        if isinstance(component, dict):
            # The scales that an engine reports are a result; `scales_digest` compares them.
            component.pop("scales", None)
    return values


def _differences(ours: StepRecord, theirs: StepRecord, order: Sequence[str]) -> Iterator[Difference]:
    yield from value_differences("step", ours.step, theirs.step)
    yield from value_differences("seeds", dict(ours.seeds), dict(theirs.seeds))
    names = [*START_TASKS] if ours.step == START else order
    tasks = {*ours.inputs, *ours.outputs, *theirs.inputs, *theirs.outputs}
    for task in sorted(tasks, key=lambda name: (_rank(name, names), name)):
        yield from _of_task("inputs", task, ours.inputs.get(task, {}), theirs.inputs.get(task, {}))
        yield from _of_task("outputs", task, ours.outputs.get(task, {}), theirs.outputs.get(task, {}))
    yield from value_differences("scales_digest", ours.scales_digest, theirs.scales_digest)
    yield from value_differences("weights_digest", ours.weights_digest, theirs.weights_digest)


def _of_task(field: str, task: str, ours: Artifacts, theirs: Artifacts) -> Iterator[Difference]:
    # An environment's answers come before completions, which depend on them.
    for name in sorted({**ours, **theirs}, key=lambda name: not name.endswith("turns")):
        if ours.get(name) != theirs.get(name):
            values = [content.model_dump() if content else None for content in (ours.get(name), theirs.get(name))]
            yield Difference(f"{field}.{task}.{name}", *values)


def _rank(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


_NOTE_FIELDS = ("steps", "level")


@dataclass(frozen=True)
class Comparison:
    """`configuration` has settings that determine numbers, `notes` the others; `circumstances` and `first_*` have the
    first step of each; `last`: the last step of each run."""

    configuration: list[Difference]
    notes: list[Difference]
    circumstances: list[tuple[int, Difference]]
    first_step: tuple[int, Difference] | None
    first_metric: tuple[int, Difference] | None
    common: list[int]
    last: tuple[int, int]

    @property
    def equal(self) -> bool:
        return not (self.configuration or self.circumstances or self.first_step)


def compare(ours: RunView, theirs: RunView) -> Comparison:
    """Raises UserError: no common step, or a ledger, a manifest or metrics are damaged."""
    runs = (ours, theirs)
    for run in runs:
        for problem in run.problems:
            if problem.place.startswith(LEDGER):
                raise StoredFileError(f"{run.folder}/{problem.place} cannot be compared: {problem.problem}")
        if run.gap is not None:
            raise StoredFileError(f"{run.folder}/{LEDGER} cannot be compared: {run.gap}")
    common = [step for step in ours.steps if step in theirs.steps]
    if not common:
        raise UserError(f"{ours.folder} and {theirs.folder}: no step is committed in both")
    settings = _settings(ours, theirs)
    configuration = [difference for difference in settings if _section(difference) not in NON_NUMERIC_KEYS]
    explanations = {"config_digest"} if configuration else set()
    explanations |= {difference.path for difference in configuration}
    notes = {difference.path: difference for difference in settings if _section(difference) in NON_NUMERIC_KEYS}
    circumstances: dict[str, tuple[int, Difference]] = {}
    first_step = None
    first_metric = None
    order = [step_settings.name for step_settings in ours.config.pipeline.steps] if ours.config is not None else []
    for step in common:
        here, there = (ArtifactStore(run.folder).get_manifest(run.steps[step].entry.manifest).record for run in runs)
        for cause in causes(here, there):
            if cause.path in _NOTE_FIELDS:
                notes.setdefault(cause.path, cause)
            elif cause.path not in explanations:
                # Shown library by library; of other circumstances the first difference is enough.
                kind = cause.path if _section(cause) == "versions" else _section(cause)
                circumstances.setdefault(kind, (step, cause))
        difference = first_difference(here, there, order)
        if difference is not None:
            first_step = first_step or (step, difference)
            metric = _metric(runs, step) if first_metric is None else None
            first_metric = (step, metric) if metric is not None else first_metric
    return Comparison(
        configuration,
        list(notes.values()),
        list(circumstances.values()),
        first_step,
        first_metric,
        common,
        (max(ours.steps), max(theirs.steps)),
    )


def _section(difference: Difference) -> str:
    return difference.path.partition(".")[0]


def _settings(ours: RunView, theirs: RunView) -> list[Difference]:
    left, right = (
        leaves(run.description.config if run.config is None else public_dump(run.config)) for run in (ours, theirs)
    )
    differing = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    return [Difference(key, left.get(key), right.get(key)) for key in differing]


def _metric(runs: Sequence[RunView], step: int) -> Difference | None:
    ours, theirs = (stored_metrics(run.ledger, ArtifactStore(run.folder), step) for run in runs)
    # Runs of two modes have metrics that differ in name alone; one that both measured comes first.
    return min(metric_differences(ours, theirs), key=lambda each: None in (each.ours, each.theirs), default=None)


def content_difference(ours: ArtifactStore, our_ref: Ref, theirs: ArtifactStore, their_ref: Ref) -> str | None:
    """One line on the first difference of two artifacts of one kind. Raises ArtifactError."""
    match our_ref.uri.rpartition(".")[2]:
        case "json":
            return value_difference(ours.get_json(our_ref), theirs.get_json(their_ref))
        case "parquet":
            return table_difference(ours.get_table(our_ref), theirs.get_table(their_ref))
        case _:
            return None


def value_difference(ours: JsonValue, theirs: JsonValue) -> str | None:
    difference = next(value_differences("", ours, theirs), None)
    return None if difference is None else shorten(str(difference).removeprefix("."), 160, placeholder="...")


def table_difference(ours: pa.Table, theirs: pa.Table) -> str | None:
    if ours.column_names != theirs.column_names:
        return f"columns {', '.join(ours.column_names)} against {', '.join(theirs.column_names)}"
    for row, (left, right) in enumerate(zip(ours.to_pylist(), theirs.to_pylist(), strict=False)):
        if (difference := value_difference(left, right)) is not None:
            return f"row {row}, column {difference}"
    return None if ours.num_rows == theirs.num_rows else f"{ours.num_rows} rows against {theirs.num_rows}"
