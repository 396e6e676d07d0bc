"""A training as Prefect tasks: the edges of the step graph, its pages, and the moments at which it stops."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, as_completed, wait
from prefect.states import Completed
from prefect.utilities.annotations import quote

from flows.termination import StopRequest
from flows.tracking.session import Session
from flows.training_pages import TrainingPages
from fp8core.config.step_graph import PlannedStep, StepGraph
from fp8core.report.console import shows_sample
from fp8core.report.run_data import overhead_ms
from fp8core.run import execute
from fp8core.run.context import RunContext
from fp8core.run.loop import Execution, next_step, save_last
from fp8core.run.measurement import gap_line
from fp8core.run.rollouts import written_sample
from fp8core.store.ledger import START
from fp8core.store.metrics import Interval

T = TypeVar("T")


class FlowExecution(Execution):
    """Every part of a training as a Prefect task, with tracking services and Prefect's pages beside it."""

    def __init__(self, session: Session, pages: TrainingPages, stop: StopRequest) -> None:
        graph = session.run.graph
        self._session, self._pages, self._stop = session, pages, stop
        self._steps = {planned.name: _as_task(execute.run_step, planned.name) for planned in graph.steps}
        self._producers = {planned.name: _producers(graph, planned) for planned in graph.steps}
        self._calls: dict[str, Any] = {}
        self._last: list[State[Any]] = []
        """Tasks of the open step, or of step 0, that the next one comes after."""
        self._began, self._intervals = 0.0, list[Interval]()

    def call(self, run: RunContext, name: str, index: int, body: Callable[[], T]) -> T:
        if name not in self._calls:
            self._calls[name] = _as_task(_run, name)
        results = list[T]()

        def timed() -> None:
            began = time.perf_counter()
            results.append(body())
            self._intervals.append((began, time.perf_counter()))

        with self._pages.place():
            state = self._calls[name](index, quote(timed), wait_for=self._last or None, return_state=True)
        state.result()
        self._last = [state]
        return results[0]

    def iterate(self, run: RunContext, index: int) -> dict[str, execute.TaskResult]:
        """Each step begins when the steps whose artifacts it reads have ended, whatever else is under way.

        An update of the live trainer runs in this thread. So does the first of those that may begin where none is under
        way: a call costs less than a submission.
        """
        artifacts, results = execute.carried_artifacts(run, index), dict[str, execute.TaskResult]()
        states, under_way = dict[str, State[Any]](), dict[PrefectFuture[Any], str]()

        def bound(planned: PlannedStep) -> tuple[Any, dict[str, Any]]:
            """The Prefect task of a step, and its arguments. All are quoted: Prefect neither copies nor reads them."""
            ports = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
            after = [states[producer] for producer in sorted(self._producers[planned.name])]
            options = {"index": index, "wait_for": after or None}
            if (
                stored := execute.stored_result(run, index, planned, execute.step_key(run, index, planned, ports))
            ) is not None:
                return _as_task(_cached_state, planned.name), {"stored": quote(stored), **options}
            arguments = {"run": quote(run), "planned": quote(planned), "inputs": quote(ports)}
            return self._steps[planned.name], arguments | options

        run.halted.clear()
        try:
            with self._pages.place():
                while len(results) < len(run.graph.steps):
                    waiting = [each for each in run.graph.ready({*results}) if each.name not in under_way.values()]
                    updates = [each for each in waiting if each.spec.redo]
                    own = next(iter(updates or ([] if under_way else waiting)), None)
                    for planned in waiting:
                        if planned is not own and not planned.spec.redo:
                            prefect_task, arguments = bound(planned)
                            under_way[prefect_task.submit(**arguments)] = planned.name
                    if own is not None:
                        prefect_task, arguments = bound(own)
                        name, state = own.name, prefect_task(**arguments, return_state=True)
                    else:
                        future = next(as_completed([*under_way]))
                        future.wait()
                        name, state = under_way.pop(future), future.state
                    results[name], states[name] = state.result(), state
                    artifacts |= results[name].entry.outputs
        except BaseException:
            run.halted.set()
            raise
        finally:
            wait([*under_way])
        self._last = [states[name] for name in states.keys() - set().union(*self._producers.values())]
        self.call(run, "commit", index, partial(execute.commit_step, run, index))
        return results

    def stage_done(self, run: RunContext, name: str, result: execute.TaskResult) -> None:
        if name == "precision_gap" and not result.is_reused:
            run.console.note(gap_line(run.store.get_json(result.entry.outputs["precision_gap"])))

    def restored(self, run: RunContext, redone: int) -> None:
        self._session.follow_ledger()
        if next_step(run) > START + 1:
            run.console.note(f"continues after step {next_step(run) - 1}; {redone} updates redone from rollouts")

    def before_step(self, run: RunContext, index: int) -> None:
        if self._stop.is_set:
            save_last(run, self)
            run.console.note(f"stopped after step {index - 1}")
            self._stop.carry_out()
        self._began, self._intervals = time.perf_counter(), []
        self._pages.begin_step(index, self._last)
        self._last = []

    def written(self, run: RunContext) -> None:
        self._session.wake()

    def step_done(self, run: RunContext, index: int, results: Mapping[str, execute.TaskResult]) -> None:
        began, end = self._began, time.perf_counter()
        intervals = [*self._intervals, *(result.interval for result in results.values())]
        self._session.overheads.append(overhead_ms((began, end), intervals))
        seconds = {name: result.entry.seconds for name, result in results.items()}
        with self._pages.place():  # So that its lines are on its page, too.
            run.console.step({**execute.step_metrics(run, index), "step": index}, end - began, seconds)
            if shows_sample(index, run.config.steps) and (found := written_sample(run, index)) is not None:
                run.console.sample(*found)
        self._pages.end_step(Completed())
        self._session.wake()
        self._session.report.wake()


def _as_task(function: Callable[..., Any], name: str) -> Any:
    """Make a Prefect task of a function with an argument `index`. The ledger persists and caches, not Prefect."""
    decorator = task(name=name, task_run_name=f"{name}-{{index}}", persist_result=False, cache_policy=NO_CACHE)
    return decorator(function)


def _producers(graph: StepGraph, reader: PlannedStep) -> set[str]:
    read = set(reader.inputs.values())
    return {step.name for step in graph.steps if not read.isdisjoint(step.outputs.values())}


def _cached_state(index: int, stored: execute.TaskResult) -> State[execute.TaskResult]:
    """A user sees what a resumed run did not repeat."""
    return Completed(name="Cached", data=stored)


def _run(index: int, body: Callable[[], None]) -> None:
    """Call it; quoted, so that Prefect neither copies nor reads it.

    A result would give false edges: Prefect has them by their address, which another object can have later."""
    body()
