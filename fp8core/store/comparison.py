"""Two runs: whether they computed the same, and if not, what differs first and under which other circumstances."""

from dataclasses import dataclass

from pydantic import JsonValue

from fp8core.config.load import NOT_NUMBERS, leaves
from fp8core.config.run import public_dump
from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.difference import Difference, MetricDifference, causes, first_difference, metric_differences
from fp8core.store.evidence import Commit, Evidence, read_manifest
from fp8core.store.manifest import StepRecord
from fp8core.store.run_directory import LEDGER

_NOTED = ("steps", "level")
# Shown library by library and field by field; of all other circumstances the first difference is enough.
_IN_FULL = ("versions",)


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs.

    configuration: settings that determine numbers. notes: settings that do not. circumstances: fields of the records
    that can explain a difference, each with the first step in which it differs. first_step and first_metric: the first
    difference of what was computed. last: the last committed step of each run.
    """

    configuration: list[Difference]
    notes: list[Difference]
    circumstances: list[tuple[int, Difference]]
    first_step: tuple[int, Difference] | None
    first_metric: tuple[int, MetricDifference] | None
    common: list[int]
    last: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Whether the configurations and the records of all common steps are equal."""
        return not (self.configuration or self.circumstances or self.first_step)


def compare(ours: Evidence, theirs: Evidence) -> Comparison:
    """Compare two runs by their configurations, manifests and metrics.

    Raises:
        UserError: the runs have no common step, or a ledger, a manifest or metrics that are needed are damaged.
    """
    for run in (ours, theirs):
        for problem in run.problems:
            if problem.place.startswith(LEDGER):
                raise UserError(f"{run.folder}/{problem.place} cannot be compared: {problem.problem}")
    common = [step for step in ours.steps if step in theirs.steps]
    if not common:
        raise UserError(f"{ours.folder} and {theirs.folder}: no step is committed in both")
    settings = _settings(ours, theirs)
    configuration = [found for found in settings if _section(found) not in NOT_NUMBERS]
    notes = {found.path: found for found in settings if _section(found) in NOT_NUMBERS}
    circumstances: dict[str, tuple[int, Difference]] = {}
    first_step, first_metric = None, None
    order = [planned.name for planned in ours.config.pipeline.steps] if ours.config is not None else []
    for step in common:
        records = _record(ours, step), _record(theirs, step)
        for found in causes(*records):
            if found.path in _NOTED:
                notes.setdefault(found.path, found)
            elif found.path != "config_digest" or not configuration:
                kind = found.path if _section(found) in _IN_FULL else _section(found)
                circumstances.setdefault(kind, (step, found))
        difference = first_difference(*records, order)
        if difference is not None:
            first_step = first_step or (step, difference)
            metric = _metric(ours, theirs, step) if first_metric is None else None
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


def _section(found: Difference) -> str:
    return found.path.partition(".")[0]


def _settings(ours: Evidence, theirs: Evidence) -> list[Difference]:
    left, right = (
        leaves(run.description.config if run.config is None else public_dump(run.config)) for run in (ours, theirs)
    )
    return [
        Difference(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)
    ]


def _record(run: Evidence, step: int) -> StepRecord:
    manifest, problems = read_manifest(run.folder, run.steps[step])
    if manifest is None:
        found = "; ".join(problem.problem for problem in problems)
        raise UserError(f"{run.folder}/{run.steps[step].place} cannot be compared: {found} (see fp8-grpo verify)")
    return manifest.record


def _metric(ours: Evidence, theirs: Evidence, step: int) -> MetricDifference | None:
    differences = metric_differences(_metrics(ours, ours.steps[step]), _metrics(theirs, theirs.steps[step]))
    return differences[0] if differences else None


def _metrics(run: Evidence, commit: Commit) -> dict[str, float]:
    stored: dict[str, JsonValue] = {}
    for ref in commit.artifacts.values():
        if ref.kind == "metrics":
            stored |= ArtifactStore(run.folder).get_json(ref)
    return {name: value for name, value in stored.items() if isinstance(value, int | float)}
