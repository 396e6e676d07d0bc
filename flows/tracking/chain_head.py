"""The head of a run's chain in MLflow is an anchor outside of the run's folder.

A consistent rewrite of a folder can renew every digest in it, but not the head that MLflow got before.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flows.tracking.record import read_record
from flows.tracking.store import existing_store, store_errors, store_of_folder
from flows.tracking.tracker import HEAD, Outage
from fp8core.errors import UserError, without_passwords
from fp8core.store.manifest import Head
from fp8core.store.run_view import Finding


class PublishedHead(NamedTuple):
    head: Head
    place: str
    """The MLflow run, in words."""


def published_head(folder: Path) -> PublishedHead | Finding:
    """The head that MLflow holds of a run, or a note why it cannot be read."""
    try:
        if (record := read_record(folder)) is None:
            raise UserError("it has no tracking.json")
        if (known := record.mlflow) is None:
            raise UserError("tracking.json names no MLflow run")
        uri = store_of_folder(known.uri, folder)
        with store_errors(uri):
            run = existing_store(uri).get_run(known.run_id)
        place = f"MLflow run {run.info.run_id} in {without_passwords(uri)}"
        if (text := run.data.tags.get(HEAD)) is None:
            raise UserError(f"{place} holds no head: nothing was published")
        return PublishedHead(Head.parse(text), place)
    except (UserError, Outage, ValueError) as error:
        return Finding("note", "MLflow", f"its head could not be compared: {error}")


def compare_head(published: PublishedHead | Finding, links: Mapping[int, str]) -> str | Finding:
    """Compare it with the chain of the run's folder, which was read later. Returns words, or how they differ."""
    if isinstance(published, Finding):
        return published
    head, place = published
    last, told = max(links, default=None), f"{place} was told the record {head}"
    if last is None or head.step > last:
        ends = "holds no step" if last is None else f"ends with step {last}"
        why = "the last steps were cut off, or an older copy was put back"
        return Finding("error", "MLflow", f"{told}, this folder {ends}: {why}", step=head.step)
    if (ours := links.get(head.step)) is None:
        return Finding("note", "MLflow", f"{told}, whose manifest cannot be read here")
    if ours != head.digest:
        return Finding("error", "MLflow", f"{told}, this folder has {ours}: the run was rewritten", step=head.step)
    if head.step == last:
        return f"the same head in {place}"
    return f"{place} holds an earlier one, {head} of {last}: it vouches for the steps up to {head.step}"
