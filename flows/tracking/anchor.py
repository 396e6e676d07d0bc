"""The head of a run's chain as MLflow holds it: an anchor outside of the run's folder.

A consistent rewrite of a folder can renew every digest in it, but not the head that MLflow got before. So a run whose
head is not in the folder's chain is written no further, and `fp8-grpo verify` reports it.
"""

from pathlib import Path
from typing import Literal

from mlflow import MlflowClient

from flows.tracking.record import TrackingRecord, read_record
from flows.tracking.store import Outage, client_of_existing_store, store_errors, store_of_folder
from flows.tracking.tracker import CHAIN_HEAD, TRAINING, Tracker, held_by
from fp8core.errors import UserError, without_passwords
from fp8core.run.commit import read_manifest
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.json_text import shown
from fp8core.store.ledger import LedgerView
from fp8core.store.lock import original_of
from fp8core.store.manifest import Head
from fp8core.store.run_directory import LEDGER, RunDirectory
from fp8core.store.run_view import Finding, RunView
from fp8core.store.verify import Chain, coverage


def standing(directory: RunDirectory, head: Head) -> Literal["held", "ahead", "other"]:
    """Place of a head: in the chain of a run, ahead of it, or in another one. Raises UserError: a manifest is lost."""
    entry = directory.ledger.step(head.step)
    if entry is None:
        return "ahead"
    ours = Head.of(read_manifest(directory.store, directory.path, entry))
    return "held" if ours == head else "other"


def ahead_of(directory: RunDirectory, tracker: Tracker, head: Head | None) -> str | None:
    """Lead of MLflow's run over a folder, in words; None when the folder holds all of the run.

    Raises:
        UserError: the folder's chain is not the one that MLflow holds.
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


def compare_with_mlflow(evidence: RunView, links: Chain, store: str | None) -> str | Finding:
    """The line of an audit that compares a run's chain with the head that MLflow holds.

    Args:
        evidence: of the run's folder; it may be live.
        links: its chain, as it was read.
        store: the tracking store to read; None reads the one that the folder names, where that may be used.

    Returns: words; a finding when the heads differ (error), or when they cannot be compared (note).
    """
    try:
        record = read_record(evidence.folder)
        uri = store or _store_of(evidence, record)
        shown_uri = without_passwords(uri)
        with store_errors(uri):
            client = client_of_existing_store(uri)
            run_id = record.run_id if record is not None and record.uri == shown_uri else _run_of(client, evidence)
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
        return _beyond(evidence.folder, record, held.head, place, last)
    if step not in links.digests:
        return _unknown(f"{place} was told the record {held.head}, whose manifest cannot be read here")
    if links.digests[step] != held.head.digest:
        text = f"{place} was told the record {held.head}, this folder has {links.digests[step]}: the run was rewritten"
        return Finding("error", "MLflow", text, step=step)
    if step == last:
        return f"the same head in {place}"
    return f"{place} holds an earlier one, {held.head}{coverage(step, links)}; the publisher had come no further"


def _beyond(folder: Path, record: TrackingRecord | None, head: Head, place: str, last: int | None) -> str | Finding:
    """Meaning of a head in MLflow beyond the end of the chain that was read."""
    if _committed_since(folder, head):
        return f"{place} holds {head}, which was committed after the audit began"
    placed = record.place if record is not None and (folder / LEDGER).exists() else None
    copied = placed is not None and original_of(placed, folder) is not None
    why = "a copy that was left behind" if copied else "the last steps were cut off, or an older copy was put back"
    ends = "holds no step" if last is None else f"ends with step {last}"
    text = f"{place} was told the record {head}, this folder {ends}: {why}"
    return Finding("note" if copied else "error", "MLflow", text, step=head.step)


def _committed_since(folder: Path, head: Head) -> bool:
    """True if a live run's folder holds a head by now."""
    try:
        entry = LedgerView.glance(folder / LEDGER).step(head.step)
        return entry is not None and Head.of(read_manifest(ArtifactStore(folder), folder, entry)) == head
    except UserError:  # The audit has reported the errors in these files.
        return False


def _store_of(evidence: RunView, record: TrackingRecord | None) -> str:
    """The store of a run; its run.json names it too. Raises UserError: it is unknown, or may not be used."""
    if record is not None:
        return store_of_folder(record.uri, evidence.folder, record.lay_at)
    if evidence.config is None:
        raise UserError("no tracking.json, and a configuration that cannot be read")
    return store_of_folder(evidence.config.tracking.uri, evidence.folder, None)


def _run_of(client: MlflowClient, evidence: RunView) -> str | None:
    """The MLflow run with a run's id in its tag. Raises UserError: its experiment is not known."""
    if evidence.config is None:
        raise UserError("the configuration cannot be read, which names the experiment")
    experiment = client.get_experiment_by_name(evidence.config.tracking.experiment)
    if experiment is None:
        return None
    tagged = client.search_runs(
        [experiment.experiment_id], f"tags.`{TRAINING}` = '{evidence.description.id}'", max_results=1
    )
    return str(tagged[0].info.run_id) if tagged else None


def _unknown(why: str) -> Finding:
    return Finding("note", "MLflow", f"its head could not be compared: {why}")
