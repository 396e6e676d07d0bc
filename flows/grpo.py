"""The training flow: warm start, then iterations of the declared DAG until the configured number of steps.

fp8-grpo run tiny                             this function, in this process
prefect deployment run fp8-grpo/tiny          this function, from a worker
"""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.states import Paused, Suspended
from pydantic import Field

from flows.environment import bound_mlflow_requests, set_engine_variables
from flows.failure import failed
from flows.guardian import Guardian
from flows.iteration import as_task, prefect_tasks, run_iteration
from flows.named_run import load_settings
from flows.run_artifacts import run_artifacts
from flows.termination import keep_interrupt, stop_on_sigterm
from fp8core.config.load import merged_overrides
from fp8core.config.run import RUN_NAME, RunConfig
from fp8core.errors import UserError
from fp8core.report.console import Console, StyleAccuracy
from fp8core.report.curves import draw_curves
from fp8core.report.summary import StepTiming, Summary, summarise
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START
from fp8core.training.trainer import NotFiniteError
from fp8core.workers.live import live_run
from tasks import start
from tasks.bounds import BoundError, TrainingPaused, carry_out, crossing
from tasks.checkpoint import checkpoint_due, missing_checkpoint, save_state, unsaved_step
from tasks.commit import commit_step, history, step_metrics
from tasks.execute import Interval, StepError, TaskResult
from tasks.loop import next_step
from tasks.publish import write_report
from tasks.restore import RedoError, carried, restore
from tasks.session import Session, follow_ledger, open_session
from tasks.sync import SyncError
from tasks.tracking_store import quiet_store_logs, ui_command


# Prefect's form takes bounds from the types and descriptions from the docstring.
@flow(name="fp8-grpo", persist_result=False)
def grpo(
    config: str = "tiny",
    run: Annotated[str | None, Field(max_length=120, pattern=RUN_NAME)] = None,
    steps: Annotated[int | None, Field(ge=1, le=10_000_000)] = None,
    seed: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None,
    overrides: dict[str, Any] | list[str] | None = None,
    new_code: bool = False,
) -> Any:
    """Train a policy with GRPO; returns the summary. What went wrong is the message of the failed state.

    Args:
        config: A shipped name (tiny, gsm8k), the path of a configuration, or the folder of a run to continue.
        run: Name of the run; an existing one is continued, null makes a name.
        steps: GRPO steps; null takes the configuration's.
        seed: Seed of everything random; null takes the configuration's.
        overrides: Any other setting, as {"training.learning_rate": 1e-4}.
        new_code: Continue a run with other code than last, as a new segment.
    """
    bound_mlflow_requests()
    quiet_store_logs()
    flat = {"run": run, "steps": steps, "seed": seed}
    given = {key: value for key, value in flat.items() if value is not None}
    try:
        settings = load_settings(config, merged_overrides(overrides or {}, given))
        return train(settings, new_code=new_code).model_dump(mode="json")
    except (UserError, NotFiniteError, SyncError, RedoError, BoundError) as error:
        return failed(str(error))
    except TrainingPaused as reason:
        return pause(str(reason))
    except StepError as error:
        return failed(str(error), error.__cause__)


def train(config: RunConfig, *, new_code: bool = False) -> Summary:
    """Train from wherever the run stands to its last step, or to the step in which SIGTERM comes."""
    console, name = Console(sys.stdout, config.steps), run_name(config)
    set_engine_variables(config)
    with (
        Guardian(config.runs / name),
        open_session(config, name, console, new_code=new_code) as session,
        run_artifacts(session) as artifacts,
        keep_interrupt() as interrupt,
        stop_on_sigterm() as stop,
    ):
        begin(session)
        tasks = prefect_tasks(session.run.plan)
        watch(session)
        for index in range(next_step(session.run), config.steps + 1):
            interrupt.check()
            if stop.requested:
                leave(session, index - 1)
                stop.carry_out()
            iterate(session, tasks, index)
            artifacts.step_done(index)
            watch(session)
        return finish(session, console)


def begin(session: Session) -> None:
    """Policy 0, its scales and its accuracy; then back to where an earlier process stopped."""
    run, folder = session.run, session.run.directory.path
    session.stage("warm_start", _warm_start(folder, index=START))
    scales: TaskResult = _first_scales(folder, index=START)
    session.stage("first_scales", scales)
    evaluated = _first_evaluation(folder, index=START, scales=scales.entry.outputs["scales"])
    session.stage("first_evaluation", evaluated)
    styles = run.directory.store.get_json(evaluated.entry.outputs["evaluation"]).get("styles", [])
    if styles and not evaluated.reused:
        run.console.styles([StyleAccuracy(**style) for style in styles])
    if run.directory.ledger.step(START) is None:
        commit_step(run, START)
    redone = restore(run)
    follow_ledger(session)
    if next_step(run) > START + 1:
        run.console.note(f"continues after step {next_step(run) - 1}; {redone} updates redone from rollouts")
    if (missing := missing_checkpoint(run)) is not None:
        _checkpoint(folder, missing)
        session.publisher.wake()


