"""Small runs without Prefect and MLflow, made by `tasks.loop`."""

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fp8core.config.load import load_config, reload_config
from fp8core.report.console import Console
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.ledger import LedgerView
from fp8core.store.run_directory import LEDGER, read_description
from fp8core.workers.live import LiveRun
from tasks.loop import train
from tasks.opening import open_directory, open_run, plan_of

STEPS = 4

# Three updates of a warm start that knows nothing yet; a checkpoint after steps 2 and 4.
SMALL: dict[str, Any] = {
    "steps": STEPS,
    "warm_start.steps": 3,
    "warm_start.batch_size": 16,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "evaluation.prompts": 8,
    "evaluation.every": 2,
    "checkpoint.every": 2,
    "data.chain.min_operands": 3,
}


class Copy:
    """A run's folder that a test may damage, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""

    @property
    def ledger(self) -> LedgerView:
        return LedgerView.read(self.folder / LEDGER)

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.folder)

    @property
    def records(self) -> list[dict[str, Any]]:
        steps = self.ledger.steps()
        return [self.store.get_json(steps[index].manifest)["record"] for index in sorted(steps)]

    def file(self, index: int, artifact: str) -> Path:
        return self.folder / self.ledger.artifacts(index)[artifact].uri

    def cut_after(self, index: int, task: str) -> None:
        """Drop every line of the ledger after a task's, as a kill would."""
        path = self.folder / LEDGER
        lines = path.read_text().splitlines(keepends=True)
        last = next(i for i, line in enumerate(lines) if f'"step":{index},"task":"{task}"' in line)
        path.write_text("".join(lines[: last + 1]))

    @contextmanager
    def opened(self, new_code: bool = False, **overrides: Any) -> Iterator[LiveRun]:
        """The run, live; what it says on the console is in `said` afterwards."""
        described = read_description(self.folder)
        assert described is not None
        config = reload_config(described.config, {"runs": str(self.folder.parent), **overrides})
        console = io.StringIO()
        try:
            with (
                open_directory(config, self.folder.name, new_code=new_code) as directory,
                open_run(config, plan_of(config), directory, Console(console, config.steps)) as run,
            ):
                yield run
        finally:
            self.said = console.getvalue()

    def resume(self, **options: Any) -> None:
        with self.opened(**options) as run:
            train(run)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A run of `STEPS` steps that nothing happened to; for reading only."""
    return make_run(tmp_path_factory.mktemp("runs"), SMALL)


def make_run(runs: Path, overrides: dict[str, Any]) -> Copy:
    config = load_config("tiny", {**overrides, "runs": str(runs)})
    with (
        open_directory(config, "whole") as directory,
        open_run(config, plan_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)
    return Copy(runs / "whole")


@pytest.fixture
def copy(whole: Copy, tmp_path: Path) -> Copy:
    """A copy of the whole run, with the shelf of warm starts beside it."""
    shutil.copytree(whole.folder.parent, tmp_path / "runs")
    return Copy(tmp_path / "runs" / "whole")


Change = Callable[[Path], None]
