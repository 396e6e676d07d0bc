"""From a configuration to live parts: the one place where models, trainers and engines are built."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fp8core.config.capability import Environment, Node, this_node
from fp8core.config.data import CHAIN_VOCABULARY
from fp8core.config.derived import sft_config, sft_training, teacher_config
from fp8core.config.environment import EnvironmentConfig
from fp8core.config.run import RunConfig
from fp8core.data.chain import ALPHABET, EOS
from fp8core.data.demonstrations import own_demonstrations
from fp8core.data.prompt import PromptSource, longest_prompt
from fp8core.data.source import build_source, check_problems, check_turns
from fp8core.environments.child import EpisodeLimits
from fp8core.environments.pool import EnvironmentPool
from fp8core.errors import UserError, refuse
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import (
    InitialWeights,
    StoredCheckpoint,
    architecture_from_config,
    find_checkpoint,
)
from fp8core.models.hub import model_shape, resolve_model
from fp8core.models.tensor_source import TensorSource
from fp8core.models.tokenizer import Tokenizer, character_tokenizer
from fp8core.plan.run_plan import plan_run, refuse_unfit
from fp8core.resources.memory import machine_of
from fp8core.rewards.verifier import Verifier, build_verifier
from fp8core.rl.objective import refuse_unmeant_dual_clip
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import continuation_of, engine_entry, longest_row
from fp8core.run.episodes import check_observation, check_openings, tool_calls_of, trial
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, LedgerView
from fp8core.training.ranks import ALONE
from fp8core.training.registry import packages_of, trainer_grid, trainer_of
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


def check_shape(config: RunConfig, arch: Architecture) -> None:
    """Refuse a model that does not fit its configuration, whatever its weights are.

    Raises:
        UserError: the contract keeps more BF16 layers than there are, a dense model was to replay its choice of
            experts, no prompt has room beside the longest completion, or trainer or engine cannot hold the model.
    """
    kept = config.precision.bf16_first_layers + config.precision.bf16_last_layers
    if kept > arch.num_layers:
        raise UserError(
            f"precision.bf16_first_layers + bf16_last_layers = {kept}, but the model has {arch.num_layers} layers"
        )
    if config.rollout.router_replay and not arch.sparse_layers:
        raise UserError("rollout.router_replay: replays the choice of experts, but the model has none")
    refuse(trainer_of(config.training).check_model(config, arch))
    refuse(engine_entry(config).check_model(config, arch))
    if (asked := config.rollout.max_new_tokens) >= (positions := longest_row(config, arch)):
        raise UserError(
            f"rollout.max_new_tokens={asked}: no prompt fits beside it into the {positions} positions of model and "
            "engine; lower it"
        )


def members_node(config: RunConfig) -> Node:
    """The machine that engines and trainers compute on: a node of the cluster at `cluster.address`, or this one.

    The connection to the cluster stays, for the next question and for the run.

    Raises:
        UserError: several processes are asked for, and Ray is not installed; nothing answers at the address, or the
            cluster there is too small.
    """
    if config.cluster.used and find_spec("ray") is None:
        raise UserError("cluster: several engines or ranks need Ray (pip install 'fp8-grpo[ray]')")
    if config.cluster.address is None:
        return this_node(packages_of(config))
    from fp8core.cluster import connection

    shared = engine_entry(config).tensor_parallel(config)
    return connection.ask_node(config.cluster, shared, wants_gpus(config), packages_of(config))


def check_engine(config: RunConfig, node: Node) -> None:
    """Refuse a contract that engine or trainer cannot keep where they compute, before anything is loaded.

    Raises:
        UserError: a chosen library is missing, of an unknown version, or without what the contract asks for; or a
            trainer or an engine is to run on a GPU that is not there, or in formats that it has not; or the engine
            would answer an environment's second turn without the first.
    """
    if config.environment is not None and continuation_of(config) == "none":
        raise UserError(
            f"environment.name={config.environment.name}: rollout.engine={config.rollout.engine} does not go on from "
            "what was begun (`continues` of its entry), as each turn after the first does; set rollout.engine to "
            "embedded"
        )
    trainer = trainer_of(config.training)
    try:
        refuse(trainer.check(config, node))
    except UserError as error:
        if node.gpus == 0 and trainer.needs_gpu(config):
            raise UserError(
                f"{config.name} trains on a GPU, and there is none: {error}; FP8 takes a Hopper GPU, and the "
                "configuration tiny runs on a CPU"
            ) from error
        raise
    refuse(engine_entry(config).check(config, node))


def check_memory(config: RunConfig, node: Node, ledger: LedgerView | None) -> None:
    """Refuse a training that there is no memory for where it computes, before anything is loaded.

    Nothing has to fit for a warm start that the run's ledger has as finished; without a ledger it has not begun.

    Raises:
        UserError: what does not fit and where, or `models.hub.model_shape` cannot tell the model's shape.
    """
    if ledger is not None and "warm_start" in ledger.tasks(START):
        config = config.model_copy(update={"warm_start": None})
    machine = engine_entry(config).usable(machine_of(node), node)
    refuse_unfit(plan_run(config, model_shape(config), machine, trainer_grid(config, machine)))


def stored_ledger(config: RunConfig) -> LedgerView | None:
    """The ledger of the run that a configuration names; None where it has not begun. Errors: `LedgerView.glance`."""
    if config.run is None or not (ledger := config.runs / config.run / LEDGER).exists():
        return None
    return LedgerView.glance(ledger)


def check_inputs(config: RunConfig) -> None:
    """Refuse a model, data, verifiers and an environment that cannot be used, before a run has a folder or a server.

    Raises:
        UserError: as `build_base` (but for broken values of weights), `check_teacher`, `own_demonstrations`,
            `build_source`, `build_verifier`, `refuse_other_data`, `check_opened`, `check_new`,
            `StoredCheckpoint.check_head`, `tool_calls_of`, `build_environment`, `check_openings` and
            `check_observation` have it.
    """
    source = build_source(config.data, config.evaluation)
    if (ledger := stored_ledger(config)) is not None:
        refuse_other_data(config, ledger, source.digest())
    base = find_base(config)
    if config.warm_start is not None and config.warm_start.demonstrations is not None:
        own_demonstrations(config, config.warm_start, base.tokenizer, base.arch.max_positions)
    with closing(build_verifier(config.reward, config.data.columns)) as verifier:
        teacher = check_opened(config, base, source, verifier)
    # As `open_run` judges it: a run that was killed in its warm start may still be refused.
    is_new = ledger is None or not ledger.holds_work()
    if is_new:
        check_new(config, base, source, teacher)
        if base.checkpoint is not None:
            base.checkpoint.check_head()
    if config.environment is not None:
        tool_calls_of(config.environment, base.tokenizer)
        with closing(build_environment(config.environment)) as pool:
            problems = list(source.to_check())
            check_openings(problems, config, base.tokenizer, longest_row(config, base.arch), pool, config.seed)
            if is_new and base.tokenizer.has_template:
                check_observation(trial(problems[0], config, pool), config, base.tokenizer)


def check_opened(
    config: RunConfig, base: FoundModel | BaseModel, source: PromptSource, verifier: Verifier
) -> Architecture | None:
    """Refuse parts of any run that do not go together; returns the shape of its teacher, if it has one.

    Raises:
        UserError: as `check_stop_strings`, `check_teacher` and `check_problems`.
    """
    check_stop_strings(config, base.tokenizer)
    distils = config.loss.distillation.teacher is not None
    teacher = check_teacher(config, base.tokenizer) if distils else None
    check_problems(source, config, base.tokenizer, longest_row(config, base.arch), verifier)
    return teacher


def check_new(
    config: RunConfig, base: FoundModel | BaseModel, source: PromptSource, teacher: Architecture | None
) -> None:
    """Refuse what a run that has begun goes on with.

    Raises:
        UserError: as `refuse_unmeant_dual_clip`, `refuse_small_teacher` and `check_turns`.
    """
    refuse_unmeant_dual_clip(config.loss, config.correction)
    if teacher is not None:
        refuse_small_teacher(config, base.arch, teacher)
    check_turns(source, config, base.tokenizer)


def check_stop_strings(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError: the tokenizer cannot write one of `rollout.stop_strings`, or leaves a part out of texts."""
    for string in config.rollout.stop_strings:
        try:
            tokens = tokenizer.encode(string, add_special_tokens=False)
        except UserError as error:
            raise UserError(f"rollout.stop_strings: {error}") from error
        if tokenizer.decode(tokens) != tokenizer.decode(tokens, special=True):
            raise UserError(
                f"rollout.stop_strings: {string!r} has a special token, which the text of a completion leaves out; "
                "name its id as eos_token_id in the model's generation_config.json instead"
            )


