"""Execute one iteration of the declared DAG as Prefect tasks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait
from prefect.states import Completed

from fp8core.config.check import Plan, PlannedStep
from fp8core.store.artifacts import Ref
from fp8core.workers.live import LiveRun, live_run
from tasks.execute import TaskResult, run_step

PrefectTasks = Mapping[str, Any]


def as_task(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a Prefect task of a function of (folder, index, ...).

    The ledger persists and caches; Prefect does neither, so that there is one answer to what is done.
    """
    return task(name=name, task_run_name=f"{name}-{{index}}", persist_result=False, cache_policy=NO_CACHE)


def prefect_tasks(plan: Plan) -> PrefectTasks:
    """One Prefect task for each step of a plan, by name."""
    return {planned.name: _prefect_task(planned) for planned in plan.steps}


def run_iteration(run: LiveRun, tasks: PrefectTasks, index: int, carried: Mapping[str, Ref]) -> dict[str, TaskResult]:
    """Run every step as soon as its inputs exist; returns results by step name.

    A single ready step is called in this thread; only two or more are submitted, which costs more than a call.
    """
    artifacts, results = dict(carried), dict[str, TaskResult]()
    while ready := run.plan.ready(set(results)):
        calls = [(tasks[planned.name], _arguments(run, index, planned, artifacts)) for planned in ready]
        if len(calls) == 1:
            states = [call(**arguments, return_state=True) for call, arguments in calls]
        else:
            futures = [call.submit(**arguments) for call, arguments in calls]
            wait(futures)
            states = [future.state for future in futures]
        finished = [state.result() for state in states]
        for planned, result in zip(ready, finished, strict=True):
            results[planned.name] = result
            artifacts |= result.entry.outputs
    assert len(results) == len(run.plan.steps), "a checked plan runs to its end"
    return results


def _arguments(run: LiveRun, index: int, planned: PlannedStep, artifacts: Mapping[str, Ref]) -> dict[str, Any]:
    inputs = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
    return {"folder": run.directory.path, "index": index, "inputs": inputs}


def _prefect_task(planned: PlannedStep) -> Any:
    @as_task(planned.name)
    def body(folder: Path, index: int, inputs: dict[str, Ref]) -> Any:
        result = run_step(live_run(folder), index, planned, inputs)
        # Shown as cached, so that a person sees what a resumed run did not do again.
        return Completed(name="Cached", data=result) if result.reused else result

    return body
