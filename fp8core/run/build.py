"""From a configuration to live parts: the one place where models, trainers and engines are built."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fp8core.config.data import CHAIN_VOCABULARY
from fp8core.config.derived import sft_config, teacher_config
from fp8core.config.environment import EnvironmentConfig
from fp8core.config.run import RunConfig
from fp8core.data.chain import ALPHABET, EOS
from fp8core.environments.pool import EnvironmentPool
from fp8core.errors import UserError, refuse
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import (
    InitialWeights,
    StoredCheckpoint,
    architecture_from_config,
    find_checkpoint,
)
from fp8core.models.hub import resolve_model
from fp8core.models.tensor_source import TensorSource
from fp8core.models.tokenizer import Tokenizer, character_tokenizer
from fp8core.processes.host import Limits
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import engine_entry
from fp8core.run.checks.machine import check_shape
from fp8core.run.machine import engine_environment, members_node, wants_gpus
from fp8core.training.ranks import ALONE
from fp8core.training.registry import trainer_of
from fp8core.training.trainer import LocalTrainer, SftTrainer, Trainer

if TYPE_CHECKING:
    from fp8core.cluster.workers import Cluster


@dataclass(frozen=True)
class BaseModel:
    """The model that a run starts from.

    `tensors` are random for a model from scratch; its policy is made by the warm start. A run on a cluster has a
    `TensorSource` of them. `dequantised` of them were stored in block FP8.
    """

    arch: Architecture
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    revision: str | None
    dequantised: int = 0


def build_base(config: RunConfig) -> BaseModel:
    """Load the checkpoint, or draw a decoder from scratch with a tokenizer of single characters.

    Raises:
        UserError: the checkpoint is missing or broken, or the contract keeps more BF16 layers than there are, or a
            dense model was to replay its choice of experts.
    """
    found = find_base(config)
    if found.checkpoint is None:
        initial = InitialWeights(found.arch, config.seed)
        tensors: Mapping[str, Tensor] = initial if config.cluster.used else dict(initial)
        return BaseModel(found.arch, tensors, found.tokenizer, found.revision)
    # This process holds no weights where ranks do.
    tensors = found.checkpoint.source() if config.cluster.used else found.checkpoint.load().tensors
    return BaseModel(found.arch, tensors, found.tokenizer, found.revision, len(found.checkpoint.codes))


class FoundModel(NamedTuple):
    """The model that a run starts from, without weights; `checkpoint` is None for one from scratch."""

    arch: Architecture
    tokenizer: Tokenizer
    checkpoint: StoredCheckpoint | None
    revision: str | None


def find_base(config: RunConfig) -> FoundModel:
    """The model of a configuration, which fits it. Raises UserError as `build_base` does, whatever the weights are."""
    base = _from_scratch(config) if config.model is None else _from_checkpoint(config, config.model)
    check_shape(config, base.arch)
    return base


def open_cluster(config: RunConfig) -> "Cluster | None":
    """The processes of engines and ranks; None where both lie in this process (errors: `cluster.gang.Gang`)."""
    if not config.cluster.used:
        return None
    from fp8core.cluster.workers import Cluster

    return Cluster(config, wants_gpus(config), engine_environment(config, members_node(config)))


def build_trainer(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], cluster: "Cluster | None" = None
) -> Trainer:
    """A trainer that starts from the given weights, in this process or on the ranks of a cluster.

    Ranks make the weights themselves, from a `TensorSource`.
    """
    if cluster is not None:
        assert isinstance(masters, TensorSource), "nothing hands weights to ranks"
        return cluster.build_trainer(config, arch, masters)
    return build_local_trainer(config, arch, masters)


def build_local_trainer(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor]) -> LocalTrainer:
    return trainer_of(config.training).build(config, arch, masters, ALONE)


def build_sft_trainer(
    config: RunConfig, arch: Architecture, initial: Mapping[str, Tensor], cluster: "Cluster | None" = None
) -> SftTrainer | None:
    """The trainer of a warm start, in BF16 whatever the contract, so that all start from one policy; None where
    `sft.ReferenceSftTrainer` trains. It computes in this process, or on rank 0 of the cluster at `cluster.address`."""
    settings = sft_config(config)
    if (build := trainer_of(settings.training).build_sft) is None:
        return None
    if cluster is not None and config.cluster.address is not None:
        assert isinstance(initial, TensorSource), "nothing hands weights to ranks"
        return cluster.build_sft_trainer(settings, arch, initial)
    return build(settings, arch, initial)


def build_teacher(config: RunConfig, tokenizer: Tokenizer, cluster: "Cluster | None" = None) -> Trainer:
    """The teacher of `loss.distillation`, ready to score: a torch trainer in BF16, or in FP32 where the run trains so.

    Without FP8 it needs no scales of its own, and a teacher is to be read as exactly as it can be.

    Raises:
        UserError: as `find_teacher`; or weights are broken.
    """
    teacher, scoring = find_teacher(config, tokenizer), teacher_config(config)
    tensors = teacher.load().tensors if cluster is None else teacher.source()
    return build_trainer(scoring, teacher.architecture, tensors, cluster)


def find_teacher(config: RunConfig, tokenizer: Tokenizer) -> StoredCheckpoint:
    """The teacher without its weights. Raises UserError: the checkpoint of `loss.distillation.teacher` is missing or
    broken, has another vocabulary, or is of a model that the torch trainer does not have."""
    settings, scoring = config.loss.distillation, teacher_config(config)
    assert settings.teacher is not None, "the pipeline was checked"
    key = "loss.distillation.teacher"
    named = f"{key}={settings.teacher}"
    if settings.teacher.startswith("runs/") and not Path(settings.teacher).exists():
        # It has the form of a hub id, but nobody's is called so.
        shipped = settings.teacher == "runs/teacher-policy"
        hint = "; make it as the comment in configs/distil.yaml says" if shipped else ""
        raise UserError(f"{named}: no such folder{hint}")
    folder = Path(resolve_model(settings.teacher, settings.revision, key=key).folder)
    try:
        found = find_checkpoint(folder)
        refuse(trainer_of(scoring.training).check_model(scoring, found.architecture))
    except UserError as error:
        raise UserError(f"{named}: {error}") from error
    difference = tokenizer.difference(found.tokenizer)
    if difference is not None:
        raise UserError(f"{named}: it has another vocabulary than the model: {difference}")
    return found


def build_engine(config: RunConfig, arch: Architecture, cluster: "Cluster | None" = None) -> RolloutEngine:
    """A rollout engine without weights, in this process or one in each engine's process of a cluster."""
    if cluster is not None:
        return cluster.build_engine(config, arch)
    return engine_entry(config).build(config, arch)


