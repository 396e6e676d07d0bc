"""What differs between two executions of a step: first in what was computed, then in the circumstances.

A record has fields that a step computes (seeds, what its tasks read and stored, scales, weights), fields that say under
which circumstances it did (`causes`), and its predecessor, which differs as soon as anything before it does.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from fp8core.store.ledger import START
from fp8core.store.manifest import Content, Contents, StepRecord

CAUSES = ("config_digest", "code_version", "model_revision", "precision", "executed", "level", "versions", "steps")
"""Fields of a record that can explain why others differ."""

START_TASKS = ("warm_start", "calibrate", "evaluate")
"""The tasks of step 0 in their order; those of the others are the pipeline's."""

_SHOWN_DIGITS = 16
# Metrics in the order in which an iteration makes what they measure.
_SECTIONS = ("rollout", "reward", "alignment", "kv", "correction", "train")


Artifacts = Mapping[str, Content]


@dataclass(frozen=True)
class Difference:
    """One field of two records: its path, such as `outputs.train.next_policy`, and both values; None where absent.

    An artifact's value is `{"digest": ..., "size": ...}`.
    """

    path: str
    ours: JsonValue
    theirs: JsonValue

    def __str__(self) -> str:
        return f"{self.path}: {shown(self.ours)} against {shown(self.theirs)}"


@dataclass(frozen=True)
class MetricDifference:
    """One metric with two values; None where it is absent."""

    name: str
    ours: float | None
    theirs: float | None

    @property
    def by(self) -> float | None:
        """The absolute difference; None when one of the two is absent."""
        return None if self.ours is None or self.theirs is None else abs(self.ours - self.theirs)

    def __str__(self) -> str:
        by = "" if self.by is None else f" (by {self.by:.3g})"
        return f"{self.name}: {shown(self.ours)} against {shown(self.theirs)}{by}"


def first_difference(ours: StepRecord, theirs: StepRecord, order: Sequence[str]) -> Difference | None:
    """The first field that the two computed differently, None when there is none.

    Seeds come first, then task by task what it read and what it stored, then scales and weights. Tasks go by `order`
    (the names of the pipeline's steps), those of step 0 by `START_TASKS`, and any that neither names come last.
    """
    return next(_differences(ours, theirs, order), None)


def causes(ours: StepRecord, theirs: StepRecord) -> list[Difference]:
    """Every difference in the circumstances: configuration, code, precision, libraries, ... (`CAUSES`)."""
    left, right = (_circumstances(record) for record in (ours, theirs))
    return [found for field in CAUSES for found in value_differences(field, left[field], right[field])]


def metric_differences(
    ours: Mapping[str, float], theirs: Mapping[str, float], relative: float = 0.0, absolute: float = 0.0
) -> list[MetricDifference]:
    """Metrics that differ, in the order of the iteration.

    Two values agree within `absolute`, or within `relative` times the larger magnitude; a metric that only one side has
    never agrees.
    """
    names = sorted({*ours, *theirs}, key=lambda name: (_rank(name.partition("/")[0], _SECTIONS), name))
    found = [MetricDifference(name, ours.get(name), theirs.get(name)) for name in names]
    return [metric for metric in found if not _agrees(metric, relative, absolute)]


def value_differences(path: str, ours: JsonValue, theirs: JsonValue) -> Iterator[Difference]:
    """The leaves below `path` in which two JSON values differ; lists are leaves."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from value_differences(f"{path}.{key}", ours.get(key), theirs.get(key))
    elif ours != theirs:
        yield Difference(path, ours, theirs)


def content_differences(
    field: str, ours: Contents, theirs: Contents, order: Sequence[str] = ()
) -> Iterator[Difference]:
    """Artifacts, as `field.task.name`, that two records or a record and a ledger name differently, task by task."""
    for task in _in_order({*ours, *theirs}, order):
        yield from _of_task(field, task, ours.get(task, {}), theirs.get(task, {}))


def shown(value: JsonValue) -> str:
    """A value for a line of text: digests are cut, an artifact is its digest and its size."""
    match value:
        case None:
            return "absent"
        case {"digest": str(digest), "size": int(size)}:
            return f"{digest[:_SHOWN_DIGITS]} ({size} bytes)"
        case str() if len(value) == 64:
            return value[:_SHOWN_DIGITS]
        case _:
            return str(value)


def _circumstances(record: StepRecord) -> dict[str, JsonValue]:
    found = record.model_dump(mode="json", include=set(CAUSES))
    # The scales that an engine says it uses were computed; `scales_digest` compares them.
    sides = {side: _without_scales(said) for side, said in record.executed.items()}
    return {**found, "executed": sides}


def _without_scales(said: JsonValue) -> JsonValue:
    return {key: value for key, value in said.items() if key != "scales"} if isinstance(said, dict) else said


def _differences(ours: StepRecord, theirs: StepRecord, order: Sequence[str]) -> Iterator[Difference]:
    yield from value_differences("step", ours.step, theirs.step)
    yield from value_differences("seeds", dict(ours.seeds), dict(theirs.seeds))
    names = START_TASKS if ours.step == START else order
    for task in _in_order({*ours.inputs, *ours.outputs, *theirs.inputs, *theirs.outputs}, names):
        yield from _of_task("inputs", task, ours.inputs.get(task, {}), theirs.inputs.get(task, {}))
        yield from _of_task("outputs", task, ours.outputs.get(task, {}), theirs.outputs.get(task, {}))
    yield from value_differences("scales_digest", ours.scales_digest, theirs.scales_digest)
    yield from value_differences("weights_digest", ours.weights_digest, theirs.weights_digest)


def _of_task(field: str, task: str, ours: Artifacts, theirs: Artifacts) -> Iterator[Difference]:
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            values = [content.model_dump() if content else None for content in (ours.get(name), theirs.get(name))]
            yield Difference(f"{field}.{task}.{name}", *values)


def _in_order(names: Collection[str], order: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (_rank(name, order), name))


def _rank(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _agrees(metric: MetricDifference, relative: float, absolute: float) -> bool:
    if metric.ours is None or metric.theirs is None:
        return False
    return abs(metric.ours - metric.theirs) <= max(absolute, relative * max(abs(metric.ours), abs(metric.theirs)))
