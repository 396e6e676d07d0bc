"""The interface of a service that shows trainings, and its entry in the registry (`flows.tracking.tracker`).

The ledger is the record of a training; a service is its picture. So every method of a `Tracker` may be repeated after
a kill, or a lost answer, with the same arguments, and leaves nothing twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flows.tracking.record import RunOutcome, ServiceRecord
from fp8core.config.run import RunConfig
from fp8core.config.shipped import TRACKERS
from fp8core.errors import UserError
from fp8core.user_code import import_attribute

CHAIN_TIP = "chain_tip"
"""Tag: the newest link of the chain of manifests that was published (`manifest.ChainTip`)."""
RUN_DIRECTORY = "run_directory"
TRAINING = "fp8_grpo.run"
"""Tag of a run and of its models: the `id` of the training's run.json."""


class Outage(RuntimeError):
    """A service does not answer, or refuses a request; one line."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The policy after a step; `metrics` are those of the step that speak about a policy."""

    step: int
    name: str
    committed_ms: int
    tags: Mapping[str, str]
    metrics: Mapping[str, float]


class Tracker:
    """One training in a service: a subclass overrides the methods that it has a use for, the others do nothing.

    Every method may raise Outage. `start` is called first, and again after an outage.
    """

    title: str
    """The service, in words."""
    uri: str
    """The service, with its password; or a folder."""
    experiment_id: str = ""
    run_id: str = ""
    published: int | None = None
    """The last step that the service says that it holds; None: tracking.json knows."""

    @property
    def page(self) -> str | None:
        return None

    def links(self) -> Mapping[str, str]:
        """Words for a user -> the address of the run, or the shell command that shows it."""
        return {} if self.page is None else {self.title: self.page}

    def start(self, settings: Mapping[str, object]) -> None:
        """Show the run as under way, and its flat settings. A setting that changed is shown beside the old value."""

    def set_tags(self, tags: Mapping[str, str], note: str | None = None) -> None:
        """Set words by which a user finds the run; `note` is Markdown, and replaces the one before."""

    def log_step(self, step: int, metrics: Mapping[str, float], committed_ms: int, tags: Mapping[str, str]) -> None:
        """Log the metrics of a committed step, at the ledger's time, and tags with them."""

    def log_artifact(self, place: str, content: str | Path | Table) -> None:
        """Write or replace a text, a copy of a file, or a table. The suffix of `place` decides how it is shown."""

    def log_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Show a policy, and where its weights are."""

    def end(self, outcome: RunOutcome, error: str | None, ended_ms: int) -> None:
        """Show how the training ended, at `ended_ms` (Unix milliseconds). `start` may follow in another process."""


@dataclass(frozen=True)
class Training:
    config: RunConfig
    name: str
    id: str
    """The `id` of run.json."""
    folder: Path
    begun_uri: str | None = None
    """`tracking.uri` when the run began."""


@dataclass(frozen=True)
class TrackerEntry:
    open: Callable[[Training, ServiceRecord | None], Tracker]
    """Opens the run that tracking.json names, else a new one. Raises UserError: a new run cannot begin there."""
    check: Callable[[RunConfig], None] = lambda config: None
    """Called before any work. Raises UserError."""


def find_tracker(service: str) -> TrackerEntry:
    """Raises UserError: there is no such entry, or the package is missing that a shipped one is named after."""
    place = f"tracking.services={service}"
    if service in TRACKERS and find_spec(service) is None:
        raise UserError(f"{place}: {service} is not installed (pip install 'fp8-grpo[{service}]')")
    entry = import_attribute(TRACKERS.get(service, service), place)
    if not isinstance(entry, TrackerEntry):
        raise UserError(f"{place}: it is no TrackerEntry (flows/tracking/tracker.py)")
    return entry
