"""Train what a parity run has planned (`flows.parity_plan`).

A training runs in this process, or in one of its own where its engine needs one (`EngineEntry.own_process`). Such an
engine reads its environment when it is imported, and its GPU memory is free only when its process is gone.
"""

import subprocess
from typing import Any
from uuid import UUID

from prefect import Task, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow_in_subprocess
from prefect.states import Crashed

from flows.grpo import grpo
from flows.parity_plan import Training
from fp8core.processes.end_with_parent import TiedProcess
from fp8core.rollout.registry import engine_entry


def train_one(name: str, training: Training) -> State[Any]:
    """Train as a flow run of this name; returns how it ended."""
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
