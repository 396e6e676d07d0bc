"""The live parts of a run in this process."""

import gc
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.config.step_graph import StepGraph
from fp8core.data.prompt import PromptSource
from fp8core.environments.pool import EnvironmentPool
from fp8core.models.architecture import Architecture
from fp8core.models.families import parameter_shapes
from fp8core.models.tokenizer import Tokenizer
from fp8core.report.console import Console
from fp8core.rewards.verifier import Verifier
from fp8core.rollout.engine import Probe, RolloutEngine
from fp8core.store.ledger import START, LedgerView
from fp8core.store.run_directory import RunDirectory
from fp8core.training.saved_state import header_of
from fp8core.training.trainer import Trainer

if TYPE_CHECKING:
    from fp8core.cluster.workers import Cluster
    from fp8core.run.policy import PolicyVersion


@dataclass
class RunContext:
    """One training in this process. `trainer` and `engine` are None until the initial policy exists (`run.start`)."""

    config: RunConfig
    config_digest: str
    code_version: str
    graph: StepGraph
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
    cluster: "Cluster | None" = field(default=None, repr=False)
    trainer: Trainer | None = field(default=None, repr=False)
    engine: RolloutEngine | None = field(default=None, repr=False)
    reference: Trainer | None = field(default=None, repr=False)
    probes: list[Probe] | None = field(default=None, repr=False)
    teacher: Trainer | None = field(default=None, repr=False)
    teacher_digest: str | None = None
    loss_source: str | None = None
    """Digest of the file of a policy loss of the user's own, as the run began with it."""
    kept_policies: "dict[int, PolicyVersion]" = field(default_factory=dict, repr=False)
    """By version, those that wrote what a step may still learn from (`run.resume`)."""
    replayed: LedgerView | None = field(default=None, repr=False)
    """The ledger of the run that a replay makes again: it has choices that depended on timing, and answers."""
    environment: EnvironmentPool | None = field(default=None, repr=False)
    """What answers episodes; None without `environment`, and in a replay, which takes the recorded answers."""
    environment_description: Mapping[str, JsonValue] = field(default_factory=dict)
    environment_seconds: dict[int, list[float]] = field(default_factory=dict, repr=False)
    """By step, what each answer of an environment took."""
    halted: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when a task of the step failed or the run was interrupted: parallel tasks must stop."""

    def check_halted(self) -> None:
        if self.halted.is_set():
            raise RuntimeError("another task of the step has failed")

    def replace_members(self) -> None:
        assert self.cluster is not None, "a process of a cluster was lost"
        self.engine = self.trainer = self.reference = self.teacher = None
        # They lie in the memory of what is gone.
        self.kept_policies.clear()
        # The step begins again, as after a kill.
        self.environment_seconds.clear()
        self.halted.clear()
        self.cluster.replace()
        self.cluster.gang.check_shared(self.directory.path)

    def initial_policy(self) -> Mapping[str, Tensor]:
        """Of the warm start, or `base`. Raises StoredFileError: damaged, or of another model."""
        ref = self.directory.ledger.tasks(START)["warm_start"].outputs.get("weights")
        if ref is None:
            return self.base
        weights = self.directory.store.file_tensors(ref)
        header_of(self.directory.store.path(ref), parameter_shapes(self.arch))
        return weights

    def ready_trainer(self) -> Trainer:
        assert self.trainer is not None, "the run has no policy yet"
        return self.trainer

    def ready_engine(self) -> RolloutEngine:
        assert self.engine is not None, "the run has no policy yet"
        return self.engine

    def sleep_engine(self) -> None:
        if self.config.pipeline.in_turn:
            self.ready_engine().sleep()


_live: dict[Path, RunContext] = {}


def register(run: RunContext) -> None:
    assert run.directory.path not in _live, f"{run.directory.path} is live already"
    _live[run.directory.path] = run


def live_run(path: Path) -> RunContext:
    run = _live[path]
    torch.set_num_threads(run.config.threads)
    return run


def release(path: Path) -> None:
    run = _live.pop(path, None)
    if run is None:
        return
    # Weights in a cycle that was frozen would stay.
    gc.unfreeze()
    if run.cluster is not None:
        # Parts on ranks would be dropped only after the call that a rank computes, which may take an hour.
        run.cluster.close()
    for part in (run.engine, run.trainer, run.reference, run.teacher):
        if part is not None:
            part.close()


def gc_freeze() -> None:
    if torch.cuda.is_available():
        gc.collect()
    gc.freeze()
