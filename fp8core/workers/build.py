"""From a configuration to live parts: the one place where models, trainers and engines are built."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8core.config.capability import this_platform
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig, TrainingConfig
from fp8core.data.chain import ALPHABET, EOS, VOCABULARY
from fp8core.data.jsonl import SUFFIXES
from fp8core.data.source import build_source
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import load_checkpoint
from fp8core.models.formats import rollout_formats, training_formats
from fp8core.models.hub import resolve_model
from fp8core.models.initial import architecture_from_config, initial_weights
from fp8core.models.tokenizer import Tokenizer, character_tokenizer
from fp8core.plan.devices import Machine, this_machine
from fp8core.plan.rollout import longest_sequence
from fp8core.plan.run_plan import plan_run, refuse_unfit
from fp8core.plan.shapes import model_shape
from fp8core.plan.training import trainer_grid
from fp8core.rewards.verifier import build_verifier
from fp8core.rl.objective import Objective
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.vllm_experts import check_routes_fit
from fp8core.rollout.vllm_replicas import VllmReplicas, check_gpus
from fp8core.rollout.vllm_settings import (
    check_architecture_fits,
    check_contract_fits,
    required_environment,
    suggested_environment,
)
from fp8core.rollout.vllm_versions import find_build
from fp8core.training.megatron import requirements as megatron
from fp8core.training.megatron.grid import check_grid
from fp8core.training.torch import limits
from fp8core.training.torch.trainer import PackedFormats, PackedTrainer
from fp8core.training.torch_trainer import TorchTrainer
from fp8core.training.trainer import Trainer


@dataclass(frozen=True)
class BaseModel:
    """What a run starts from.

    `tensors` are random for a model from scratch; its policy is made by the warm start.
    """

    arch: Architecture
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    revision: str | None


def build_base(config: RunConfig) -> BaseModel:
    """Load the checkpoint, or draw a decoder from scratch with a tokenizer of single characters.

    Raises:
        UserError: the checkpoint is missing or broken, or the contract keeps more BF16 layers than there are, or a
            dense model was to replay its choice of experts.
    """
    base = _from_scratch(config) if config.model is None else _from_checkpoint(config, config.model)
    kept = config.precision.bf16_first_layers + config.precision.bf16_last_layers
    if kept > base.arch.num_layers:
        raise UserError(
            f"precision.bf16_first_layers + bf16_last_layers = {kept}, but the model has {base.arch.num_layers} layers"
        )
    if config.rollout.router_replay and not base.arch.sparse_layers:
        raise UserError("rollout.router_replay: replays the choice of experts, but the model has none")
    if config.training.trainer == "megatron":
        check_grid(base.arch, config.training.megatron, config.precision, longest_sequence(config, base.arch))
    if config.rollout.engine == "vllm":
        check_architecture_fits(base.arch, config.precision, config.rollout.vllm)
    if config.training.packs:
        limits.check_architecture_fits(base.arch, config.precision, config.training.device)
    return base


def check_engine(config: RunConfig) -> None:
    """Refuse a contract that engine or trainer cannot keep on this machine, before anything is loaded.

    Raises:
        UserError: vLLM or Megatron is chosen and missing, of an unknown version, or without what the contract asks for;
            or a trainer or an engine is to run on a GPU that is not there, or in formats that it has not.
    """
    if config.training.trainer == "megatron":
        megatron.check_requirements(config, this_platform())
        megatron.check_gpus(config, this_platform(), torch.cuda.device_count())
    if config.training.packs:
        limits.check_contract_fits(config.precision, config.training.device, this_platform())
    if config.rollout.engine == "vllm":
        build = find_build(this_platform())
        check_contract_fits(config.precision, config.rollout.vllm, build)
        check_gpus(config.rollout.vllm, build, torch.cuda.device_count())
        if config.rollout.router_replay:
            check_routes_fit(build)


def check_memory(config: RunConfig) -> None:
    """Refuse a training that this machine has no memory for, before anything is loaded.

    Raises:
        UserError: what does not fit and where, or `plan.shapes.model_shape` cannot tell the model's shape.
    """
    here = this_machine()
    on_cpu = config.rollout.engine == "vllm" and find_build(this_platform()).platform == "cpu"
    machine = Machine(None, here.host) if on_cpu else here
    refuse_unfit(plan_run(config, model_shape(config), machine, trainer_grid(config, machine)))


def check_inputs(config: RunConfig) -> None:
    """Refuse data in files and verifiers that cannot be used, before a run has a folder or a server.

    Raises:
        UserError: as `build_source` and `build_verifier` have it.
    """
    # A dataset of the hub is read once, by the run; the chain task cannot be missing.
    if config.data.source.endswith(SUFFIXES):
        build_source(config.data, config.evaluation)
    build_verifier(config.reward.model_copy(update={"workers": 1})).close()


@dataclass(frozen=True)
class EngineEnvironment:
    """Environment variables of engine and trainer: those that decide what they compute, and those that only suggest."""

    required: Mapping[str, str]
    suggested: Mapping[str, str]


def engine_environment(config: RunConfig) -> EngineEnvironment:
    """What must stand in the environment before engine and trainer are built (errors: `check_engine`)."""
    required, suggested = limits.required_environment(config.training), dict[str, str]()
    if config.warm_start is not None:
        required |= limits.required_environment(imitation_settings(config))
    if config.rollout.engine == "vllm":
        build = find_build(this_platform())
        required |= required_environment(config.precision, config.rollout.vllm, build)
        suggested |= suggested_environment(config.threads, build)
    if config.training.trainer == "megatron":
        required |= megatron.required_environment(config)
        suggested |= megatron.suggested_environment(config)
    return EngineEnvironment(required, suggested)


def build_trainer(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor]) -> Trainer:
    """A trainer that starts from the given weights."""
    if config.training.trainer == "megatron":
        # Megatron is optional, and Transformer Engine reads its environment when it is imported.
        from fp8core.training.megatron.processes import GridTrainer

        return GridTrainer(config, arch, masters)
    if config.training.packs:
        return _packed_trainer(config, arch, masters)
    return TorchTrainer(
        arch,
        masters,
        training_formats(config.precision, arch.num_layers),
        rollout_formats(config.precision, arch.num_layers),
        config.training,
        Objective(config.loss, config.correction),
    )


def _packed_trainer(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor]) -> PackedTrainer:
    formats = PackedFormats(
        training_formats(config.precision, arch.num_layers),
        rollout_formats(config.precision, arch.num_layers),
        longest=config.rollout.vllm.max_model_len or arch.max_positions,
        amax_only=config.calibration.statistic == "amax",
    )
    objective = Objective(config.loss, config.correction)
    return PackedTrainer(arch, masters, formats, config.training, objective, torch.device(config.training.device))


def imitation_settings(config: RunConfig) -> TrainingConfig:
    """How a warm start trains with a torch trainer, whatever the run's own trainer and optimisation are: repeatably, so
    that runs of all trainers start from one policy."""
    kept = ("device", "packed", "tokens_per_pass", "activation_checkpointing")
    return TrainingConfig.model_validate(config.training.model_dump(include=set(kept)))


def build_imitator(config: RunConfig, arch: Architecture, initial: Mapping[str, Tensor]) -> PackedTrainer:
    """A packed trainer for the warm start: BF16 whatever the contract says, so that all start from one policy."""
    bf16 = {"linear": "bf16", "kv_cache": "bf16"}
    contract = PrecisionContract.model_validate({"rollout": bf16, "training": bf16, "rounding_points": "kernels"})
    settings = {"precision": contract, "training": imitation_settings(config)}
    return _packed_trainer(config.model_copy(update=settings), arch, initial)


def build_engine(config: RunConfig, arch: Architecture) -> RolloutEngine:
    """A rollout engine without weights."""
    if config.rollout.engine == "vllm":
        build, rollout = find_build(this_platform()), config.rollout
        settings = config.precision, rollout.vllm, rollout.max_batch, build
        if rollout.vllm.gpus > 1:
            return VllmReplicas(arch, *settings, routes=rollout.router_replay)
        # vLLM is optional, and reads its environment when it is imported.
        from fp8core.rollout.vllm import VllmEngine

        return VllmEngine(arch, *settings, routes=rollout.router_replay)
    return EmbeddedEngine(arch, rollout_formats(config.precision, arch.num_layers), config.rollout.max_batch)


def _from_scratch(config: RunConfig) -> BaseModel:
    assert config.architecture is not None, "RunConfig demands a model or an architecture"
    if config.data.source != "chain":
        raise UserError(
            f"architecture builds a model for the chain task, but data.source is {config.data.source}; set model"
        )
    arch = architecture_from_config(config.architecture, VOCABULARY)
    tokenizer = character_tokenizer(ALPHABET, VOCABULARY, EOS)
    return BaseModel(arch, initial_weights(arch, config.seed), tokenizer, revision=None)


def _from_checkpoint(config: RunConfig, model: str) -> BaseModel:
    if config.warm_start is not None:
        raise UserError("warm_start trains a model from scratch; a checkpoint starts as it is (set warm_start to null)")
    resolved = resolve_model(model, config.revision)
    checkpoint = load_checkpoint(Path(resolved.folder))
    return BaseModel(checkpoint.architecture, checkpoint.tensors, checkpoint.tokenizer, resolved.revision)
