"""What a run keeps alive between tasks: its folder, its data, its trainer and its engine, in this process.

Tasks exchange references and ask here for the rest. Nothing here decides what happens next; flows do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from fp8core.config.check import Plan
from fp8core.config.run import RunConfig
from fp8core.data.prompt import PromptSource
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.report.console import Console
from fp8core.rewards.verifier import Verifier
from fp8core.rollout.engine import RolloutEngine
from fp8core.store.ledger import START
from fp8core.store.run_directory import RunDirectory
from fp8core.training.trainer import Trainer
from fp8core.workers.heap import thaw_heap


@dataclass
class LiveRun:
    """One training in this process.

    `trainer` and `engine` exist once the initial policy does (`tasks.start`); before that they are None.
    """

    config: RunConfig
    config_digest: str
    code_version: str
    plan: Plan
    directory: RunDirectory
    tokenizer: Tokenizer
    arch: Architecture
    source: PromptSource
    verifier: Verifier
    model_revision: str | None
    machine: dict[str, JsonValue]
    git: dict[str, JsonValue]
    console: Console
    base: Mapping[str, Tensor] = field(repr=False)
    trainer: Trainer | None = field(default=None, repr=False)
    engine: RolloutEngine | None = field(default=None, repr=False)
    reference: Trainer | None = field(default=None, repr=False)

    def initial_policy(self) -> Mapping[str, Tensor]:
        """Weights of policy 0: what the warm start made, or the checkpoint the run began with."""
        weights = self.directory.ledger.tasks(START)["warm_start"].outputs.get("weights")
        return self.base if weights is None else self.directory.store.get_tensors(weights)

    def ready_trainer(self) -> Trainer:
        """The trainer; the run must have been started."""
        assert self.trainer is not None, "the run has no policy yet"
        return self.trainer

    def ready_engine(self) -> RolloutEngine:
        """The rollout engine; the run must have been started."""
        assert self.engine is not None, "the run has no policy yet"
        return self.engine


_live: dict[Path, LiveRun] = {}


def register(run: LiveRun) -> None:
    """Make a run reachable by its folder."""
    assert run.directory.path not in _live, f"{run.directory.path} is live already"
    _live[run.directory.path] = run


def live_run(path: Path) -> LiveRun:
    """The run of a folder. Torch's thread count belongs to a thread, so it is set for whoever asks."""
    run = _live[path]
    torch.set_num_threads(run.config.threads)
    return run


def release(path: Path) -> None:
    """Close engine and trainers and forget the run; unknown paths are ignored. Who opened the folder closes it."""
    run = _live.pop(path, None)
    if run is None:
        return
    # Weights in a cycle that was frozen would stay.
    thaw_heap()
    for part in (run.engine, run.trainer, run.reference):
        if part is not None:
            part.close()
