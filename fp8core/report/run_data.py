"""The content of a run's report, read from its folder alone: no lock, no MLflow, no Prefect.

A run that goes on, was resumed, was thinned out by gc or is damaged is read as far as it can be. A file that could not
be read is named as `damaged` (not what was written) or `removed` (on purpose).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fp8core.errors import UserError
from fp8core.report.summary import STEP, History, union_seconds
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.deletion_log import Deletion
from fp8core.store.ledger import START
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import LEDGER
from fp8core.store.run_view import Commit, Provenance, RunView, read_manifest, spans

LARGEST_SHOWN = 1e100
_EVALUATION = {"accuracy": "reward/heldout_accuracy", "length_mean": "reward/heldout_length_mean"}
ENOUGH_TOKENS = 20_000
MOST_STEPS = 10

Values = NDArray[np.float64]


@dataclass(frozen=True)
class TokenSample:
    """Tokens that the policy wrote in some steps.

    rollout, training: log-probs (nats) of each token under the policy that sampled and the one that trains.
    position: index of the token among those of its completion.
    """

    steps: tuple[int, ...]
    rollout: Values
    training: Values
    position: NDArray[np.int64]

    @property
    def difference(self) -> Values:
        """log p - log g of each token, in nats: training minus rollout."""
        return self.training - self.rollout


@dataclass(frozen=True)
class PipelineStep:
    """A step of the iteration: the artifacts it reads and provides, by name."""

    name: str
    reads: tuple[str, ...]
    provides: tuple[str, ...]


@dataclass(frozen=True)
class RunData:
    """A run as a report shows it.

    label: its name, told apart from that of other runs in the report. history: metrics of every committed step.
    seconds: task -> step -> seconds, tasks in the order of the pipeline. busy: step -> seconds in which some
    task ran. tokens: None when there are none to read. damaged: what could not be read, a line each. removed: what gc
    removed.
    """

    label: str
    evidence: RunView
    history: History
    seconds: Mapping[str, Mapping[int, float]]
    busy: Mapping[int, float]
    pipeline: Sequence[PipelineStep]
    tokens: TokenSample | None
    provenance: Provenance
    damaged: Sequence[str]
    removed: Sequence[str]

    @property
    def missing(self) -> list[str]:
        """The parts that the report cannot show, a line each."""
        return [*self.damaged, *self.removed]

    @property
    def asked(self) -> int | None:
        """The number of steps that the run is to have."""
        config = self.evidence.config
        return None if config is None else config.steps

    @property
    def status(self) -> str:
        """Its progress, in words."""
        steps = self.evidence.steps
        last = max(steps, default=None)
        asked = "?" if self.asked is None else self.asked
        if last is None:
            return "no step committed"
        return f"finished, {last} steps" if last == self.asked else f"{last} of {asked} steps"


def read_runs(folders: Sequence[Path], on_step: Callable[[], None] = lambda: None) -> list[RunData]:
    """Every run, labelled; `on_step` is called often, and may raise to end the reading.

    Raises UserError: a folder holds no run, or has a malformed run.json.
    """
    return [read_run(folder, label, on_step) for folder, label in zip(folders, labels(folders), strict=True)]


def labels(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, with as many parents as it takes to tell them apart."""
    parts = [folder.absolute().parts for folder in folders]
    depth = next((n for n in range(1, 64) if len({p[-n:] for p in parts}) == len({*parts})), 64)
    return ["/".join(part[-depth:]) for part in parts]


def read_run(folder: Path, label: str, on_step: Callable[[], None] = lambda: None) -> RunData:
    """One run. `on_step` and errors as in `read_runs`."""
    evidence = RunView.read(folder)
    commits = sorted(evidence.commits, key=lambda commit: commit.step)
    missing = [f"{problem.place}: {problem.problem}" for problem in evidence.problems]
    missing += [f"{LEDGER}: {evidence.gap}"] if evidence.gap is not None else []
    provenance = Provenance()
    for manifest in _manifests(folder, commits, missing):
        on_step()
        provenance.add(manifest)
    pipeline = pipeline_steps(evidence, commits)
    return RunData(
        label=label,
        evidence=evidence,
        history=_history(evidence, commits, missing),
        seconds=_seconds(commits, [step.name for step in pipeline]),
        busy={commit.step: _busy(commit) for commit in commits if commit.step > START},
        pipeline=pipeline,
        tokens=newest_tokens(evidence, _token_artifacts(evidence), missing),
        provenance=provenance,
        damaged=missing,
        removed=_removed(evidence),
    )


