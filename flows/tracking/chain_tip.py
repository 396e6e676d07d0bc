"""The tip of a run's chain in MLflow is an anchor outside of the run's folder.

A consistent rewrite of a folder can renew every digest in it, but not the tip that MLflow got before.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flows.tracking.record import read_record
from flows.tracking.store import existing_store, store_errors, store_of_folder
from flows.tracking.tracker import CHAIN_TIP, Outage
from fp8core.errors import UserError, without_passwords
from fp8core.store.manifest import ChainTip
from fp8core.store.run_view import Finding


class PublishedTip(NamedTuple):
    tip: ChainTip
    place: str
    """The MLflow run, in words."""


def published_tip(folder: Path) -> PublishedTip | Finding:
    """The tip that MLflow holds of a run, or a note why it cannot be read."""
    try:
        if (record := read_record(folder)) is None:
            raise UserError("it has no tracking.json")
        if (service := record.mlflow) is None:
            raise UserError("tracking.json names no MLflow run")
        uri = store_of_folder(service.uri, folder)
        with store_errors(uri):
            run = existing_store(uri).get_run(service.run_id)
        place = f"MLflow run {run.info.run_id} in {without_passwords(uri)}"
        if (text := run.data.tags.get(CHAIN_TIP)) is None:
            raise UserError(f"{place} holds no tip: nothing was published")
        return PublishedTip(ChainTip.parse(text), place)
    except (UserError, Outage, ValueError) as error:
        return Finding("note", "MLflow", f"its tip could not be compared: {error}")


def compare_tip(published: PublishedTip | Finding, links: Mapping[int, str]) -> str | Finding:
    """Compare it with the chain of the run's folder, which was read later. Returns words, or how they differ."""
    if isinstance(published, Finding):
        return published
    tip, place = published
    last, prefix = max(links, default=None), f"{place} was told the record {tip}"
    if last is None or tip.step > last:
        ends = "holds no step" if last is None else f"ends with step {last}"
        why = "the last steps were cut off, or an older copy was put back"
        return Finding("error", "MLflow", f"{prefix}, this folder {ends}: {why}", step=tip.step)
    if (ours := links.get(tip.step)) is None:
        return Finding("note", "MLflow", f"{prefix}, whose manifest cannot be read here")
    if ours != tip.digest:
        return Finding("error", "MLflow", f"{prefix}, this folder has {ours}: the run was rewritten", step=tip.step)
    if tip.step == last:
        return f"the same tip in {place}"
    return f"{place} holds an earlier one, {tip} of {last}: it vouches for the steps up to {tip.step}"
