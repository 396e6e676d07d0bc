"""The trainings of a parity run: their plan, made before any work, and how each one is run.

A training runs in this process, or in one of its own where its engine needs one (`EngineEntry.own_process`). Such an
engine reads its environment when it is imported, and its GPU memory is free only when its process is gone:

    python -m flows.parity_training FLOW_RUN MEMORY

trains as that flow run specifies, appends samples of its memory to the file, and stops with its parent.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect import Task, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.states import Crashed

from flows.environment import leave_working_directory_out, search_last
from flows.grpo import grpo
from fp8core.config.load import NON_NUMERIC_KEYS, Overrides, load_config, merged_overrides
from fp8core.config.run import RunConfig, public_dump
from fp8core.end_with_parent import TiedProcess, running
from fp8core.errors import UserError
from fp8core.parity.measure import VARIANTS, MemorySample, corrected, variant_settings
from fp8core.parity.verdict import ParityResult, Verdict
from fp8core.rollout.registry import engine_entry
from fp8core.run.build import check_memory, members_node
from fp8core.run.open import plan_of, refuse_conflict
from fp8core.store.durable import lines_forward, whole_end
from fp8core.store.json_text import canonical_json
from fp8core.store.manifest import current_code, git_state, hardware, library_versions
from fp8core.store.run_directory import read_description
from fp8core.store.run_view import RunView

SHELF = "parity"
"""Folder beside the runs, with a folder for each parity run."""
_DIGITS = 8
_INTERRUPT = b"interrupt\n"
INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class ParityRequest:
    """The parameters of the flow."""

    config: str
    name: str | None
    seeds: tuple[int, ...] | None
    steps: int | None
    variants: tuple[str, ...]
    overrides: Overrides | None


@dataclass(frozen=True)
class Training:
    """One training: its checked configuration, and the parameters that the training flow finds it from."""

    variant: str
    seed: int
    config: RunConfig
    parameters: dict[str, Any]

    @property
    def shown_as(self) -> str:
        """Name of its flow run, which is below that of the parity run."""
        return f"{self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.config.runs.absolute() / str(self.config.run)


@dataclass(frozen=True)
class Plan:
    """Everything a parity run does. Seeds come one after another, so that each shares one warm start."""

    name: str
    config: RunConfig
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    trainings: tuple[Training, ...]

    @property
    def folder(self) -> Path:
        """Of the verdict and the report."""
        return self.config.runs.absolute() / SHELF / self.name

    @cached_property
    def corrected(self) -> RunConfig:
        """The configuration with the correction that the corrected variant has."""
        return self.config.model_copy(update={"correction": corrected(self.config)})

    @property
    def platform(self) -> str:
        """Where the rollout engine computes."""
        return members_node(self.config).platform if engine_entry(self.config).gpus(self.config) else "cpu"


def refuse(asked: ParityRequest, date: str) -> Plan:
    """The plan, checked. `date` goes into the name of a parity run that has none.

    Raises:
        UserError: something is named twice, a configuration is refused, a run exists with another configuration, or
            does not fit on this machine.
    """
    for what, values in (("seeds", asked.seeds or ()), ("variants", asked.variants)):
        if len({*values}) != len(values):
            raise UserError(f"{what}: one is named twice in {', '.join(map(str, values))}")
    steps = {} if asked.steps is None else {"steps": asked.steps}
    overrides = merged_overrides(asked.overrides or {}, steps)
    config = load_config(asked.config, overrides)
    # In the order of VARIANTS: the baseline is there when a parity run is cut short.
    variants = tuple(name for name in VARIANTS if name in asked.variants)
    name = asked.name or f"{config.name}-{date}-{_digest(config)}"
    seeds = tuple(range(config.parity.seeds)) if asked.seeds is None else asked.seeds
    trainings = tuple(
        _training(asked.config, overrides, config, name, variant, seed) for seed in seeds for variant in variants
    )
    return Plan(name, config, variants, seeds, trainings)


def _training(named: str, overrides: Overrides, config: RunConfig, night: str, variant: str, seed: int) -> Training:
    run = f"parity-{night}-{variant}-{seed}"
    settings = merged_overrides(overrides, {**variant_settings(VARIANTS[variant], config, seed), "run": run})
    own = load_config(named, settings)
    plan_of(own)
    refuse_conflict(own)
    check_memory(own, members_node(own))
    return Training(variant, seed, own, {"config": named, "run": run, "overrides": settings})


def _digest(config: RunConfig) -> str:
    """Of everything that affects numbers: another setting or other code is another parity run."""
    settings = {
        key: value for key, value in public_dump(config).items() if key not in NON_NUMERIC_KEYS or key == "steps"
    }
    parts = {"settings": settings, "code": current_code(), "versions": library_versions()}
    return hashlib.sha256(canonical_json(parts, "parity")).hexdigest()[:_DIGITS]


def committed(folder: Path) -> int | None:
    """The last committed step of a run; None when there is none."""
    if read_description(folder) is None:
        return None
    steps = RunView.read(folder).steps
    return max(steps) if steps else None


def record_of(plan: Plan, verdict: Verdict) -> ParityResult:
    """Record for the next parity run to compare itself with."""
    return ParityResult(
        name=plan.name,
        config=plan.config.name,
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        outcome=verdict.outcome,
        headline=verdict.headline,
        variants=plan.variants,
        seeds=plan.seeds,
        code_version=current_code(),
        git=git_state(Path(__file__).parent),
        versions=library_versions(),
        hardware=hardware(),
        settings=public_dump(plan.config),
        checks=verdict.checks,
    )


def train_one(training: Training, memory: Path) -> State[Any]:
    """Train, and append samples of the process's memory to `memory`; returns how the flow run of it ended."""
    if engine_entry(training.config).own_process:
        return train_apart(training.shown_as, training.parameters, memory)
    with watch_memory(memory):
        flow: Any = grpo.with_options(flow_run_name=training.shown_as)
        ended: State[Any] = flow(**training.parameters, return_state=True)
    return ended


