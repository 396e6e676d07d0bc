"""One training is one MLflow run; everything of it goes through its `Tracker`.

Every write is idempotent, so that it may be repeated after a kill or a lost answer. The primary key of MLflow's metric
rows is (key, timestamp, step, run, value, is_nan). So a step logged twice with the ledger's commit time and values
leaves one row; parameters are written once; tables and pictures are replaced. `MlflowClient` only: no active run and no
tracking URI is set for the process.

The head of a run's chain in MLflow is an anchor outside of the run's folder. A consistent rewrite of a folder can renew
every digest in it, but not the head that MLflow got before. So a run whose head is not in the folder's chain is written
no further, and `fp8-grpo verify` reports it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
from mlflow.utils.validation import (
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)

from flows.tracking.record import RunOutcome, TrackingRecord, read_record
from flows.tracking.store import (
    Outage,
    Refusal,
    client_of_existing_store,
    get_or_create_experiment,
    is_server,
    prepare_store,
    public_address,
    store_errors,
    store_of_folder,
)
from fp8core.errors import UserError, printable_lines, without_passwords
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.heads import Chain, coverage
from fp8core.store.json_text import shown
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.lock import original_of
from fp8core.store.manifest import Head
from fp8core.store.run_directory import RunDirectory
from fp8core.store.run_view import Finding, RunView
from fp8core.store.step_manifests import read_manifest

Row = TypeVar("Row")
Table = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""Columns and rows."""
UI_ADDRESS = "http://127.0.0.1:5000"
ERROR = "error"
TRAINING = "fp8_grpo.run"
"""Tag of an MLflow run: the `id` of the training's run.json, or that of its copy (`session.open_session`)."""
CHAIN_HEAD = "chain_head"
"""Tag of an MLflow run: the newest link of the chain of manifests that was published (`manifest.Head`)."""
RUN_DIRECTORY = "run_directory"
COPIED_FROM, COPIED_TO = "copied_from", "copied_to"
"""Tags that link the MLflow run of a copied folder with that of its original: ids of runs, several with commas."""


class Held(NamedTuple):
    """An MLflow run's facts about the training that it shows; None where it holds none."""

    head: Head | None
    folder: Path | None


