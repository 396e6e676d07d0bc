"""The training flow: warm start, then iterations of the declared DAG until the configured number of steps."""

import json
import sys
from typing import Annotated, Any, TextIO, cast
from uuid import UUID

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.states import Paused, Suspended
from pydantic import Field

from flows.environment import bound_mlflow_requests, kernel_folders, set_engine_variables
from flows.execution import FlowExecution
from flows.orchestration import FlowOverrides, LoggedLines, RunName, failed_state, prepare_logs, run_links
from flows.run_lookup import load_settings
from flows.termination import stop_on_sigterm
from flows.tracking.session import Session, open_session
from flows.tracking.store import quiet_store_logs
from flows.training_pages import TrainingPages
from fp8core.alignment.bounds import stop_bounds
from fp8core.config.capability import this_platform
from fp8core.config.load import merged_overrides
from fp8core.config.run import RunConfig, made_name
from fp8core.errors import ProcessLost, UserError, printable
from fp8core.progress import Part
from fp8core.report.chart import training_charts
from fp8core.report.conclusion import conclude
from fp8core.report.console import Console
from fp8core.report.drawing import draw_png
from fp8core.report.pages import report_html
from fp8core.report.run_data import CURVES, REPORT, read_run, summarise, time_spent
from fp8core.run import loop
from fp8core.run.compilation import HOPPER, compile_kernels
from fp8core.run.execute import StepError, carried_artifacts, stored_manifest
from fp8core.run.loop import BoundError, TrainingPaused, next_step
from fp8core.run.open import check_runnable
from fp8core.run.policy import SyncError
from fp8core.run.resume import RedoError
from fp8core.store.layout import SUMMARY
from fp8core.store.ledger import START
from fp8core.store.manifest import ChainTip
from fp8core.training.trainer import UpdateError


# Prefect's form takes bounds from the types and descriptions from the docstring.
@flow(name="fp8-grpo", persist_result=False)
def grpo(
    config: str = "tiny",
    run: RunName | None = None,
    steps: Annotated[int | None, Field(ge=1, le=10_000_000)] = None,
    seed: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None,
    overrides: FlowOverrides = None,
    new_code: bool = False,
) -> Any:
    """Train a policy with GRPO; returns the summary. A failed state has the reason as its message.

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
    prepare_logs()
    flat = {"run": run, "steps": steps, "seed": seed}
    own_overrides = {key: value for key, value in flat.items() if value is not None}
    try:
        settings = load_settings(config, merged_overrides(overrides or {}, own_overrides))
        if runtime.deployment.id is not None:
            # A command does both before it starts the flow.
            with get_client(sync_client=True) as client:
                client.set_flow_run_name(UUID(runtime.flow_run.id), run_name(settings))
            with Part("checking model and data", get_run_logger().info):
                check_runnable(settings.model_copy(update={"run": run_name(settings)}), new_code=new_code)
        return train(settings, new_code=new_code)
    except (UserError, UpdateError, SyncError, RedoError, BoundError, ProcessLost) as error:
        return failed_state(str(error))
    except TrainingPaused as reason:
        return pause(printable(str(reason)))
    except StepError as error:
        return failed_state(str(error), error.__cause__)


def train(config: RunConfig, *, new_code: bool = False) -> dict[str, Any]:
    """Train from the run's current step to its last step, or to the step in which SIGTERM comes."""
    console, name = Console(cast(TextIO, LoggedLines(sys.stdout)), config.steps), run_name(config)
    set_engine_variables(config)
    compile_first(config, console)
    with (
        open_session(config, name, console, run_links(), new_code=new_code) as session,
        TrainingPages(session.run) as pages,
        stop_on_sigterm() as stop,
    ):
        pages.start(session.pages)
        loop.train(session.run, FlowExecution(session, pages, stop))
        return finish(session, console)


def compile_first(config: RunConfig, console: Console) -> None:
    """Compile the kernels that are missing, on Hopper and outside of a cluster of the user's own."""
    platform = this_platform()
    if config.cluster.address is not None or platform != HOPPER:
        return
    with console.part("compiling kernels") as progress:
        result = compile_kernels(config, platform, kernel_folders(), progress)
    if result.done:
        console.note(str(result))


def finish(session: Session, console: Console) -> dict[str, Any]:
    run = session.run
    folder, name, bounds = run.directory.path, run.directory.path.name, stop_bounds(run.config)
    session.report.close()
    data = read_run(folder, name)
    run.directory.write_text(REPORT, report_html([data]))
    crossings = run.directory.ledger.bounds(START + 1)
    # A run that was continued may have crossed other bounds than those that it has now.
    reasons = dict.fromkeys(entry.reason.partition(":")[0] for entry in crossings)
    title = f"{name}: {run.config.name}, seed {run.config.seed}"
    conclusion = conclude(data)
    draw_png(training_charts(name, data.history, bounds, conclusion.collapses("collapse")), folder / CURVES, title)
    summary = {
        "run": name,
        **{f"{service}_run_id": tracker.run_id for service, tracker in session.trackers.items()},
        "chain_tip": str(ChainTip.of(stored_manifest(run, next_step(run) - 1))),
        # As stored: no rank is needed any more, and one may be lost.
        "weights_digest": run.store.get_json(carried_artifacts(run, next_step(run))["policy"])["weights_digest"],
        "seconds": {**time_spent(data.view), "total": sum(data.view.process_seconds)},
        "bounds": f"{', '.join(reasons)}; at the end {bounds.summary}" if crossings else bounds.summary,
        "bounds_crossed": len(crossings) if crossings or bounds.judges else None,
        "diagnosis": None if conclusion.diagnosis is None else conclusion.diagnosis.sentence,
        **summarise(data.history, session.overheads),
    }
    run.directory.write_text(SUMMARY, json.dumps(summary, indent=2) + "\n")
    session.add_result()
    places = {"report": str(folder / REPORT), "curves": str(folder / CURVES)}
    for tracker in session.trackers.values():
        places |= tracker.links()
    console.section(f"{name}: done", conclusion.paragraphs, {**places, "chain": summary["chain_tip"]})
    return summary


def pause(reason: str) -> State[Any]:
    """The state of a flow run that a user continues. Raises Pause: that of a deployment is suspended now."""
    if runtime.deployment.id is None:
        return Paused(message=reason)
    state: State[Any] = Suspended(message=reason)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(runtime.flow_run.id, state)
    raise Pause(state=state)


def run_name(config: RunConfig) -> str:
    """The configured name, else one that a retry of the same flow run finds again."""
    return config.run or made_name(config.name, str(runtime.flow_run.id)[:8])
