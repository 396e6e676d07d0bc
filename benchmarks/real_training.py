"""One training of benchmarks/real_parity.py, by the library alone: no Prefect, no MLflow, and no server beside it.

    python -m benchmarks.real_training CONFIG KEY=VALUE ...

trains as `fp8-grpo run CONFIG --set KEY=VALUE ...` does, with the same files in the run's folder: the same commands
resume it, verify it and report on it. SIGTERM stops it after its step, with a checkpoint. Kernels must be compiled
(`fp8-grpo compile CONFIG`), or each training compiles them while the GPU waits.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence

from flows.environment import leave_working_directory_out, set_engine_variables
from flows.termination import ExitCode, StopRequest, stop_on_sigterm
from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run import loop
from fp8core.run.context import RunContext
from fp8core.run.execute import TaskResult, step_metrics
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of


class StoppableExecution(loop.Execution):
    """Steps one after the other, each with a line on the console; a request to stop is carried out between two."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._began = stop, time.perf_counter()

    def before_step(self, run: RunContext, index: int) -> None:
        if self._stop.is_set:
            loop.save_last(run, self)
            self._stop.carry_out()
        self._began = time.perf_counter()

    def step_done(self, run: RunContext, index: int, results: Mapping[str, TaskResult]) -> None:
        seconds = {name: result.entry.seconds for name, result in results.items()}
        run.console.step({**step_metrics(run, index), "step": index}, time.perf_counter() - self._began, seconds)


def main(arguments: Sequence[str]) -> int:
    """Train from the run's current step to its last. Raises UserError: as `load_config` and `open_run`."""
    name, *settings = arguments
    # An exception, so that the run's processes end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    leave_working_directory_out()
    config = load_config(name, settings)
    set_engine_variables(config)
    console = Console(sys.stdout, config.steps)
    with (
        open_directory(config, str(config.run)) as folder,
        open_run(config, graph_of(config), folder, console) as run,
        stop_on_sigterm() as stop,
    ):
        loop.train(run, StoppableExecution(stop))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