@dataclass(frozen=True)
class Tracker:
    """The MLflow run of one training.

    Every method but `open` raises MLflow's own errors (`store.store_errors` makes ours of them).
    """

    uri: str
    experiment_id: str
    run_id: str

    @classmethod
    def open(
        cls, uri: str, experiment: str, run_name: str, runs: Path, training: str, copied_from: str | None = None
    ) -> "Tracker":
        """The MLflow run of a training, created unless one has its tag TRAINING: a killed process may have left it.

        A missing store or experiment is created; several processes may do so at once. `runs` takes the artifacts of a
        new experiment, unless `uri` is a server, which keeps them itself. A copied folder's run is linked with
        `copied_from`, the MLflow run of its original. Raises UserError: the store cannot be reached or written, or the
        experiment is deleted.
        """
        try:
            with store_errors(uri):
                prepare_store(uri, runs)
                client = MlflowClient(tracking_uri=uri)
                experiment_id = get_or_create_experiment(client, uri, experiment, runs)
                tagged = client.search_runs([experiment_id], f"tags.`{TRAINING}` = '{training}'", max_results=1)
                tags = {TRAINING: training, **({} if copied_from is None else {COPIED_FROM: copied_from})}
                run = tagged[0] if tagged else client.create_run(experiment_id, None, tags, run_name)
                if copied_from is not None:
                    _link_back(client, copied_from, run.info.run_id)
        except Outage as error:
            raise UserError(str(error)) from error
        return cls(uri, run.info.experiment_id, run.info.run_id)

    @cached_property
    def client(self) -> MlflowClient:
        """Made when it is first needed: MLflow connects to a database at once."""
        return MlflowClient(tracking_uri=self.uri)

    @property
    def page(self) -> str:
        """Address of the run's charts, once the UI runs; without its last word the UI shows its pages for agents."""
        server = public_address(self.uri).rstrip("/") if is_server(self.uri) else UI_ADDRESS
        run = f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}"
        return f"{run}/model-metrics?workflowType=machine_learning"

    def exists(self) -> bool:
        """False if the store has no such run: it was made anew, or the run was deleted for good."""
        return _find_run(self.client, self.run_id) is not None

    def held(self) -> Held:
        """The run's facts about its training. Raises UserError: a tag cannot be read."""
        return held_by(self.client.get_run(self.run_id), self.uri)

    def deleted(self) -> str | None:
        """The experiment or the run that somebody deleted, in words; None: the run can be written."""
        experiment = self.client.get_experiment(self.experiment_id)
        if experiment.lifecycle_stage != "active":
            return f"MLflow experiment {experiment.name}"
        run = self.client.get_run(self.run_id)
        return None if run.info.lifecycle_stage == "active" else f"MLflow run {self.run_id}"

    def resume(self) -> None:
        """The run's status becomes RUNNING and its error goes. Raises Refusal: it, or its experiment, is deleted."""
        if (deleted := self.deleted()) is not None:
            place = without_passwords(self.uri)
            raise Refusal(f"{deleted} is deleted in {place}: restore it or start a run of another name")
        run = self.client.get_run(self.run_id)
        self.client.update_run(self.run_id, status="RUNNING")
        if ERROR in run.data.tags:
            self.client.delete_tag(self.run_id, ERROR)

    def finish(self, status: RunOutcome, error: str | None, ended_ms: int) -> None:
        """End the run with the outcome it had; the error becomes a tag, cut at MLflow's limit."""
        if error is not None:
            self.set_tags({ERROR: printable_lines(error)[:MAX_TAG_VAL_LENGTH]})
        self.client.set_terminated(self.run_id, status, ended_ms)

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Write the flat configuration, values as JSON, cut at MLflow's limit; what is already there stays.

        An MLflow parameter cannot change. A value that differs on a continued run (`steps` that grew) becomes a tag
        of the same name.
        """
        known = self.client.get_run(self.run_id).data.params
        values = {key: _param_text(value) for key, value in config.items()}
        new = [Param(key, text) for key, text in values.items() if key not in known]
        for batch in _batches(new, MAX_PARAMS_TAGS_PER_BATCH):
            self.client.log_batch(self.run_id, params=batch)
        self.set_tags({key: text for key, text in values.items() if key in known and known[key] != text})

    def log_step(
        self, step: int, metrics: Mapping[str, float], timestamp_ms: int, tags: Mapping[str, str] | None = None
    ) -> None:
        """Write metrics of one step, and tags with them; a second call with equal arguments changes nothing.

        Values are finite; each thousand, MLflow's limit, is one transaction. `timestamp_ms` is the ledger's commit
        time, never the present. `tags` are in the first request, and cost none of their own. Raises UserError: a value
        is NaN or infinite; nothing of the step is written.
        """
        for key, value in metrics.items():
            if not math.isfinite(value):
                raise UserError(f"step {step}: metric {key} is {value}")
        rows = [Metric(key, float(value), timestamp_ms, step) for key, value in metrics.items()]
        first, *others = _batches(rows, MAX_METRICS_PER_BATCH) or [[]]
        self.client.log_batch(self.run_id, first, tags=[RunTag(key, value) for key, value in (tags or {}).items()])
        self.log_metrics([row for batch in others for row in batch])

    def log_metrics(self, rows: Sequence[Metric]) -> None:
        for batch in _batches(rows, MAX_METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=batch)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Write or replace a text artifact; the suffix decides how the UI shows it. JSON stays as it is."""
        shown = text if artifact_file.endswith(".json") else printable_lines(text)
        self.client.log_text(self.run_id, shown, artifact_file)

    def log_dict(self, value: Mapping[str, Any], artifact_file: str) -> None:
        self.client.log_dict(self.run_id, dict(value), artifact_file)

    def log_file(self, path: Path, folder: str | None) -> None:
        self.client.log_artifact(self.run_id, str(path), folder)

    def log_tables(self, tables: Mapping[str, Table]) -> None:
        """Write or replace tables, by artifact file, that the UI previews, as its `log_table` does.

        That method appends to a file that exists, and fails when the tag that lists a run's tables exceeds a tag's
        length. Here the tag keeps the newest tables that fit; older ones stay as plain JSON.
        """
        for artifact_file, (columns, rows) in tables.items():
            cells = [[printable_lines(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
            table = {"columns": list(columns), "data": cells}
            self.log_text(json.dumps(table, allow_nan=False), artifact_file)
        listed = json.loads(self.client.get_run(self.run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        entries = [{"path": artifact_file, "type": "table"} for artifact_file in tables]
        listed = [*listed, *(entry for entry in entries if entry not in listed)]
        while len(json.dumps(listed)) > MAX_TAG_VAL_LENGTH:
            del listed[0]
        self.set_tags({MLFLOW_LOGGED_ARTIFACTS: json.dumps(listed)})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        rows = [RunTag(key, printable_lines(value)) for key, value in tags.items()]
        for batch in _batches(rows, MAX_PARAMS_TAGS_PER_BATCH):
            self.client.log_batch(self.run_id, tags=batch)


def held_by(run: Run, uri: str) -> Held:
    """An MLflow run's facts about its training. Raises UserError: a tag cannot be read."""
    head, folder = run.data.tags.get(CHAIN_HEAD), run.data.tags.get(RUN_DIRECTORY)
    try:
        return Held(None if head is None else Head.parse(head), None if folder is None else Path(folder))
    except ValueError as error:
        place = f"tracking.uri {without_passwords(uri)}: tag {CHAIN_HEAD} of MLflow run {run.info.run_id}"
        raise UserError(f"{place}: {error}") from error


def _link_back(client: MlflowClient, original: str, copy: str) -> None:
    """Name a copy in the MLflow run of its original, unless that is gone or lies in another store."""
    run = _find_run(client, original)
    if run is None:
        return
    copies = [known for known in run.data.tags.get(COPIED_TO, "").split(",") if known]
    text = ",".join([*copies, copy])
    if run.info.lifecycle_stage == "active" and copy not in copies and len(text) <= MAX_TAG_VAL_LENGTH:
        client.set_tag(original, COPIED_TO, text)


def _find_run(client: MlflowClient, run_id: str) -> Run | None:
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _param_text(value: Any) -> str:
    text = printable_lines(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_PARAM_VAL_LENGTH else text[: MAX_PARAM_VAL_LENGTH - 1] + "…"


def _batches(items: Sequence[Row], size: int) -> list[Sequence[Row]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def standing(directory: RunDirectory, head: Head) -> Literal["held", "ahead", "other"]:
    """Place of a head: in the chain of a run, ahead of it, or in another one. Raises UserError: a manifest is lost."""
    entry = directory.ledger.step(head.step)
    if entry is None:
        return "ahead"
    ours = Head.of(read_manifest(directory.store, directory.path, entry))
    return "held" if ours == head else "other"


def ahead_of(directory: RunDirectory, tracker: Tracker, head: Head | None) -> str | None:
    """Lead of MLflow's run over a folder, in words; None when the folder holds all of the run.

    Raises UserError: the folder's chain is not the one that MLflow holds.
    """
    stands = "held" if head is None else standing(directory, head)
    if head is None or stands == "held":
        return None
    if stands == "other":
        raise UserError(
            f"{directory.path}: its record of step {head.step} is not the one that MLflow run {tracker.run_id} was "
            f"told ({shown(head.digest)}): the run was rewritten, or it is another copy's; `fp8-grpo verify` says "
            f"more, and who means it deletes the tag {CHAIN_HEAD} there"
        )
    last = directory.ledger.last_step()
    ends = "holds no step" if last is None else f"ends with step {last}"
    return f"MLflow run {tracker.run_id} went on to step {head.step} elsewhere, this folder {ends}"


def refuse_other_chain(directory: RunDirectory, tracker: Tracker) -> None:
    """For an MLflow that answers only now. Raises UserError: its run is not that of this folder, or went beyond it."""
    ahead = ahead_of(directory, tracker, tracker.held().head)
    if ahead is not None:
        raise UserError(f"{ahead}: continued once more, it gets an MLflow run of its own")


def compare_with_mlflow(view: RunView, links: Chain, store: str | None) -> str | Finding:
    """The line of an audit that compares the chain of a run, which may be live, with the head that MLflow holds.

    `store` None reads the one that the folder names, where that may be used. Returns words; a finding when the heads
    differ (error), or when they cannot be compared (note).
    """
    try:
        record = read_record(view.folder)
        uri = store or _store_of(view, record)
        shown_uri = without_passwords(uri)
        with store_errors(uri):
            client = client_of_existing_store(uri)
            run_id = record.run_id if record is not None and record.uri == shown_uri else _run_of(client, view)
            if run_id is None:
                return _unknown(f"no MLflow run with the id of this run in {shown_uri}")
            held = held_by(client.get_run(run_id), uri)
    except (UserError, Outage) as error:
        return _unknown(str(error))
    place = f"MLflow run {run_id} in {shown_uri}"
    if held.head is None:
        return _unknown(f"{place} holds no head: nothing was published, or by an older version")
    step, last = held.head.step, links.last
    if last is None or step > last:
        return _beyond(view.folder, record, held.head, place, last)
    if step not in links.digests:
        return _unknown(f"{place} was told the record {held.head}, whose manifest cannot be read here")
    if links.digests[step] != held.head.digest:
        text = f"{place} was told the record {held.head}, this folder has {links.digests[step]}: the run was rewritten"
        return Finding("error", "MLflow", text, step=step)
    if step == last:
        return f"the same head in {place}"
    return f"{place} holds an earlier one, {held.head}{coverage(step, links)}; the publisher had come no further"


def _beyond(folder: Path, record: TrackingRecord | None, head: Head, place: str, last: int | None) -> str | Finding:
    if _committed_since(folder, head):
        return f"{place} holds {head}, which was committed after the audit began"
    placed = record.place if record is not None and (folder / LEDGER).exists() else None
    copied = placed is not None and original_of(placed, folder) is not None
    why = "a copy that was left behind" if copied else "the last steps were cut off, or an older copy was put back"
    ends = "holds no step" if last is None else f"ends with step {last}"
    text = f"{place} was told the record {head}, this folder {ends}: {why}"
    return Finding("note" if copied else "error", "MLflow", text, step=head.step)


def _committed_since(folder: Path, head: Head) -> bool:
    try:
        entry = LedgerView.glance(folder / LEDGER).step(head.step)
        return entry is not None and Head.of(read_manifest(ArtifactStore(folder), folder, entry)) == head
    except UserError:  # The audit has reported the errors in these files.
        return False


def _store_of(view: RunView, record: TrackingRecord | None) -> str:
    """The store of a run; its run.json names it too. Raises UserError: it is unknown, or may not be used."""
    if record is not None:
        return store_of_folder(record.uri, view.folder, record.lay_at)
    if view.config is None:
        raise UserError("no tracking.json, and a configuration that cannot be read")
    return store_of_folder(view.config.tracking.uri, view.folder, None)


def _run_of(client: MlflowClient, view: RunView) -> str | None:
    """The MLflow run with a run's id in its tag. Raises UserError: its experiment is not known."""
    if view.config is None:
        raise UserError("the configuration cannot be read, which names the experiment")
    experiment = client.get_experiment_by_name(view.config.tracking.experiment)
    if experiment is None:
        return None
    tagged = client.search_runs(
        [experiment.experiment_id], f"tags.`{TRAINING}` = '{view.description.id}'", max_results=1
    )
    return str(tagged[0].info.run_id) if tagged else None


def _unknown(why: str) -> Finding:
    return Finding("note", "MLflow", f"its head could not be compared: {why}")
