"""The protocol of a service that shows trainings; MLflow is one (`mlflow_tracker`).

The ledger is the record of a training; a service is its picture. So every method of a `Tracker` may be repeated after
a kill, or a lost answer, with the same arguments, and leaves nothing twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

RunOutcome = Literal["FINISHED", "FAILED", "KILLED"]
HEAD = "chain_head"
"""Tag: the newest link of the chain of manifests that was published (`manifest.Head`)."""
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


class Tracker(Protocol):
    """One training in a service. Every method raises Outage."""

    uri: str
    """The service, with its password."""

    def start(self, settings: Mapping[str, object]) -> None:
        """Show the run as under way, and its flat settings. A setting that changed is shown beside the old value."""

    def set_tags(self, tags: Mapping[str, str], note: str | None = None) -> None:
        """Set words by which a user finds the run; `note` is Markdown, and replaces the one before."""

    def log_step(self, step: int, metrics: Mapping[str, float], committed_ms: int, tags: Mapping[str, str]) -> None:
        """Log the metrics of a committed step, at the ledger's time, and tags with them."""

    def log_artifact(self, place: str, content: str | Path | Table) -> None:
        """Write or replace a text, a copy of a file, or a table. The suffix of `place` decides how it is shown."""

    def log_checkpoint(self, checkpoint: Checkpoint) -> None: ...

    def end(self, outcome: RunOutcome, error: str | None, ended_ms: int) -> None: ...
