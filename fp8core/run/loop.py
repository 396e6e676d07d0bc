"""The training as a list of steps, and what it does beyond a bound of `alignment.stop`.

The ledger alone decides about bounds. It counts steps from the last crossing it holds, so that a training that was
killed stops where it would have stopped. One that is continued after a pause or a failure gets `patience` steps again.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from fp8core.alignment.bounds import Crossing, StopBounds, crossed, stop_bounds
from fp8core.errors import MemberLost, lost_member
from fp8core.evaluation.measure import compared_prompts
from fp8core.run import start
from fp8core.run.checkpoint import checkpoint_due, missing_checkpoint, save_state, unsaved_step
from fp8core.run.commit import commit_step, step_metrics
from fp8core.run.context import RunContext
from fp8core.run.execute import StepError, TaskResult, carried, run_step
from fp8core.run.recompute import rewind_to
from fp8core.run.resume import restore
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START, BoundEntry
from fp8core.store.start_tasks import START_TASKS

T = TypeVar("T")


class Execution:
    """The execution of a training: its tasks in this process, one after the other, and with no observer.

    This one serves replays, exports and tests of what a kill leaves. The flow has another, with Prefect's tasks and
    MLflow beside them (`flows.grpo`). Both carry out the loop below.
    """

    def call(self, run: RunContext, name: str, index: int, body: Callable[[], T]) -> T:
        """Run a part of step `index` that is no step of the pipeline; returns what `body` returns."""
        return body()

    def steps(self, run: RunContext, index: int, inputs: Mapping[str, Ref]) -> dict[str, TaskResult]:
        """Run the pipeline of iteration `index` on what is carried to it; returns results by step."""
        artifacts, results = dict(inputs), dict[str, TaskResult]()
        for planned in run.graph.steps:
            ports = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
            results[planned.name] = run_step(run, index, planned, ports)
            artifacts |= results[planned.name].entry.outputs
        return results

    def stage_done(self, run: RunContext, name: str, result: TaskResult) -> None:
        """A task of step 0 has ended."""

    def restored(self, run: RunContext, redone: int) -> None:
        """Trainer and engine are where the ledger ends, after `redone` updates."""

    def before_step(self, run: RunContext, index: int) -> None:
        """Iteration `index` is next; may raise to stop the training."""

    def lost(self, run: RunContext, error: Exception) -> None:
        """A process has ended, the reason of the error; may raise to stop the training, which goes on with others."""

    def written(self, run: RunContext) -> None:
        """The ledger has a new entry."""

    def step_done(self, run: RunContext, index: int, results: Mapping[str, TaskResult]) -> None:
        """Iteration `index` is committed, and its checkpoint written or failed where one is due."""


_IN_PROCESS = Execution()


def train(run: RunContext, execution: Execution = _IN_PROCESS) -> None:
    """Every step that is not committed yet, up to the configured number.

    Where a process of a cluster is lost, all are replaced, and the training goes on from its ledger.

    Raises:
        StepError: among others, when processes were lost more often than `cluster.replacements`.
    """
    for left in range(run.config.cluster.replacements, -1, -1):
        try:
            if left < run.config.cluster.replacements:
                # Here, where a loss while they are placed counts as one more.
                run.replace_members()
            _train(run, execution)
            return
        except (StepError, MemberLost) as error:
            # No name holds the error any longer than this block: its frames hold what the step had open.
            if lost_member(error) is None:
                raise
            execution.lost(run, error)
            if not left:
                raise StepError(str(error)) from lost_member(error)
            run.console.note(f"{error}; all processes are replaced")


def _train(run: RunContext, execution: Execution) -> None:
    begin(run, execution)
    if (missing := missing_checkpoint(run)) is not None:
        # The update of the step that was cut may be redone already.
        version = run.ready_trainer().version
        rewind_to(run, missing)
        write_checkpoint(run, missing, execution)
        rewind_to(run, version)
    watch(run, execution)
    for index in range(next_step(run), run.config.steps + 1):
        execution.before_step(run, index)
        results = iterate(run, index, carried(run, index), execution)
        try:
            if checkpoint_due(run, index):
                write_checkpoint(run, index, execution)
        finally:
            # The step is committed, with or without its checkpoint: no later process makes it.
            execution.step_done(run, index, results)
        watch(run, execution)
    # Of a step beyond the last one, too.
    rewind_to(run, next_step(run) - 1)


def begin(run: RunContext, execution: Execution = _IN_PROCESS) -> int:
    """Policy 0, its scales, its accuracy and its distance from BF16, then back to where an earlier process stopped.

    Returns the number of updates that were redone.
    """
    ledger = run.directory.ledger

    def stage(task: str, body: Callable[[], TaskResult]) -> TaskResult:
        name = START_TASKS[task].stage
        result = execution.call(run, name, START, body)
        execution.stage_done(run, name, result)
        return result

    def policy() -> TaskResult:
        result = start.warm_start(run)
        start.build_workers(run)
        return result

    stage("warm_start", policy)
    scales = stage("calibrate", lambda: start.first_scales(run)).entry.outputs["scales"]
    evaluation = stage("evaluate", lambda: start.first_evaluation(run, scales)).entry.outputs["evaluation"]
    if "stream" in run.graph.carries:
        stage("stream", lambda: start.first_stream(run))
    if compared_prompts(run.config):
        stage("precision_gap", lambda: start.precision_gap(run, scales, evaluation))
    if ledger.step(START) is None:
        commit_step(run, START)
    with run.console.part("restoring the policy"):
        redone = restore(run)
    execution.restored(run, redone)
    return redone


def iterate(
    run: RunContext, index: int, inputs: Mapping[str, Ref], execution: Execution = _IN_PROCESS
) -> dict[str, TaskResult]:
    results = execution.steps(run, index, inputs)
    execution.call(run, "commit", index, lambda: commit_step(run, index))
    execution.written(run)
    return results


def write_checkpoint(run: RunContext, index: int, execution: Execution = _IN_PROCESS) -> None:
    execution.call(run, "checkpoint", index, lambda: _save(run, index))
    execution.written(run)


def _save(run: RunContext, index: int) -> None:
    with run.console.part(f"step {index}, checkpoint"):
        save_state(run, index)


def save_last(run: RunContext, execution: Execution = _IN_PROCESS) -> None:
    """Checkpoint of the last committed step, unless there is one: who continues the run has nothing to redo."""
    if (unsaved := unsaved_step(run)) is not None:
        write_checkpoint(run, unsaved, execution)


def watch(run: RunContext, execution: Execution = _IN_PROCESS) -> None:
    """Warn, pause or fail when the training is beyond a bound of `alignment.stop`."""
    found = crossing(run)
    if found is None:
        return
    if stop_bounds(run.config).action != "warn":
        save_last(run, execution)
    try:
        carry_out(run, found)
    finally:
        execution.written(run)


def next_step(run: RunContext) -> int:
    """The first step that is not committed; its finished tasks are in the ledger and are not run again."""
    last = run.directory.ledger.last_step()
    assert last is not None, "begin() commits step 0"
    return last + 1


class BoundError(RuntimeError):
    """`alignment.stop.action` is fail, and a bound was crossed; the message names it."""


class TrainingPaused(Exception):
    """`alignment.stop.action` is pause, and a bound was crossed; the message names it."""


def crossing(run: RunContext) -> Crossing | None:
    """The bound that the last `patience` steps were beyond and nothing was done about yet.

    A step beyond a bound that has patience left is a warning on the console.
    """
    bounds, last = stop_bounds(run.config), run.directory.ledger.last_step()
    assert last is not None, "begin() commits step 0"
    if not bounds.judges or last == START or run.directory.ledger.bounds(last):
        return None
    first = last - bounds.patience + 1
    if first > START and not run.directory.ledger.bounds(first) and (found := _crossed(run, bounds, first, last)):
        return found
    if bounds.action != "warn" and (found := _crossed(run, bounds, last, last)):
        run.console.note(f"warn: step {last}: {found.reason}; {bounds.action} after {bounds.patience} such steps")
    return None


def _crossed(run: RunContext, bounds: StopBounds, first: int, last: int) -> Crossing | None:
    steps = range(first, last + 1)
    return crossed(bounds, [step_metrics(run, index) for index in steps])


def carry_out(run: RunContext, found: Crossing) -> None:
    """Note a crossing in the ledger and on the console; then warn, pause or fail.
    Raises TrainingPaused, BoundError: by `alignment.stop.action`."""
    action, step = stop_bounds(run.config).action, run.directory.ledger.last_step()
    assert step is not None, "a bound is crossed by a committed step"
    assert action != "none", "nothing is crossed where nothing is judged"
    run.directory.ledger.append(BoundEntry(step=step, bound=found.bound, action=action, reason=found.reason))
    told = f"step {step}: {found.reason}"
    run.console.note(f"{action}: {told}")
    if action == "pause":
        raise TrainingPaused(f"paused after {told}")
    if action == "fail":
        raise BoundError(f"failed after {told}")
