"""The parts of a run that steps may use, and those that the loop of a training owns."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from fp8core.rewards.answers import Answers
from fp8core.rewards.verifier import Verifier
from fp8core.rollout.engine import Probe, RolloutEngine
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.ledger import START, LedgerView
from fp8core.store.run_directory import RunDirectory
from fp8core.training.saved_state import header_of
from fp8core.training.trainer import Trainer

if TYPE_CHECKING:
    from fp8core.cluster.workers import Cluster
    from fp8core.run.policy import PolicyVersion


@dataclass
class Workers:
    """The live trainer and engine, and what they keep from step to step. Those that are None are not built yet."""

    trainer: Trainer | None = None
    engine: RolloutEngine | None = None
    reference: Trainer | None = None
    teacher: Trainer | None = None
    teacher_digest: str | None = None
    probes: list[Probe] | None = None
    policy_versions: "dict[int, PolicyVersion]" = field(default_factory=dict)
    """By version, the policies that wrote what a step may still learn from (`run.resume`)."""

    def close(self) -> None:
        for worker in (self.engine, self.trainer, self.reference, self.teacher):
            if worker is not None:
                worker.close()


@dataclass(kw_only=True)
class StepContext:
    """The parts of a run that a step may use: the interface of a user's own step."""

    config: RunConfig
    graph: StepGraph
    """The pipeline; it has the names of artifacts."""
    store: ArtifactStore
    """Reads and writes the artifacts of this run."""
    ledger: LedgerView
    """Finished tasks and steps of this run; only to be read."""
    source: PromptSource
    tokenizer: Tokenizer
    arch: Architecture
    verifier: Verifier
    answers: Answers
    """Replies that judges gave."""
    environment: EnvironmentPool | None = field(default=None, repr=False)
    """Replies to episodes; None without `environment`, and in a replay, which takes the recorded replies."""
    replayed: LedgerView | None = field(default=None, repr=False)
    """The ledger of the run that a replay makes again: it has choices that depended on timing, and replies."""
    console: Console
    workers: Workers = field(default_factory=Workers, repr=False)
    reply_seconds: dict[int, list[float]] = field(default_factory=dict, repr=False)
    """By step, what each reply of an environment took."""
    draft_counts: dict[int, Counter[str]] = field(default_factory=dict, repr=False)
    """By step, what came of drafts (`rollout.drafts`)."""
    build_reference: Callable[[], Trainer] = field(repr=False)
    """Load the policy that GRPO started from."""
    build_teacher: Callable[[], Trainer] = field(repr=False)
    rebuild_policies: Callable[[Sequence[int]], None] = field(repr=False)
    """Make `workers.policy_versions` have these versions, ascending; the trainer holds its own again afterwards."""
    halted: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when a task of the step failed or the run was interrupted: parallel tasks must stop."""

    @property
    def trainer(self) -> Trainer:
        """Holds the newest policy. Only a step with `redo=True` may change it."""
        assert self.workers.trainer is not None, "the run has no policy yet"
        return self.workers.trainer

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the policy of the last sync."""
        assert self.workers.engine is not None, "the run has no policy yet"
        return self.workers.engine

    def check_halted(self) -> None:
        """Raises RuntimeError: another task of the step failed. A step that runs beside others calls it often."""
        if self.halted.is_set():
            raise RuntimeError("another task of the step has failed")

    def sleep_engine(self) -> None:
        """Before the trainer computes: where both take turns, they share the memory of a device."""
        if self.config.pipeline.in_turn:
            self.engine.sleep()


@dataclass(kw_only=True)
class RunContext(StepContext):
    """One training in this process. Its loop owns the fields that steps do not see."""

    config_digest: str
    code_version: str
    directory: RunDirectory
    model_revision: str | None
    machine: dict[str, JsonValue]
    git: dict[str, JsonValue]
    base: Mapping[str, Tensor] = field(repr=False)
    """Weights of the model as it was loaded."""
    cluster: "Cluster | None" = field(default=None, repr=False)
    loss_source: str | None = None
    """Digest of the file of a policy loss of the user's own, as the run began with it."""
    environment_description: Mapping[str, JsonValue] = field(default_factory=dict)

    def replace_members(self) -> None:
        assert self.cluster is not None, "a process of a cluster was lost"
        # The lost processes had their memory. The step begins again, as after a kill.
        self.workers = Workers()
        self.reply_seconds.clear()
        self.draft_counts.clear()
        self.halted.clear()
        self.cluster.replace()
        self.cluster.workers.check_shared_folder(self.directory.path)

    def initial_policy(self) -> Mapping[str, Tensor]:
        """Of the warm start, or `base`. Raises StoredFileError: damaged, or of another model."""
        ref = self.directory.ledger.tasks(START)["warm_start"].outputs.get("weights")
        if ref is None:
            return self.base
        weights = self.store.file_tensors(ref)
        header_of(self.store.path(ref), parameter_shapes(self.arch))
        return weights

    def close(self) -> None:
        # Weights in a cycle would stay; these two have the context itself.
        del self.build_reference, self.rebuild_policies
        gc.unfreeze()
        if self.cluster is not None:
            # Parts on ranks would be dropped only after the call that a rank computes, which may take an hour.
            self.cluster.close()
        self.workers.close()


def gc_freeze() -> None:
    if torch.cuda.is_available():
        gc.collect()
    gc.freeze()
