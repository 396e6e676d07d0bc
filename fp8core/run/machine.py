"""The machine that engines and trainers of a run compute on, and the variables that they read there."""

from importlib.util import find_spec

from fp8core.config.capability import Environment, Node, this_node
from fp8core.config.derived import sft_training
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.rollout.registry import engine_entry
from fp8core.training.registry import packages_of, trainer_of


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


def wants_gpus(config: RunConfig) -> bool:
    return engine_entry(config).gpus(config) > 0 or trainer_of(config.training).grid(config) is not None


def engine_environment(config: RunConfig, node: Node) -> Environment:
    """The variables that must stand in the environment before engine and trainer are built.

    Raises UserError as `checks.machine.check_engine` does.
    """
    trainer, engine = trainer_of(config.training).environment(config), engine_entry(config).environment(config, node)
    required = dict(trainer.required)
    if config.warm_start is not None:
        warm = config.model_copy(update={"training": sft_training(config)})
        required |= trainer_of(warm.training).environment(warm).required
    return Environment({**required, **engine.required}, {**trainer.suggested, **engine.suggested})
