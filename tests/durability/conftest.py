"""Lives of one run: forked children that train until they end or are killed, and what must hold after the last.

A child inherits torch, so that a life costs a tenth of a second and not the seconds of an import. It runs the loop
without Prefect and MLflow. Every run has one group of completions a wave, so that a step has several shards.
"""

import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from manifest_chain import first_broken_link

from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.durable import folder_digest
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.rollout.engine import Completion, PromptGroup, Sampling, sample_seed
from fp8core.run.context import RunContext
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.store.artifacts import ArtifactStore, RolloutShards
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import Entry, Ledger, LedgerView, SegmentEntry, TaskEntry
from fp8core.store.manifest import StepManifest

SETTINGS: dict[str, Any] = {
    "steps": 5,
    "architecture.num_layers": 1,
    "rollout.max_batch": 4,
    "rollout.max_new_tokens": 8,
    "checkpoint.keep": 1,
}
LONGEST_LIFE_SECONDS = 120

Note = Callable[..., None]
Groups = set[tuple[int, int]]


class Watch:
    """Notified in a life of everything that becomes durable: a line of the ledger, a shard of finished groups."""

    note: Note = staticmethod(lambda **what: None)

    def __init__(self) -> None:
        self.durable: list[str] = []

    def before(self, what: str) -> None:
        """`what` is computed, its artifacts are stored; it does not count yet."""

    def after(self, what: str) -> None:
        self.durable.append(what)
        self.note(durable=what)

    def die(self, where: str) -> None:
        self.note(died=where)
        os.kill(os.getpid(), signal.SIGKILL)


class Killer(Watch):
    """SIGKILL right before, or right after, a thing becomes durable."""

    def __init__(self, before: str | None, after: str | None) -> None:
        super().__init__()
        self._before, self._after = before, after

    def before(self, what: str) -> None:
        if what == self._before:
            self.die(f"before {what}")

    def after(self, what: str) -> None:
        super().after(what)
        if what == self._after:
            self.die(f"after {what}")


@dataclass(frozen=True)
class Instant:
    """Right before the n-th audit event of a name with an argument that matches, once something has become durable."""

    event: str
    pattern: str
    count: int = 1
    since: str | None = None


class WatchedLedger(Ledger):
    watch: Watch

    def append(self, *entries: Entry) -> None:
        for entry in entries:
            self.watch.before(_name(entry))
        super().append(*entries)
        for entry in entries:
            self.watch.after(_name(entry))


def _name(entry: Entry) -> str:
    match entry:
        case SegmentEntry():
            return entry.event
        case TaskEntry():
            return f"{entry.step} {entry.task}"
    return f"{entry.step} {entry.event}"


