"""The refusal of a training that cannot run, before it has a folder, a server or a model in memory."""

from fp8core.config.run import RunConfig
from fp8core.run.checks.continuation import refuse_conflict, stored_ledger
from fp8core.run.checks.inputs import check_inputs
from fp8core.run.checks.machine import check_cluster, check_memory
from fp8core.run.checks.settings import graph_of
from fp8core.run.machine import members_node


def refuse_unrunnable(config: RunConfig, *, new_code: bool = False) -> None:
    """Refuse a named training that cannot run to its end here; `new_code`: as of `open_directory`.

    Raises UserError: as `refuse_unrunnable_settings` and `check_inputs`.
    """
    refuse_unrunnable_settings(config, new_code=new_code)
    check_inputs(config)


def refuse_unrunnable_settings(config: RunConfig, *, new_code: bool = False) -> None:
    """The part of `refuse_unrunnable` that reads no data and starts no verifier or environment.

    Trainings that differ in precision and seed alone have the other part in common.

    Raises:
        UserError: as `graph_of`, `refuse_conflict`, `check_memory` and `check_cluster`.
    """
    assert config.run is not None, "the command or the flow names the run"
    graph_of(config)
    refuse_conflict(config, new_code=new_code)
    node = members_node(config)
    check_memory(config, node, stored_ledger(config))
    check_cluster(config, node)