def refuse_other_data(config: RunConfig, ledger: LedgerView, data: str | None) -> None:
    """Raises UserError: a run with finished work read other problems, by its last start."""
    last = ledger.last_segment()
    if not ledger.holds_work() or last is None or last.data in (None, data):
        return
    sources = [f"data.source={config.data.source}"]
    if config.evaluation.source is not None:
        sources.append(f"evaluation.source={config.evaluation.source}")
    raise UserError(
        f"{', '.join(sources)}: the problems are others than the run began with ({str(data)[:12]}, then "
        f"{str(last.data)[:12]}); put those back, or start another run"
    )


def engine_environment(config: RunConfig, node: Node) -> Environment:
    """The variables that must stand in the environment before engine and trainer are built (errors: `check_engine`)."""
    trainer, engine = trainer_of(config.training).environment(config), engine_entry(config).environment(config, node)
    required = dict(trainer.required)
    if config.warm_start is not None:
        warm = config.model_copy(update={"training": sft_training(config)})
        required |= trainer_of(warm.training).environment(warm).required
    return Environment({**required, **engine.required}, {**trainer.suggested, **engine.suggested})


def check_cluster(config: RunConfig, node: Node) -> None:
    """Refuse a machine with too few GPUs for a cluster of its own, before a run has a folder or a server.

    Raises:
        UserError: how many are needed.
    """
    shared = engine_entry(config).tensor_parallel(config)
    if config.cluster.used and 0 < node.gpus < sum(config.cluster.bundles(shared)) and wants_gpus(config):
        raise UserError(config.cluster.too_small(shared, "GPU", f"this machine has {node.gpus}"))


