"""What other processes import: one life of a run on a Ray cluster, forked from a server, and weights of ranks."""

import io
from collections.abc import Mapping
from typing import Any

from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of


def live(settings: Mapping[str, Any], name: str) -> None:
    """Train until the run ends, or this process does."""
    config = load_config("tiny", dict(settings))
    with (
        open_directory(config, name) as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)


def change_a_weight(part: Any) -> None:
    """Let the trainer of one rank hold another policy."""
    part._trainer.masters["model.norm.weight"].data[0] += 1.0