def pipeline_steps(evidence: RunView, commits: Sequence[Commit]) -> list[PipelineStep]:
    """The steps of the newest iteration; without a configuration that can be read, what they read is not known."""
    tasks = commits[-1].tasks if commits and commits[-1].step > START else {}
    provided = {name: tuple(entry.outputs) for name, entry in tasks.items()}
    if evidence.config is None:
        return [PipelineStep(name, (), artifacts) for name, artifacts in provided.items()]
    return [
        PipelineStep(step.name, tuple(step.inputs().values()), provided.get(step.name, ()))
        for step in evidence.config.pipeline.steps
    ]


def _history(evidence: RunView, commits: Iterable[Commit], missing: list[str]) -> History:
    rows: list[dict[str, float]] = []
    unread = Unread("metrics")
    for commit in commits:
        row: dict[str, float] = {STEP: commit.step}
        for ref in commit.artifacts.values():
            try:
                row |= _metrics(evidence.folder, ref, commit.step)
            except ArtifactError as error:
                unread.add(commit.step, error, evidence.folder)
        rows.append(row)
    missing += unread.lines()
    return rows


def _metrics(folder: Path, ref: Ref, step: int) -> dict[str, float]:
    """The metrics in an artifact of a step; none when it is of another kind."""
    first = step == START and ref.kind == "evaluation"
    if not first and ref.kind != "metrics":
        return {}
    measured: dict[str, float] = ArtifactStore(folder).get_json(ref)
    found = {metric: measured[name] for name, metric in _EVALUATION.items()} if first and measured else measured
    # A page cannot show a number that is too large for a sum of a few.
    return {name: value if abs(value) <= LARGEST_SHOWN else math.nan for name, value in found.items()}


def _manifests(folder: Path, commits: Iterable[Commit], missing: list[str]) -> Iterator[StepManifest]:
    """Every manifest that can be read; whether the copies for people equal them is for `verify` to say."""
    for commit in commits:
        ref = commit.entry.manifest
        try:
            yield StepManifest.model_validate(ArtifactStore(folder).get_json(ref))
        except ArtifactError:
            manifest, findings = read_manifest(folder, commit)
            missing += [f"{finding.place}: {finding.problem}" for finding in findings]
            if manifest is None and not findings:
                missing.append(f"{ref.uri}: the manifest of step {commit.step} cannot be read")
            if manifest is not None:
                yield manifest


def _seconds(commits: Iterable[Commit], order: Sequence[str]) -> dict[str, dict[int, float]]:
    seconds: dict[str, dict[int, float]] = {name: {} for name in order}
    for commit in commits:
        for name, entry in commit.tasks.items():
            if commit.step > START:
                seconds.setdefault(name, {})[commit.step] = entry.seconds
    return {name: steps for name, steps in seconds.items() if steps}


def _busy(commit: Commit) -> float:
    return union_seconds((entry.started, entry.started + entry.seconds) for entry in commit.tasks.values())


def _token_artifacts(evidence: RunView) -> tuple[str, str]:
    """The artifacts that the metrics of the run compare, which a pipeline may have renamed."""
    ports = ("rollouts", "logprobs")
    if evidence.config is not None:
        for step in evidence.config.pipeline.steps:
            inputs = step.inputs()
            if set(ports) <= set(inputs):
                return inputs[ports[0]], inputs[ports[1]]
    return ports


def _removed(evidence: RunView) -> list[str]:
    """The removals of gc, a line for each time it ran."""
    removed: dict[str, list[Deletion]] = defaultdict(list)
    for tombstone in evidence.deletions.values():
        removed[tombstone.when].append(tombstone)
    return [
        f"gc removed {len(files)} files ({sum(file.size for file in files):,} bytes) on {when}, of steps "
        f"{spans({file.step for file in files if file.step is not None}) or 'none'}"
        for when, files in removed.items()
    ]


