"""Train what a parity run has planned (`flows.parity_plan`).

A training runs in this process, or in one of its own where its engine needs one (`EngineEntry.own_process`). Such an
engine reads its environment when it is imported, and its GPU memory is free only when its process is gone:

    python -m flows.parity_training FLOW_RUN

trains as that flow run specifies, and stops with its parent.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Task, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.states import Crashed

from flows.environment import leave_working_directory_out, search_last
from flows.grpo import grpo
from flows.parity_plan import Training
from flows.termination import ExitCode
from fp8core.processes.end_with_parent import TiedProcess, running
from fp8core.rollout.registry import engine_entry

_INTERRUPT = b"interrupt\n"


def train_one(name: str, training: Training) -> State[Any]:
    """Train as a flow run of this name; returns how it ended."""
    if engine_entry(training.config).own_process:
        return train_apart(name, training.parameters)
    flow: Any = grpo.with_options(flow_run_name=name)
    ended: State[Any] = flow(**training.parameters, return_state=True)
    return ended


def train_apart(name: str, parameters: dict[str, Any]) -> State[Any]:
    """As `train_one`, in a process of its own; Ctrl-C and SIGTERM of this one, and its death, reach it."""
    with get_client(sync_client=True) as client:
        # As Prefect has it of a flow that calls another: below a task run of the caller.
        place = {"flow_run_id": UUID(runtime.flow_run.id), "dynamic_key": parameters["run"]}
        parent = client.create_task_run(Task(grpo.fn, name=grpo.name), name=parameters["run"], **place).id
        flow_run = client.create_flow_run(grpo, parameters=parameters, name=name, parent_task_run_id=parent).id
        code: int | str = "an exception in who started it"
        try:
            code = _run_child(running("flows.parity_training", str(flow_run)))
        finally:
            ended = _how_it_ended(client, flow_run, code)
    return ended


def _run_child(arguments: list[str]) -> int:
    assert sys.__stdout__ is not None, "a command has a standard output"
    child = TiedProcess(arguments, sys.__stdout__.fileno())
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.end(_INTERRUPT)
        raise
    finally:
        child.end()


def _how_it_ended(client: SyncPrefectClient, flow_run: UUID, code: int | str) -> State[Any]:
    """The final state of a flow run whose process is gone; one that could not report it has crashed."""
    state = client.read_flow_run(flow_run).state
    assert state is not None, "every flow run has a state"
    if not state.is_final():
        state = Crashed(message=f"its process ended with {code}")
        client.set_flow_run_state(flow_run, state, force=True)
    return state


def _stop_with_parent() -> None:
    """The parent's Ctrl-C is raised here too; the parent's end stops this process after the current step."""
    # No buffered read, whose lock a thread would still hold when the interpreter ends.
    word = os.read(0, len(_INTERRUPT))
    os.kill(os.getpid(), signal.SIGINT if word == _INTERRUPT else signal.SIGTERM)


def _train(flow_run: UUID) -> int:
    # An exception, so that the run is closed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    leave_working_directory_out()
    search_last(Path.cwd())
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(flow_run)
    try:
        state: Any = run_flow(grpo, found, return_type="state")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if state.is_completed() else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(_train(UUID(sys.argv[1])))
