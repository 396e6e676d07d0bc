"""One training of a parity run: in this process, or in one of its own where the rollout engine is not ours.

vLLM reads its environment when it is imported, and what it leaves of a GPU's memory is free when its process is gone:

    python -m flows.parity_training FLOW_RUN MEMORY

trains what that flow run says, appends samples of its memory to the file, and stops with who started it.
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

from flows.grpo import grpo
from flows.lifeline import Lifeline, running
from flows.parity_night import Training
from tasks.memory_watch import watch_memory

_INTERRUPT = b"interrupt\n"


def train_one(training: Training, memory: Path) -> State[Any]:
    """Train, and append samples of the process's memory to `memory`; returns how the flow run of it ended."""
    if training.config.rollout.engine != "embedded":
        return train_apart(training.parameters, memory)
    with watch_memory(memory):
        ended: State[Any] = grpo(**training.parameters, return_state=True)
    return ended


def train_apart(parameters: dict[str, Any], memory: Path) -> State[Any]:
    """As `train_one`, in a process of its own; Ctrl-C and SIGTERM of this one, and its death, reach it."""
    with get_client(sync_client=True) as client:
        # As Prefect has it of a flow that calls another: below a task run of the caller.
        place = {"flow_run_id": UUID(runtime.flow_run.id), "dynamic_key": parameters["run"]}
        parent = client.create_task_run(Task(grpo.fn, name=grpo.name), name=parameters["run"], **place).id
        flow_run = client.create_flow_run(grpo, parameters=parameters, parent_task_run_id=parent).id
        code: int | str = "an exception in who started it"
        try:
            code = _run_child(running("flows.parity_training", str(flow_run), str(memory.absolute())))
        finally:
            ended = _how_it_ended(client, flow_run, code)
    return ended


def _run_child(arguments: list[str]) -> int:
    assert sys.__stdout__ is not None, "a command has a standard output"
    child = Lifeline(arguments, sys.__stdout__.fileno())
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.end(_INTERRUPT)
        raise
    finally:
        child.end()


def _how_it_ended(client: SyncPrefectClient, flow_run: UUID, code: int | str) -> State[Any]:
    """The final state of a flow run whose process is gone; one that could not say so itself has crashed."""
    state = client.read_flow_run(flow_run).state
    assert state is not None, "every flow run has a state"
    if not state.is_final():
        state = Crashed(message=f"its process ended with {code}")
        client.set_flow_run_state(flow_run, state, force=True)
    return state


def _stop_with_parent() -> None:
    """Its Ctrl-C is ours; its end asks us to stop after the step that we are in."""
    # No buffered read, whose lock a thread would still hold when the interpreter ends.
    word = os.read(0, len(_INTERRUPT))
    os.kill(os.getpid(), signal.SIGINT if word == _INTERRUPT else signal.SIGTERM)


def _train(flow_run: UUID, memory: Path) -> int:
    """The exit code; the flow run says more."""
    # An exception, so that the run is closed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    # Verifiers of the user's own lie in the working directory.
    sys.path.insert(0, os.getcwd())
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(flow_run)
    try:
        with watch_memory(memory):
            state: Any = run_flow(grpo, found, return_type="state")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    sys.exit(_train(UUID(sys.argv[1]), Path(sys.argv[2])))