def iterate(session: Session, tasks: Any, index: int) -> None:
    """One iteration, committed, and checkpointed when it is due; MLflow gets it beside the next one."""
    run, began = session.run, time.perf_counter()
    results = run_iteration(run, tasks, index, carried(run, index))
    intervals = {name: [result.interval] for name, result in results.items()}
    intervals["commit"] = [_commit(run.directory.path, index)]
    session.publisher.wake()
    if checkpoint_due(run, index):
        intervals["checkpoint"] = [_checkpoint(run.directory.path, index)]
        session.publisher.wake()
    ended = time.perf_counter()
    session.timings.append(StepTiming(step=index, interval=(began, ended), tasks=intervals))
    seconds = {name: result.entry.seconds for name, result in results.items()}
    run.console.step({**step_metrics(run, index), "step": index}, ended - began, seconds)


def watch(session: Session) -> None:
    """Warn, pause or fail when the training is beyond a bound of `alignment.stop` (`tasks.bounds`)."""
    found = crossing(session.run)
    if found is None:
        return
    if session.run.config.alignment.stop.action != "warn":
        save_last(session)
    try:
        carry_out(session.run, found)
    finally:
        session.publisher.wake()


def leave(session: Session, index: int) -> None:
    """Write a checkpoint of the last step, so that continuing has nothing to redo."""
    save_last(session)
    session.run.console.note(f"stopped after step {index}")


def save_last(session: Session) -> None:
    """Write a checkpoint of the last step, unless there is one."""
    if (unsaved := unsaved_step(session.run)) is not None:
        _checkpoint(session.run.directory.path, unsaved)
        session.publisher.wake()


def finish(session: Session, console: Console) -> Summary:
    """Curves, summary and report, in the folder and in MLflow."""
    run, tracker = session.run, session.tracker
    metrics = history(run)
    picture = run.directory.path / "curves.png"
    draw_curves(metrics, picture, f"{run.directory.path.name}: {run.config.name}, seed {run.config.seed}")
    summary = summarise(
        metrics,
        session.timings,
        run=run.directory.path.name,
        mlflow_run_id=tracker.run_id,
        weights_digest=run.ready_trainer().digest(),
        total_seconds=time.perf_counter() - session.began,
        stage_seconds={name: end - begin for name, (begin, end) in session.stages.items()},
    )
    run.directory.write_text("summary.json", summary.model_dump_json(indent=2) + "\n")
    write_report(run)
    session.publisher.add_result()
    console.summary(summary, picture, ui_command(tracker.uri), tracker.page)
    return summary


def pause(reason: str) -> State[Any]:
    """The state of a flow run that a person will continue by its name.

    Raises:
        Pause: the flow run came from a deployment, where it is suspended now: resumed, it goes to a worker again.
    """
    if runtime.deployment.id is None:
        return Paused(message=reason)
    state = Suspended(message=reason)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(runtime.flow_run.id, state)
    raise Pause(state=state)


def run_name(config: RunConfig) -> str:
    """The configured name, else one that a retry of the same flow run finds again."""
    return config.run or f"{config.name}-{str(runtime.flow_run.id)[:8]}"


@as_task("warm_start")
def _warm_start(folder: Path, index: int) -> TaskResult:
    run = live_run(folder)
    result = start.warm_start(run)
    start.bring_to_life(run)
    return result


@as_task("first_scales")
def _first_scales(folder: Path, index: int) -> TaskResult:
    return start.first_scales(live_run(folder))


@as_task("first_evaluation")
def _first_evaluation(folder: Path, index: int, scales: Ref) -> TaskResult:
    return start.first_evaluation(live_run(folder), scales)


@as_task("commit")
def _commit(folder: Path, index: int) -> Interval:
    began = time.perf_counter()
    commit_step(live_run(folder), index)
    return began, time.perf_counter()


@as_task("checkpoint")
def _checkpoint(folder: Path, index: int) -> Interval:
    began = time.perf_counter()
    save_state(live_run(folder), index)
    return began, time.perf_counter()
