"""One life of a run on a Ray cluster, in a process of its own: it forks from a server that has imported torch."""

import io
from collections.abc import Mapping
from typing import Any

from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run, plan_of


def live(settings: Mapping[str, Any], name: str) -> None:
    """Train until the run ends, or this process does."""
    config = load_config("tiny", dict(settings))
    with (
        open_directory(config, name) as directory,
        open_run(config, plan_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)
