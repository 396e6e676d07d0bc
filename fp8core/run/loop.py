"""The training as a list of steps, and what it does beyond a bound of `alignment.stop`: the ledger alone decides."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from fp8core.alignment.bounds import Crossing, first_crossing, stop_bounds
from fp8core.errors import MemberLost, behind
from fp8core.evaluation.measure import compared_prompts
from fp8core.run import start
from fp8core.run.checkpoint import checkpoint_due, save_state, unsaved_step
from fp8core.run.context import RunContext
from fp8core.run.execute import StepError, TaskResult, carried_artifacts, commit_step, run_step, step_metrics
from fp8core.run.resume import restore, rewind_to
from fp8core.store.ledger import START, START_TASKS, BoundEntry

T = TypeVar("T")


class Execution:
    def call(self, run: RunContext, name: str, index: int, body: Callable[[], T]) -> T:
        return body()

    def iterate(self, run: RunContext, index: int) -> dict[str, TaskResult]:
        """All steps of iteration `index`, and its commit."""
        artifacts = carried_artifacts(run, index)
        results = dict[str, TaskResult]()
        for planned in run.graph.steps:
            ports = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
            results[planned.name] = run_step(run, index, planned, ports)
            artifacts |= results[planned.name].entry.outputs
        commit_step(run, index)
        return results

    def stage_done(self, run: RunContext, name: str, result: TaskResult) -> None:
        pass

    def restored(self, run: RunContext, redone: int) -> None:
        """Trainer and engine are where the ledger ends, after `redone` updates."""

    def before_step(self, run: RunContext, index: int) -> None:
        """Iteration `index` is next; may raise to stop the training."""

    def written(self, run: RunContext) -> None:
        pass

    def step_done(self, run: RunContext, index: int, results: Mapping[str, TaskResult]) -> None:
        """Iteration `index` is committed, and its checkpoint written or failed where one is due."""


IN_PROCESS = Execution()


def train(run: RunContext, execution: Execution = IN_PROCESS) -> None:
    """Every step that is not committed yet. Raises StepError: among others, when processes were lost too often."""
    for attempts_left in range(run.config.cluster.replacements, -1, -1):
        try:
            if attempts_left < run.config.cluster.replacements:
                # Here, where a loss while they are placed counts as one more.
                run.replace_members()
            _train(run, execution)
            return
        except (StepError, MemberLost) as error:
            # No name holds the error any longer than this block: its frames hold what the step had open.
            if behind(error, MemberLost) is None:
                raise
            if not attempts_left:
                raise StepError(str(error)) from behind(error, MemberLost)
            run.console.note(f"{error}; all processes are replaced")


def _train(run: RunContext, execution: Execution) -> None:
    begin(run, execution)
    if (missing := unsaved_step(run)) is not None and checkpoint_due(run, missing):
        # The update of the step that was cut may be redone already.
        version = run.trainer.version
        rewind_to(run, missing)
        write_checkpoint(run, missing, execution)
        rewind_to(run, version)
    watch(run, execution)
    for index in range(next_step(run), run.config.steps + 1):
        execution.before_step(run, index)
        results = execution.iterate(run, index)
        execution.written(run)
        try:
            if checkpoint_due(run, index):
                write_checkpoint(run, index, execution)
        finally:
            # The step is committed, with or without its checkpoint: no later process makes it.
            execution.step_done(run, index, results)
        watch(run, execution)
    # Of a step beyond the last one, too.
    rewind_to(run, next_step(run) - 1)


def begin(run: RunContext, execution: Execution = IN_PROCESS) -> int:
    """Step 0, then back to where an earlier process stopped; returns the number of updates that were redone."""
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
    if "draws" in run.graph.carries:
        stage("draws", lambda: start.first_draws(run))
    if compared_prompts(run.config):
        stage("precision_gap", lambda: start.precision_gap(run, scales, evaluation))
    if ledger.step(START) is None:
        commit_step(run, START)
    with run.console.part("restoring the policy"):
        redone = restore(run)
    execution.restored(run, redone)
    return redone


def write_checkpoint(run: RunContext, index: int, execution: Execution = IN_PROCESS) -> None:
    def save() -> None:
        with run.console.part(f"step {index}, checkpoint"):
            save_state(run, index)

    execution.call(run, "checkpoint", index, save)
    execution.written(run)


def save_last(run: RunContext, execution: Execution = IN_PROCESS) -> None:
    if (last_update := unsaved_step(run)) is not None and run.trainer.version == last_update:
        write_checkpoint(run, last_update, execution)


def watch(run: RunContext, execution: Execution = IN_PROCESS) -> None:
    """Raises TrainingPaused, BoundError: by `alignment.stop.action`."""
    crossing = _crossing(run)
    step = next_step(run) - 1
    action = stop_bounds(run.config).action
    if crossing is None:
        return
    assert action != "none", "nothing is crossed where nothing is judged"
    if action != "warn":
        save_last(run, execution)
    run.directory.ledger.append(BoundEntry(step=step, bound=crossing.bound, action=action, reason=crossing.reason))
    execution.written(run)
    reason = f"step {step}: {crossing.reason}"
    run.console.note(f"{action}: {reason}")
    if action == "pause":
        raise TrainingPaused(f"paused after {reason}")
    if action == "fail":
        raise BoundError(f"failed after {reason}")


def next_step(run: RunContext) -> int:
    last = run.directory.ledger.last_step()
    assert last is not None, "begin() commits step 0"
    return last + 1


class BoundError(RuntimeError):
    """`alignment.stop.action` is fail, and a bound was crossed."""


class TrainingPaused(Exception):
    """`alignment.stop.action` is pause, and a bound was crossed."""


def _crossing(run: RunContext) -> Crossing | None:
    bounds = stop_bounds(run.config)
    last = next_step(run) - 1

    def crossed_since(first: int) -> Crossing | None:
        return first_crossing(bounds, [step_metrics(run, index) for index in range(first, last + 1)])

    if not bounds.judges or last == START or run.directory.ledger.bounds(last):
        return None
    first = last - bounds.patience + 1
    if first > START and not run.directory.ledger.bounds(first) and (crossing := crossed_since(first)):
        return crossing
    if bounds.action != "warn" and (crossing := crossed_since(last)):
        run.console.note(f"warn: step {last}: {crossing.reason}; {bounds.action} after {bounds.patience} such steps")
    return None
