"""What other processes import: one life of a run on a Ray cluster, forked from a server, and weights of ranks."""

import io
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8core.config.load import load_config
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import InitialWeights
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run


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


class OtherElsewhere(InitialWeights):
    """Weights that come out differently in one process."""

    def __init__(self, arch: Architecture, seed: int, process: int) -> None:
        super().__init__(arch, seed)
        self._arguments = arch, seed, process

    def __reduce__(self) -> tuple[Any, ...]:
        return OtherElsewhere, self._arguments

    def __getitem__(self, name: str) -> Tensor:
        found, process = super().__getitem__(name), self._arguments[-1]
        return found * 2 if (name, os.getpid()) == ("model.norm.weight", process) else found
