"""From a configuration to live parts: the one place where models, trainers and engines are built."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fp8core.config.capability import Environment, Node, this_node
from fp8core.config.derived import sft_config, sft_training, teacher_config
from fp8core.config.environment import EnvironmentConfig
from fp8core.config.run import RunConfig
from fp8core.data.chain import ALPHABET, EOS
from fp8core.environments.pool import EnvironmentPool
from fp8core.errors import UserError, refuse
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import Checkpoint, InitialWeights, architecture_from_config, find_checkpoint
from fp8core.models.hub import resolve_model
from fp8core.models.safetensors_files import TensorSource
from fp8core.models.tokenizer import Tokenizer, character_tokenizer
from fp8core.processes.pool import Limits
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import engine_entry, longest_row
from fp8core.training.ranks import ALONE
from fp8core.training.registry import packages_of, trainer_of
from fp8core.training.trainer import SftTrainer, Trainer

if TYPE_CHECKING:
    from fp8core.cluster.workers import Cluster


def members_node(config: RunConfig) -> Node:
    """The machine that engines and trainers compute on: a node of the cluster at `cluster.address`, or this one."""
    if config.cluster.is_used and find_spec("ray") is None:
        raise UserError("cluster: several engines or ranks need Ray (pip install 'fp8-grpo[ray]')")
    if config.cluster.address is None:
        return this_node(packages_of(config))
    from fp8core.cluster import connection

    tensor_parallel = engine_entry(config).tensor_parallel(config)
    return connection.ask_node(config.cluster, tensor_parallel, wants_gpus(config), packages_of(config))


def wants_gpus(config: RunConfig) -> bool:
    return engine_entry(config).gpus(config) > 0 or trainer_of(config.training).grid(config) is not None


def engine_environment(config: RunConfig, node: Node) -> Environment:
    trainer = trainer_of(config.training).environment(config)
    engine = engine_entry(config).environment(config, node)
    variables = dict(trainer.required)
    if config.warm_start is not None:
        warm = config.model_copy(update={"training": sft_training(config)})
        variables |= trainer_of(warm.training).environment(warm).required
    return Environment({**variables, **engine.required}, {**trainer.suggested, **engine.suggested})


@dataclass(frozen=True)
class BaseModel:
    """`tensors` are empty where weights are not needed; a run on a cluster has a `TensorSource`."""

    arch: Architecture
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None
    revision: str | None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def build_base(config: RunConfig) -> BaseModel:
    base = find_base(config)
    if base.checkpoint is None:
        initial = InitialWeights(base.arch, config.seed)
        return replace(base, tensors=initial if config.cluster.is_used else dict(initial))
    # This process holds no weights where ranks do.
    source = base.checkpoint.source()
    return replace(base, tensors=source if config.cluster.is_used else dict(source))


def find_base(config: RunConfig) -> BaseModel:
    """Raises UserError: the checkpoint is missing or broken, or does not fit."""
    base = _from_scratch(config) if config.model is None else _from_checkpoint(config, config.model)
    check_shape(config, base.arch)
    return base


def check_shape(config: RunConfig, arch: Architecture) -> None:
    outer_layers = config.precision.bf16_first_layers + config.precision.bf16_last_layers
    if outer_layers > arch.num_layers:
        raise UserError(
            f"precision.bf16_first_layers + bf16_last_layers = {outer_layers}, but the model has {arch.num_layers} "
            "layers"
        )
    if config.rollout.router_replay and not arch.sparse_layers:
        raise UserError("rollout.router_replay: replays the choice of experts, but the model has none")
    for name, weight in config.loss.router:
        if weight and not arch.sparse_layers:
            raise UserError(f"loss.router.{name}={weight}: the model has no experts; set it to 0")
    refuse(trainer_of(config.training).check_model(config, arch))
    refuse(engine_entry(config).check_model(config, arch))
    if (new_tokens := config.rollout.max_new_tokens) >= (positions := longest_row(config, arch)):
        raise UserError(
            f"rollout.max_new_tokens={new_tokens}: no prompt fits beside it into the {positions} positions of model "
            "and engine; lower it"
        )


def open_cluster(config: RunConfig) -> "Cluster | None":
    if not config.cluster.is_used:
        return None
    from fp8core.cluster.workers import Cluster

    return Cluster(config, wants_gpus(config), engine_environment(config, members_node(config)))


def build_trainer(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], cluster: "Cluster | None" = None
) -> Trainer:
    if cluster is not None:
        assert isinstance(masters, TensorSource), "nothing hands weights to ranks"
        return cluster.build_trainer(config, arch, masters)
    return trainer_of(config.training).build(config, arch, masters, ALONE)


def build_sft_trainer(
    config: RunConfig, arch: Architecture, initial: Mapping[str, Tensor], cluster: "Cluster | None" = None
) -> SftTrainer | None:
    """None where `start.ReferenceSftTrainer` trains."""
    settings = sft_config(config)
    if (build := trainer_of(settings.training).build_sft) is None:
        return None
    if cluster is not None and config.cluster.address is not None:
        assert isinstance(initial, TensorSource), "nothing hands weights to ranks"
        return cluster.build_sft_trainer(settings, arch, initial)
    return build(settings, arch, initial)


def build_teacher(config: RunConfig, tokenizer: Tokenizer, cluster: "Cluster | None" = None) -> Trainer:
    teacher = find_teacher(config, tokenizer)
    scoring = teacher_config(config)
    tensors = dict(teacher.source()) if cluster is None else teacher.source()
    return build_trainer(scoring, teacher.architecture, tensors, cluster)


def find_teacher(config: RunConfig, tokenizer: Tokenizer) -> Checkpoint:
    """Raises UserError: the teacher is missing or broken, or has another vocabulary."""
    settings = config.loss.distillation
    scoring = teacher_config(config)
    assert settings.teacher is not None, "the pipeline was checked"
    key = "loss.distillation.teacher"
    setting = f"{key}={settings.teacher}"
    if settings.teacher.startswith("runs/") and not Path(settings.teacher).exists():
        # It has the form of a hub id, but nobody's is called so.
        raise UserError(f"{setting}: no such folder")
    folder = Path(resolve_model(settings.teacher, settings.revision, key=key).folder)
    try:
        checkpoint = find_checkpoint(folder)
        refuse(trainer_of(scoring.training).check_model(scoring, checkpoint.architecture))
    except UserError as error:
        raise UserError(f"{setting}: {error}") from error
    if tokenizer.vocabulary != checkpoint.tokenizer.vocabulary:
        raise UserError(f"{setting}: it has another vocabulary than the model")
    return checkpoint


def build_engine(config: RunConfig, arch: Architecture, cluster: "Cluster | None" = None) -> RolloutEngine:
    if cluster is not None:
        return cluster.build_engine(config, arch)
    return engine_entry(config).build(config, arch)


def build_environment(config: EnvironmentConfig) -> EnvironmentPool:
    limits = Limits(config.timeout_seconds, config.memory_mb)
    return EnvironmentPool(config.name, config.options, limits, config.max_concurrent_episodes)


def _from_scratch(config: RunConfig) -> BaseModel:
    assert config.architecture is not None, "RunConfig demands a model or an architecture"
    size = config.vocabulary_size
    arch = architecture_from_config(config.architecture, size)
    if config.is_generated:
        # The marks of tool calls, and what a calculator reads besides.
        alphabet = ALPHABET if config.environment is None else f"{ALPHABET}[]()"
        tokenizer = character_tokenizer(alphabet, size, EOS)
    else:
        tokenizer = character_tokenizer("\n" + "".join(map(chr, range(ord(" "), ord("~") + 1))), size, "<eos>")
    return BaseModel(arch, tokenizer, checkpoint=None, revision=None)


def _from_checkpoint(config: RunConfig, model: str) -> BaseModel:
    if config.warm_start is not None and config.warm_start.demonstrations is None:
        raise UserError(
            "warm_start on the chain task's demonstrations is for a model from scratch; for a checkpoint set "
            "warm_start.demonstrations to a file of your own, or warm_start to null"
        )
    source = resolve_model(model, config.revision)
    checkpoint = find_checkpoint(Path(source.folder))
    return BaseModel(checkpoint.architecture, checkpoint.tokenizer, checkpoint, source.revision)
