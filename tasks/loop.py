"""The iteration without an orchestrator: one step after the other in this process.

The flow runs the same functions as Prefect tasks. This loop serves replays, exports and tests of what a kill leaves.
"""

from collections.abc import Mapping

from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START
from fp8core.workers.live import LiveRun
from tasks import start
from tasks.bounds import carry_out, crossing
from tasks.checkpoint import checkpoint_due, missing_checkpoint, save_state, unsaved_step
from tasks.commit import commit_step
from tasks.execute import TaskResult, run_step
from tasks.restore import carried, restore


def begin(run: LiveRun) -> int:
    """Policy 0, its scales and its accuracy, then back to where an earlier process stopped; returns updates redone."""
    start.warm_start(run)
    start.bring_to_life(run)
    scales = start.first_scales(run).entry.outputs["scales"]
    start.first_evaluation(run, scales)
    if run.directory.ledger.step(START) is None:
        commit_step(run, START)
    return restore(run)


def train(run: LiveRun) -> None:
    """Every step that is not committed yet, up to the configured number."""
    begin(run)
    if (missing := missing_checkpoint(run)) is not None:
        save_state(run, missing)
    watch(run)
    for index in range(next_step(run), run.config.steps + 1):
        iterate(run, index, carried(run, index))
        if checkpoint_due(run, index):
            save_state(run, index)
        watch(run)


def watch(run: LiveRun) -> None:
    """Warn, pause or fail when the training is beyond a bound of `alignment.stop` (`tasks.bounds`)."""
    found = crossing(run)
    if found is not None:
        if run.config.alignment.stop.action != "warn" and (unsaved := unsaved_step(run)) is not None:
            save_state(run, unsaved)
        carry_out(run, found)


def next_step(run: LiveRun) -> int:
    """The first step that is not committed; its finished tasks are in the ledger and are not run again."""
    last = run.directory.ledger.last_step()
    assert last is not None, "begin() commits step 0"
    return last + 1


def iterate(run: LiveRun, index: int, inputs: Mapping[str, Ref]) -> dict[str, TaskResult]:
    """Run the tasks of one step in order and commit it; returns results by task."""
    artifacts, results = dict(inputs), dict[str, TaskResult]()
    for planned in run.plan.steps:
        ports = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
        results[planned.name] = run_step(run, index, planned, ports)
        artifacts |= results[planned.name].entry.outputs
    commit_step(run, index)
    return results