def train_apart(name: str, parameters: dict[str, Any], memory: Path) -> State[Any]:
    """As `train_one`, in a process of its own; Ctrl-C and SIGTERM of this one, and its death, reach it."""
    with get_client(sync_client=True) as client:
        # As Prefect has it of a flow that calls another: below a task run of the caller.
        place = {"flow_run_id": UUID(runtime.flow_run.id), "dynamic_key": parameters["run"]}
        parent = client.create_task_run(Task(grpo.fn, name=grpo.name), name=parameters["run"], **place).id
        flow_run = client.create_flow_run(grpo, parameters=parameters, name=name, parent_task_run_id=parent).id
        code: int | str = "an exception in who started it"
        try:
            code = _run_child(running("flows.parity_training", str(flow_run), str(memory.absolute())))
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


def _train(flow_run: UUID, memory: Path) -> int:
    """The exit code; the flow run holds the details."""
    # An exception, so that the run is closed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    leave_working_directory_out()
    search_last(Path.cwd())
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(flow_run)
    try:
        with watch_memory(memory):
            state: Any = run_flow(grpo, found, return_type="state")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0 if state.is_completed() else 1


@contextmanager
def watch_memory(path: Path) -> Iterator[None]:
    """Append a sample to `path` every INTERVAL_SECONDS while the block lasts; its folder exists."""
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(path, over), name="memory-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_memory(path: Path) -> list[MemorySample]:
    """All samples, the oldest first; none without the file. A torn last line is left out."""
    if not path.is_file():
        return []
    with FileIO(path) as file:
        return [MemorySample(**json.loads(line)) for _, line in lines_forward(file, 0, whole_end(file))]


def _follow(path: Path, over: threading.Event) -> None:
    process = psutil.Process()
    with FileIO(path, "a+") as file:
        # A kill may have torn the last line.
        file.truncate(whole_end(file))
        while not over.wait(INTERVAL_SECONDS):
            sample = MemorySample(time.time(), os.getpid(), process.memory_info().rss / 2**20)
            file.write(f"{json.dumps(asdict(sample))}\n".encode())


if __name__ == "__main__":
    sys.exit(_train(UUID(sys.argv[1]), Path(sys.argv[2])))
