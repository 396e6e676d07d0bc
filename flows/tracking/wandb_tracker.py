"""One training is one W&B run, also after a resume.

W&B appends rows and replaces none. So charts are drawn over a metric `step`, and a step that the run has already is not
logged again. In offline mode each process writes a folder of its own below `wandb/` in the run's folder, all with one
run id, which `wandb sync` delivers. A killed process may have lost its last rows: the next one writes all anew.
W&B itself reads its variables (WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY, ...); no key passes through this module.
"""

import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wandb

from flows.environment import program
from flows.tracking.record import RunOutcome, ServiceRecord
from flows.tracking.tracker import Checkpoint, Outage, Table, Tracker, TrackerEntry, Training
from fp8core.config.run import RunConfig
from fp8core.errors import UserError, first_line, printable_lines, without_passwords

STEP = "step"
FILES = "training"
"""Folder of a run's files that has ours: W&B writes a config.yaml of its own beside it."""
_INIT_SECONDS, _FINISH_SECONDS = 30.0, 60.0
_LONGEST_TAG = 64


class WandbTracker(Tracker):
    title = "W&B"

    def __init__(self, training: Training, run_id: str) -> None:
        self._training = training
        self.run_id = run_id
        self.experiment_id = training.config.tracking.experiment
        settings = _setup().settings
        self.uri, self._offline = settings.base_url, settings.mode != "online"
        self._run: Any = None
        self._tags = dict[str, str]()

    def connect(self) -> None:
        """Begin the run in W&B, or go on with it. Raises Outage."""
        training = self._training
        settings = wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            init_timeout=_INIT_SECONDS,
            finish_timeout=_FINISH_SECONDS,
            finish_timeout_raises=True,
            x_disable_stats=not training.config.tracking.system_metrics,
        )
        with _wandb_errors():
            try:
                self._run = wandb.init(
                    project=self.experiment_id,
                    id=self.run_id,
                    name=training.name,
                    dir=training.folder,
                    resume=None if self._offline else "allow",
                    # Several trainings may run in this process.
                    reinit="create_new",
                    settings=settings,
                )
            except Exception:
                # Else W&B's own process holds the id, and refuses it the next time.
                _setup().ensure_service().inform_finish(self.run_id)
                raise
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)
            self._last_step = int(self._run.summary.get(STEP, -1))
            self.published = None if self._offline else self._last_step

    @property
    def page(self) -> str | None:
        return None if self._offline or self._run is None else str(self._run.url)

    def links(self) -> Mapping[str, str]:
        if not self._offline:
            return super().links()
        folders = f"{shlex.quote(str(self._training.folder / 'wandb'))}/offline-run-*-{self.run_id}"
        return {"W&B, offline": f"{program('wandb')} sync {folders}"}

    def start(self, settings: Mapping[str, object]) -> None:
        if self._run is None:
            self.connect()
        with _wandb_errors():
            self._run.config.update(_nested_settings(settings), allow_val_change=True)
            self._run.summary.update({"outcome": "RUNNING", "error": ""})

    def set_tags(self, tags: Mapping[str, str], note: str | None = None) -> None:
        self._tags |= {name: printable_lines(text) for name, text in tags.items()}
        with _wandb_errors():
            self._run.summary.update(self._tags)
            words = (f"{name}: {text}" for name, text in self._tags.items())
            self._run.tags = tuple(word for word in words if len(word) <= _LONGEST_TAG)
            if note is not None:
                self._run.notes = note

    def log_step(self, step: int, metrics: Mapping[str, float], committed_ms: int, tags: Mapping[str, str]) -> None:
        with _wandb_errors():
            if step > self._last_step:
                self._run.log({STEP: step, **metrics})
                self._last_step = step
            self._run.summary.update(dict(tags))

    def log_artifact(self, place: str, content: str | Path | Table) -> None:
        """A table is a panel, all others are files of the run."""
        name = Path(place)
        with _wandb_errors():
            if isinstance(content, Table):
                rows = [[_json_value(cell) for cell in row] for row in content.rows]
                table = wandb.Table(columns=list(content.columns), data=rows, allow_mixed_types=True)
                # One panel has the samples of all steps.
                self._run.log({name.parts[0].removesuffix(".json"): table})
            else:
                file = Path(self._run.dir) / FILES / name
                file.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, Path):
                    shutil.copyfile(content, file)
                else:
                    file.write_text(content if name.suffix == ".json" else printable_lines(content), "utf-8")
                self._run.save(str(file), base_path=self._run.dir, policy="now")

    def log_checkpoint(self, checkpoint: Checkpoint) -> None:
        """As an artifact that refers to the folder: the weights stay where they are."""
        metadata = {**checkpoint.tags, **checkpoint.metrics}
        artifact = wandb.Artifact(checkpoint.name, type="model", metadata=metadata)
        folder = Path(checkpoint.tags["checkpoint"])
        with _wandb_errors():
            if folder.exists():
                artifact.add_reference(folder.as_uri(), checksum=False)
            self._run.log_artifact(artifact, aliases=[f"step-{checkpoint.step}"])

    def end(self, outcome: RunOutcome, error: str | None, ended_ms: int) -> None:
        """A failed run has state `failed`; one that was stopped is `preempted`: it may go on."""
        if (run := self._run) is None:
            return
        with _wandb_errors():
            run.summary.update({"outcome": outcome, "error": printable_lines(error or "")})
            if outcome == "KILLED":
                run.mark_preempting()
            self._run = None
            run.finish(exit_code=0 if outcome == "FINISHED" else 1)


def open_tracker(training: Training, service: ServiceRecord | None) -> WandbTracker:
    """The run that tracking.json names. Offline, one whose last process was killed makes room for a new run."""
    if service is not None and not service.told and _setup().settings.mode != "online":
        for folder in (training.folder / "wandb").glob(f"offline-run-*-{service.run_id}"):
            shutil.rmtree(folder)
        service = None
    tracker = WandbTracker(training, uuid.uuid4().hex[:16] if service is None else service.run_id)
    try:
        tracker.connect()
    except Outage as error:
        if service is None:
            raise UserError(str(error)) from error
        # The publisher tries again.
    return tracker


def check_login(config: RunConfig) -> None:
    """Raises UserError: there is no API key, in WANDB_API_KEY or in the files of `wandb login`."""
    if _setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise UserError("tracking.services=wandb: no API key; run `wandb login`, or set WANDB_MODE=offline")


TRACKER = TrackerEntry(open_tracker, check_login)


def _setup() -> Any:
    """W&B's own state of this process, which has read its variables and files."""
    return wandb.setup(settings=wandb.Settings(silent=True))


def _nested_settings(settings: Mapping[str, object]) -> dict[str, Any]:
    """W&B takes no points in the names of settings."""
    tree = dict[str, Any]()
    for key, value in settings.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = _json_value(value)
    return tree


def _json_value(value: object) -> object:
    return printable_lines(value) if isinstance(value, str) else value


@contextmanager
def _wandb_errors() -> Iterator[None]:
    """Errors of W&B in the block become Outage."""
    try:
        yield
    except Exception as error:
        # W&B's own errors have no public class in common.
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "wandb":
            raise
        raise Outage(without_passwords(f"W&B: {first_line(error)}")) from error