class WatchedEngine:
    """A rollout engine that notes the requested groups of iterations, and those that have become durable."""

    def __init__(self, run: "WatchedRun") -> None:
        self._engine, self._run = run.workers.engine, run

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        places = {group.group: self._run.places.get(group.seeds[0]) for group in groups}
        self._run.watch.note(asked=[place for place in places.values() if place is not None])
        for batch in self._engine.generate(groups, sampling):
            finished = [place for number in {done.group: None for done in batch} if (place := places[number])]
            for step, group in finished:
                self._run.watch.before(f"{step} group {group}")
            yield batch
            # The consumer comes back for more when it has stored what it got.
            for step, group in finished:
                self._run.watch.after(f"{step} group {group}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass
class WatchedRun(RunContext):
    watch: Watch = field(default_factory=Watch)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def engine(self) -> Any:
        return WatchedEngine(self)


@dataclass(frozen=True)
class Life:
    """The end of a child (exit code, or minus the signal), and its notes."""

    status: int
    notes: list[dict[str, Any]]

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    @property
    def finished(self) -> bool:
        return self.status == 0

    def said(self, key: str) -> list[Any]:
        return [note[key] for note in self.notes if key in note]

    @property
    def asked(self) -> Groups:
        return {tuple(place) for places in self.said("asked") for place in places}

    @property
    def error(self) -> str:
        """The one line that a mistake or a damaged file ends with."""
        assert self.status == 2, (self.status, *self.said("traceback"))
        (line,) = self.said("error")
        assert len(line.splitlines()) == 1, line
        return str(line)


class Training:
    """A run in its folder, and its lives one after the other."""

    def __init__(self, config: RunConfig, name: str, scratch: Path) -> None:
        self.config, self.name = config, name
        self.folder = config.runs / name
        self.lives: list[Life] = []
        self.pid = 0
        self._scratch = scratch
        self._finished: Groups = set()

    def live(self, **ways: Any) -> Life:
        """One life to its end; ways to die early: what `begin` takes."""
        self._finished |= self.durable_groups()
        self.begin(**ways)
        life = self.end()
        assert not life.asked & self._finished, "a finished group was generated again"
        return life

    def begin(
        self,
        *,
        before: str | None = None,
        after: str | None = None,
        watch: Watch | None = None,
        audit: Instant | None = None,
        arrange: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a life that dies right before, or right after, a thing such as `3 train` becomes durable, or at an
        instant. It notifies `watch` instead, and calls `arrange` first."""
        notes = os.open(self._notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.pid = os.fork()
        if self.pid == 0:
            self._child(notes, watch or Killer(before, after), audit, arrange)
        os.close(notes)

    def kill(self) -> None:
        """SIGKILL, unless it has ended by itself."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> Life:
        _, status = os.waitpid(self.pid, 0)
        life = Life(os.waitstatus_to_exitcode(status), self.notes())
        assert not life.said("traceback"), "".join(life.said("traceback"))
        assert life.status in (0, 2, -signal.SIGKILL), life
        self.lives.append(life)
        return life

    def notes(self) -> list[dict[str, Any]]:
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [json.loads(line) for line in lines]

    def durable_groups(self) -> Groups:
        """Groups of iterations that are finished and stored, alone or as a whole step's rollouts."""
        if not (self.folder / LEDGER).exists():
            return set()
        ledger, prompts = self.ledger, range(self.config.rollout.prompts_per_step)
        durable = {(step, group) for step in self._steps() if "rollout" in ledger.tasks(step) for group in prompts}
        for folder in (self.folder / "shards").glob("*"):
            shards = RolloutShards(folder).read()
            durable |= {(int(folder.name), group) for group in (shards["group"].to_pylist() if shards else [])}
        return durable

    @property
    def ledger(self) -> LedgerView:
        return LedgerView.read(self.folder / LEDGER)

    def lines(self) -> list[dict[str, Any]]:
        """The ledger as it lies on disk."""
        return [json.loads(line) for line in (self.folder / LEDGER).read_text().splitlines()]

    def manifests(self) -> list[StepManifest]:
        store, steps = ArtifactStore(self.folder), self.ledger.steps()
        contents = [json.dumps(store.get_json(steps[step].manifest)) for step in sorted(steps)]
        return [StepManifest.model_validate_json(content) for content in contents]

    def must_equal(self, whole: "Training") -> None:
        """The same weights, records, artifacts and last checkpoint as an uninterrupted run; no leftovers."""
        assert self.lives[-1].finished
        assert self.lives[-1].said("weights") == whole.lives[-1].said("weights")
        manifests = self.manifests()
        assert [manifest.record for manifest in manifests] == [manifest.record for manifest in whole.manifests()]
        assert first_broken_link(manifests) is None
        for step, manifest in enumerate(manifests):
            beside = self.folder / "manifests" / f"{step:05d}.json"
            assert StepManifest.model_validate_json(beside.read_text()).record == manifest.record
        assert {*whole.stored()} <= {*self.stored()}, "an artifact is missing"
        assert self.checkpoints()[-1] == whole.checkpoints()[-1]
        left = [path for path in self.folder.rglob(".*") if path.suffix in (".tmp", ".partial")]
        assert left + list((self.folder / "shards").iterdir()) == [], "what killed lives left was not removed"

    def stored(self) -> list[str]:
        """Names of the artifacts of the steps, without manifests, which hold timings."""
        manifests = {entry.manifest.uri for entry in self.ledger.steps().values()}
        files = (path.relative_to(self.folder).as_posix() for path in (self.folder / "artifacts").rglob("*.*"))
        return sorted(file for file in files if file not in manifests)

    def checkpoints(self) -> list[tuple[str, str]]:
        """The remaining checkpoints, which must match the ledger."""
        entries = {entry.uri: entry.digest for entry in self.ledger.checkpoints()}
        folders = {f"checkpoints/{folder.name}": folder for folder in sorted((self.folder / "checkpoints").iterdir())}
        found = [(uri, folder_digest(folder)) for uri, folder in folders.items()]
        assert set(found) <= entries.items(), "half a checkpoint, or one that is not in the ledger"
        return found

    def must_have_committed_once(self, whole: "Training") -> None:
        """The ledger holds the entries of an uninterrupted run, in their order, with rising commit times."""
        lines = [line for line in self.lines() if line["event"] != "segment"]
        others = [line for line in whole.lines() if line["event"] != "segment"]
        assert [_place(line) for line in lines] == [_place(line) for line in others]
        committed = [line["committed_ms"] for line in lines if line["event"] == "step"]
        assert all(first < second for first, second in pairwise(committed)), committed
        assert all(line["seconds"] >= 0 for line in lines if line["event"] == "task")

    @property
    def _notes(self) -> Path:
        return self._scratch / f"{len(self.lives)}.jsonl"

    def _steps(self) -> range:
        return range(1, self.config.steps + 1)

    def _child(self, notes: int, watch: Watch, audit: Instant | None, arrange: Callable[[], None]) -> None:
        """Never returns: a child of pytest must not go on with its tests."""
        status = 1
        try:
            watch.note = lambda **what: os.write(notes, json.dumps(what).encode() + b"\n") and None
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LONGEST_LIFE_SECONDS)
            arrange()
            if audit is not None:
                _die_at(watch, audit)
            watch.note(weights=self.train(watch))
            status = 0
        except UserError as error:
            watch.note(error=str(error))
            status = 2
        finally:
            if status == 1:
                watch.note(traceback=traceback.format_exc())
            os._exit(status)

    def train(self, watch: Watch) -> str:
        """The work of a child; returns the digest of the final weights."""
        config, graph = self.config, graph_of(self.config)
        prompts = range(config.rollout.most_prompts)
        places = {
            sample_seed(config.seed, step, group, 0): (step, group) for step in self._steps() for group in prompts
        }
        with open_directory(config, self.name) as directory:
            directory.ledger.close()
            directory.ledger = ledger = WatchedLedger.open(directory.path / LEDGER)
            ledger.watch = watch
            with open_run(config, graph, directory, Console(io.StringIO(), config.steps)) as run:
                watched = WatchedRun(**vars(run), watch=watch, places=places)
                train(watched)
                return watched.trainer.digest()


def _place(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["event"], line["step"], line.get("task"), line.get("outputs"), line.get("weights_digest")


def _die_at(watch: Watch, instant: Instant) -> None:
    left = instant.count

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if name != instant.event or (instant.since is not None and instant.since not in watch.durable):
            return
        paths = [str(argument) for argument in arguments if isinstance(argument, str | os.PathLike)]
        if any(re.search(instant.pattern, path) for path in paths):
            left -= 1
            if left == 0:
                watch.die(f"{name} {paths[0]}")

    sys.addaudithook(hook)


Train = Callable[..., Training]


@pytest.fixture(scope="session")
def new_training(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A run that has not lived yet: new_training(name, **{"checkpoint.every": 3})."""
    runs = tmp_path_factory.mktemp("runs")

    def new(name: str, runs: Path = runs, **settings: Any) -> Training:
        config = load_config("tiny", {**small, **SETTINGS, "runs": str(runs), **settings})
        return Training(config, name, tmp_path_factory.mktemp("notes"))

    torch.set_num_threads(1)
    # In this process, so that children inherit whatever is imported or set up when it is first used.
    new("inherited", steps=1).train(Watch())
    return new


@pytest.fixture(scope="session")
def whole(new_training: Train) -> Training:
    """A run that nothing interrupted."""
    training = new_training("whole")
    assert training.live().finished
    training.must_equal(training)
    return training


@pytest.fixture(scope="session")
def instant() -> type[Instant]:
    return Instant
