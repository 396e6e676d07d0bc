"""The head of a run's chain in MLflow is an anchor outside of the run's folder.

A consistent rewrite of a folder can renew every digest in it, but not the head that MLflow got before. So a run whose
head is another one is written no further, and `fp8-grpo verify` reports it.
"""

from flows.tracking.record import read_record
from flows.tracking.store import existing_store, store_errors, store_of_folder
from flows.tracking.tracker import HEAD, Outage, Tracker
from fp8core.errors import UserError, without_passwords
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.json_text import shown
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.manifest import Chain, Head
from fp8core.store.run_directory import RunDirectory
from fp8core.store.run_view import Finding, RunView
from fp8core.store.step_manifests import read_manifest


def refuse_other_chain(directory: RunDirectory, tracker: Tracker) -> Head | None:
    """The head that the service holds. Raises UserError: it is of another chain than the folder's."""
    text = tracker.tag(HEAD)
    head = None if text is None else _parsed(text)
    if head is None or (entry := directory.ledger.step(head.step)) is None:
        return head
    if Head.of(read_manifest(directory.store, directory.path, entry)) != head:
        raise UserError(
            f"{directory.path}: its record of step {head.step} is not the one that was published in {tracker.page} "
            f"({shown(head.digest)}): the run was rewritten; `fp8-grpo verify` says more, and who means it deletes the "
            f"tag {HEAD} there"
        )
    return head


def compare_with_mlflow(view: RunView, links: Chain, store: str | None) -> str | Finding:
    """The line of an audit that compares the chain of a run, which may be live, with the head that MLflow holds.

    `store` None reads the one that the folder names, where that may be used. Returns words; a finding when the heads
    differ (error), or when they cannot be compared (note).
    """
    try:
        record = read_record(view.folder)
        if record is None:
            raise UserError("it has no tracking.json")
        uri = store_of_folder(record.uri, view.folder, store)
        with store_errors(uri):
            run = existing_store(uri).get_run(record.run_id)
        place = f"MLflow run {run.info.run_id} in {without_passwords(uri)}"
        if (text := run.data.tags.get(HEAD)) is None:
            raise UserError(f"{place} holds no head: nothing was published")
        head = _parsed(text)
    except (UserError, Outage) as error:
        return Finding("note", "MLflow", f"its head could not be compared: {error}")
    return _compared(view, links, head, place)


def _compared(view: RunView, links: Chain, head: Head, place: str) -> str | Finding:
    last, told = links.last, f"{place} was told the record {head}"
    if last is None or head.step > last:
        if _committed_since(view, head):
            return f"{place} holds {head}, which was committed after the audit began"
        ends = "holds no step" if last is None else f"ends with step {last}"
        why = "the last steps were cut off, or an older copy was put back"
        return Finding("error", "MLflow", f"{told}, this folder {ends}: {why}", step=head.step)
    if (ours := links.digests.get(head.step)) is None:
        return Finding("note", "MLflow", f"{told}, whose manifest cannot be read here")
    if ours != head.digest:
        return Finding("error", "MLflow", f"{told}, this folder has {ours}: the run was rewritten", step=head.step)
    if head.step == last:
        return f"the same head in {place}"
    return f"{place} holds an earlier one, {head} of {last}: it vouches for the steps up to {head.step}"


def _committed_since(view: RunView, head: Head) -> bool:
    try:
        entry = LedgerView.read(view.folder / LEDGER).step(head.step)
        return entry is not None and Head.of(read_manifest(ArtifactStore(view.folder), view.folder, entry)) == head
    except UserError:  # The audit has reported the errors in these files.
        return False


def _parsed(text: str) -> Head:
    """Raises UserError."""
    try:
        return Head.parse(text)
    except ValueError as error:
        raise UserError(f"tag {HEAD} in MLflow: {error}") from error
