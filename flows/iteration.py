"""Execute one iteration of the declared DAG as Prefect tasks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import wait
from prefect.states import Completed
from prefect.utilities.annotations import quote

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

    Of steps that are ready together the last is called in this thread: a call costs less than a submitted task.
    """
    artifacts, results = dict(carried), dict[str, TaskResult]()
    while ready := run.plan.ready(set(results)):
        calls = [partial(tasks[planned.name], **_arguments(run, index, planned, artifacts)) for planned in ready]
        for planned, result in zip(ready, side_by_side(calls), strict=True):
            results[planned.name] = result
            artifacts |= result.entry.outputs
    assert len(results) == len(run.plan.steps), "a checked plan runs to its end"
    return results


def side_by_side(calls: Sequence[partial[Any]]) -> list[TaskResult]:
    """Results of Prefect tasks that run at once; what one of them raises is raised when all have ended."""
    *others, own = calls
    futures = [other.func.submit(**other.keywords) for other in others]
    try:
        result = own()
    finally:
        wait(futures)
    return [*(future.result() for future in futures), _value(result)]


def _value(result: TaskResult | State[TaskResult]) -> TaskResult:
    """What a called task returned, where its body may return the state it ends in.

    A state's own `result()` waits for another thread, which costs as much as half of a call.
    """
    return result.result() if isinstance(result, State) else result


def _arguments(run: LiveRun, index: int, planned: PlannedStep, artifacts: Mapping[str, Ref]) -> dict[str, Any]:
    inputs = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
    # Quoted: Prefect need not look for futures in it.
    return {"folder": run.directory.path, "index": index, "inputs": quote(inputs)}


def _prefect_task(planned: PlannedStep) -> Any:
    @as_task(planned.name)
    def body(folder: Path, index: int, inputs: dict[str, Ref]) -> Any:
        result = run_step(live_run(folder), index, planned, inputs)
        # Shown as cached, so that a person sees what a resumed run did not do again.
        return Completed(name="Cached", data=result) if result.reused else result

    return body