def open_cluster(config: RunConfig) -> "Cluster | None":
    """The processes of engines and ranks; None where both lie in this process (errors: `cluster.gang.Gang`)."""
    if not config.cluster.used:
        return None
    from fp8core.cluster.workers import Cluster

    return Cluster(config, wants_gpus(config), engine_environment(config, members_node(config)))


def wants_gpus(config: RunConfig) -> bool:
    """True if an engine or a rank of this run computes on a GPU."""
    return engine_entry(config).gpus(config) > 0 or trainer_of(config.training).grid(config) is not None


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
    """The same in this process, which holds its masters."""
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


def check_teacher(config: RunConfig, tokenizer: Tokenizer) -> Architecture:
    """Refuse a teacher that cannot be read, or of another vocabulary, before anything is trained; else its shape.

    Raises:
        UserError: the checkpoint of `loss.distillation.teacher` is missing or broken, has another vocabulary, or is of
            a model that the torch trainer does not have.
    """
    return _found_teacher(config, tokenizer).architecture


def refuse_small_teacher(config: RunConfig, arch: Architecture, teacher: Architecture) -> None:
    """Refuse a teacher that cannot score all that a policy of shape `arch` may write.

    Raises:
        UserError: it has fewer positions than the longest row, or no embedding of a token.
    """
    named = f"loss.distillation.teacher={config.loss.distillation.teacher}"
    positions = longest_row(config, arch)
    longest = longest_prompt(config, positions) + config.rollout.max_new_tokens
    if teacher.max_positions < longest:
        raise UserError(
            f"{named}: it has {teacher.max_positions} positions, and a prompt with its completion may have {longest} "
            "tokens; lower data.max_prompt_tokens or rollout.max_new_tokens, or take another teacher"
        )
    if teacher.vocab_size < arch.vocab_size:
        raise UserError(
            f"{named}: its vocab_size={teacher.vocab_size} is below the model's {arch.vocab_size}, of which every "
            "token may be written; take another teacher"
        )


def build_teacher(config: RunConfig, tokenizer: Tokenizer, cluster: "Cluster | None" = None) -> Trainer:
    """The teacher of `loss.distillation`, ready to score: a torch trainer in BF16, or in FP32 where the run trains so.

    Without FP8 it needs no scales of its own, and a teacher is to be read as exactly as it can be.

    Raises:
        UserError: as `check_teacher`; or weights are broken.
    """
    teacher, scoring = _found_teacher(config, tokenizer), teacher_config(config)
    tensors = teacher.load().tensors if cluster is None else teacher.source()
    return build_trainer(scoring, teacher.architecture, tensors, cluster)


def _found_teacher(config: RunConfig, tokenizer: Tokenizer) -> StoredCheckpoint:
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

    Raises:
        UserError: it cannot be loaded, or not with these options.
    """
    limits = EpisodeLimits(
        config.timeout_seconds, config.cpu_seconds, config.memory_mb, config.output_kb << 10, config.processes
    )
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
