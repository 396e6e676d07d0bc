"""One life of a run on a Ray cluster, in a process of its own: it forks from a server that has imported torch."""

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.context import RunContext
from fp8core.run.execute import TaskResult
from fp8core.run.loop import Execution, train
from fp8core.run.open import open_directory, open_run, plan_of


class NotedMembers(Execution):
    """Writes the processes of the cluster to a file, whenever there are new ones."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def stage_done(self, run: RunContext, name: str, result: TaskResult) -> None:
        assert run.cluster is not None
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps([place["pid"] for place in run.cluster.places().values()]))
        os.replace(part, self._file)


def live(settings: Mapping[str, Any], name: str, members: Path) -> None:
    """Train until the run ends, or this process does."""
    config = load_config("tiny", dict(settings))
    with (
        open_directory(config, name) as directory,
        open_run(config, plan_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run, NotedMembers(members))