def refuse_duplicates(folders: Sequence[Path]) -> None:
    """Raises UserError: a run is named twice."""
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"{folder}: named twice")


def newest_tokens(evidence: RunView, names: tuple[str, str], missing: list[str]) -> TokenSample | None:
    """The tokens of the newest steps: until 20,000 are found, and of at most 10 steps.

    Args:
        evidence: of the run.
        names: of the artifacts with the rollouts and with the log-probs.
        missing: takes a line for what cannot be read and was not removed by gc.

    Returns:
        None when no step has tokens.
    """
    found: list[TokenSample] = []
    unread = Unread("tokens")
    for commit in sorted(evidence.commits, key=lambda commit: -commit.step):
        if len(found) == MOST_STEPS or sum(len(part.position) for part in found) >= ENOUGH_TOKENS:
            break
        refs = [commit.artifacts[name] for name in names if name in commit.artifacts]
        if len(refs) < len(names) or any(was_removed(evidence, ref) for ref in refs):
            continue
        try:
            rollouts, scored = (_table(evidence, ref) for ref in refs)
            sample = _tokens(commit.step, rollouts, scored, evidence.folder / refs[1].uri)
        except ArtifactError as error:
            unread.add(commit.step, error, evidence.folder)
        else:
            found.append(sample)
    missing += unread.lines()
    if not sum(len(part.position) for part in found):
        return None
    return TokenSample(
        tuple(sorted(step for part in found for step in part.steps)),
        np.concatenate([part.rollout for part in found]),
        np.concatenate([part.training for part in found]),
        np.concatenate([part.position for part in found]),
    )


def was_removed(evidence: RunView, ref: Ref) -> bool:
    """True if gc removed the file of an artifact."""
    return ref.digest in evidence.deletions and not (evidence.folder / ref.uri).exists()


class Unread:
    """The files that could not be read of a run's steps: one line for each reason, with the first file that has it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._found: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def add(self, step: int, error: ArtifactError, folder: Path) -> None:
        """Take note of an artifact of a step of the run in `folder`."""
        place, _, reason = str(error).removeprefix(f"{folder}/").partition(": ")
        self._found[reason].append((step, place))

    def lines(self) -> list[str]:
        """Steps, reason and file."""
        return [
            f"{self._what} of step {spans(step for step, _ in places)}: {reason} ({places[0][1]})"
            for reason, places in self._found.items()
        ]


def _table(evidence: RunView, ref: Ref) -> pa.Table:
    """The columns with items for each token; a run with routed experts has a column that is a hundred times larger."""
    columns = ["logprobs", "written"] if ref.kind == "rollouts" else ["logprobs"]
    return ArtifactStore(evidence.folder).get_table(ref, columns)


def _tokens(step: int, rollouts: pa.Table, scored: pa.Table, place: Path) -> TokenSample:
    """The written tokens of one step. Raises ArtifactError: rows or items of the tables do not correspond."""
    lengths = pc.list_value_length(rollouts["logprobs"]).to_numpy()
    if not np.array_equal(lengths, pc.list_value_length(scored["logprobs"]).to_numpy()):
        raise ArtifactError(f"{place}: logprobs: not as many items in every row as the rollouts have")
    written = _items(rollouts["written"], bool)
    before = np.concatenate([[0], np.cumsum(written)])
    starts = np.cumsum(lengths) - lengths
    position = before[:-1] - np.repeat(before[starts], lengths)
    sampled, trained = (_items(table["logprobs"], np.float64)[written] for table in (rollouts, scored))
    if not (np.isfinite(sampled).all() and np.isfinite(trained).all()):
        raise ArtifactError(f"{place}: logprobs: one of a token is not finite, here or in the rollouts")
    return TokenSample((step,), sampled, trained, position[written])


def _items(column: pa.ChunkedArray, dtype: type) -> NDArray[np.generic]:
    """The items of all lists of a column, one after another."""
    items: NDArray[np.generic] = pc.list_flatten(column).to_numpy().astype(dtype)
    return items
