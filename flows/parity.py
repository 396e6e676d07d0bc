"""The parity flow: one configuration trained in BF16 and in FP8 variants on the same seeds, then a verdict.

fp8-grpo parity tiny-nightly                        this function, in this process
prefect deployment run fp8-parity/nightly           this function, from a worker
"""

import json
import subprocess
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from prefect import Task, flow, get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow_in_subprocess
from prefect.states import Completed, Crashed
from pydantic import Field

from flows.environment import bound_mlflow_requests
from flows.grpo import grpo
from flows.launch import say
from flows.orchestration import FlowOverrides, ParityName, failed_state, prepare_logs, unanswered_state
from flows.parity_plan import ParityPlan, Training, last_committed_step, record_of, refuse
from flows.tracking.store import quiet_store_logs
from flows.training_pages import artifact_key, show_markdown
from fp8core.durable import PRIVATE, make_folder, write_file
from fp8core.errors import UserError, first_line
from fp8core.parity import TrainingMeasurement, headline_of, judge, measure, outcome_of, parity_markdown
from fp8core.processes.end_with_parent import TiedProcess
from fp8core.report.pages import report_html
from fp8core.report.run_data import RunData, read_run
from fp8core.rollout.registry import engine_entry

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
PAGE = "report.html"


# Prefect's form takes bounds from the types and descriptions from the docstring.
@flow(name="fp8-parity", persist_result=False)
def parity(
    config: str = "tiny-nightly",
    name: ParityName | None = None,
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=100)] | None = None,
    variants: Annotated[tuple[str, ...], Field(min_length=1)] | None = None,
    overrides: FlowOverrides = None,
) -> Any:
    """Train in BF16 and in FP8, and judge whether FP8 learns the same; returns the verdict.

    FAIL fails the flow run; NOT ENOUGH DATA leaves it cancelled, by that name.

    Args:
        config: A shipped name (tiny-nightly, gsm8k) or the path of a configuration.
        name: Name of the parity run; an existing one is continued, null makes one of date, settings and code.
        seeds: Seeds that every variant is trained with; null takes as many from 0 as `parity.seeds` says.
        variants: What to train, as bf16 and fp8-end-to-end, of which others are compared with bf16; null: all.
        overrides: Any other setting, as {"parity.last_evaluations": 5}.
    """
    bound_mlflow_requests()
    quiet_store_logs()
    prepare_logs()
    try:
        plan = refuse(config, _date(), name=name, seeds=seeds, variants=variants, overrides=overrides)
        make_folder(plan.folder, PRIVATE)
        say(f"parity {plan.name}: {len(plan.trainings)} trainings")
        return _verdict(plan, _train(plan))
    except UserError as error:
        return failed_state(str(error))


def _date() -> str:
    """The day that the flow run was scheduled for: a retry after midnight continues what it began."""
    start = runtime.flow_run.scheduled_start_time
    return (start or datetime.now(UTC)).astimezone(UTC).date().isoformat()


def _train(plan: ParityPlan) -> dict[tuple[str, int], str]:
    """Every unfinished training, as a flow run of its own; returns why some failed."""
    failures = {}
    for number, training in enumerate(plan.trainings, start=1):
        shown_as = f"{training.variant}, seed {training.seed}"
        where = f"{number} of {len(plan.trainings)}, {shown_as}"
        if last_committed_step(training.folder) == training.config.steps:
            say(f"{where}: done before")
            continue
        say(where)
        state = train_one(shown_as, training)
        if not state.is_completed():
            failures[training.variant, training.seed] = first_line(RuntimeError(state.message))
    return failures


def _verdict(plan: ParityPlan, failures: dict[tuple[str, int], str]) -> Any:
    report_runs: dict[str, RunData] = {}
    measurements: list[TrainingMeasurement] = []
    for training in plan.trainings:
        if last_committed_step(training.folder) is not None:
            run = read_run(training.folder, training.variant)
            report_runs.setdefault(training.variant, run)
            measurements.append(measure(run, training.variant, training.seed, plan.config.parity.last_evaluations))
    config = plan.config.parity
    checks = judge(measurements, config, variants=plan.variants, seeds=plan.seeds, failures=failures)
    record = record_of(plan, checks)
    headline = headline_of(checks)
    text = parity_markdown(plan.name, checks, measurements)
    write_file(plan.folder / "verdict.json", f"{json.dumps(record, indent=2)}\n".encode())
    write_file(plan.folder / "report.md", text.encode())
    if report_runs:
        write_file(plan.folder / PAGE, report_html([*report_runs.values()]).encode())
    show_markdown(text, artifact_key(plan.name, "verdict"), headline[:200])
    get_run_logger().info(text)
    say(f"{text}\n{plan.folder / PAGE}")
    match outcome_of(checks):
        case "FAIL":
            return failed_state(headline)
        case "PASS":
            return Completed(message=headline, data=record)
        case outcome:
            return unanswered_state(outcome, headline)


def train_one(name: str, training: Training) -> State[Any]:
    if engine_entry(training.config).own_process:
        return train_apart(name, training.parameters)
    flow: Any = grpo.with_options(flow_run_name=name)
    state: State[Any] = flow(**training.parameters, return_state=True)
    return state


# The pipe ends when the process that holds its other end does, however that is.
_STOP_AT_END = "import os, signal, sys; sys.stdin.read(); os.kill(int(sys.argv[1]), signal.SIGTERM)"


def train_apart(name: str, parameters: dict[str, Any]) -> State[Any]:
    """As `train_one`, in a process of its own; Ctrl-C, SIGTERM and the death of this one stop it."""
    with get_client(sync_client=True) as client:
        # As Prefect has it of a flow that calls another: below a task run of the caller.
        place = {"flow_run_id": UUID(runtime.flow_run.id), "dynamic_key": parameters["run"]}
        parent = client.create_task_run(Task(grpo.fn, name=grpo.name), name=parameters["run"], **place).id
        flow_run = client.create_flow_run(grpo, parameters=parameters, name=name, parent_task_run_id=parent)
        process = run_flow_in_subprocess(grpo, flow_run, parameters)
        guard = TiedProcess(["-c", _STOP_AT_END, str(process.pid)], subprocess.DEVNULL)
        try:
            process.join()
        finally:
            guard.kill()
            process.terminate()
            process.join()
            guard.wait()
        state = client.read_flow_run(flow_run.id).state
        assert state is not None, "every flow run has a state"
        if not state.is_final():
            state = Crashed(message=f"its process ended with {process.exitcode}")
            client.set_flow_run_state(flow_run.id, state, force=True)
        return state