def build_environment(config: EnvironmentConfig) -> EnvironmentPool:
    """The environment that a configuration names, in processes of its own.
    Raises UserError: it cannot be loaded, or not with these options."""
    limits = Limits(config.timeout_seconds, config.cpu_seconds, config.memory_mb)
    return EnvironmentPool(config.name, config.options, limits, config.at_once)


def _from_scratch(config: RunConfig) -> FoundModel:
    assert config.architecture is not None, "RunConfig demands a model or an architecture"
    if config.data.source != "chain":
        raise UserError(
            f"architecture builds a model for the chain task, but data.source is {config.data.source}; set model"
        )
    arch = architecture_from_config(config.architecture, CHAIN_VOCABULARY)
    # The marks of tool calls, and what a calculator reads besides.
    alphabet = ALPHABET if config.environment is None else f"{ALPHABET}[]()"
    tokenizer = character_tokenizer(alphabet, CHAIN_VOCABULARY, EOS)
    return FoundModel(arch, tokenizer, checkpoint=None, revision=None)


def _from_checkpoint(config: RunConfig, model: str) -> FoundModel:
    if config.warm_start is not None and config.warm_start.demonstrations is None:
        raise UserError(
            "warm_start on the chain task's demonstrations is for a model from scratch; for a checkpoint set "
            "warm_start.demonstrations to a file of your own, or warm_start to null"
        )
    resolved = resolve_model(model, config.revision)
    checkpoint = find_checkpoint(Path(resolved.folder))
    return FoundModel(checkpoint.architecture, checkpoint.tokenizer, checkpoint, resolved.revision)
