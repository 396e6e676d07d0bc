"""Refusals of what engine and trainer cannot compute or hold: on this machine, or of the shape of a model."""

from fp8core.config.capability import Node
from fp8core.config.run import RunConfig
from fp8core.errors import UserError, refuse
from fp8core.models.architecture import Architecture
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import check_fit, plan_run
from fp8core.resources.memory import machine_of
from fp8core.rollout.registry import continuation_of, engine_entry, longest_row
from fp8core.run.machine import wants_gpus
from fp8core.store.ledger import START, LedgerView
from fp8core.training.registry import trainer_of


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


def check_memory(config: RunConfig, node: Node, ledger: LedgerView | None) -> None:
    """Refuse a training that there is no memory for where it computes, before anything is loaded.

    Nothing has to fit for a warm start that the run's ledger has as finished; without a ledger it has not begun.

    Raises:
        UserError: what does not fit and where, or `models.hub.model_shape` cannot tell the model's shape.
    """
    if ledger is not None and "warm_start" in ledger.tasks(START):
        config = config.model_copy(update={"warm_start": None})
    machine = engine_entry(config).usable(machine_of(node), node)
    check_fit(plan_run(config, model_shape(config), machine))


def check_cluster(config: RunConfig, node: Node) -> None:
    """Refuse a machine with too few GPUs for a cluster of its own, before a run has a folder or a server.
    Raises UserError: how many are needed."""
    shared = engine_entry(config).tensor_parallel(config)
    if config.cluster.used and 0 < node.gpus < sum(config.cluster.bundles(shared)) and wants_gpus(config):
        raise UserError(config.cluster.too_small(shared, "GPU", f"this machine has {node.gpus}"))
