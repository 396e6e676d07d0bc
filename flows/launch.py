"""Run the training flow in this process. Every command imports this module: no Prefect and no torch at the top."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from flows.environment import is_set, prepare_prefect
from flows.termination import ExitCode
from flows.tracking.record import read_record
from fp8core.durable import Output
from fp8core.errors import first_line, printable, printable_lines
from fp8core.progress import Part

if TYPE_CHECKING:
    from fp8core.config.run import RunConfig


def launch(config: "RunConfig", parameters: Mapping[str, Any], summary: Output | None, resume: str) -> int:
    """Run the flow, which finds `config` from `parameters`, to its end; returns the exit code, raises UserError.

    `resume`, the command that continues the run, is shown after a stop.
    """
    from fp8core.freed_memory import keep_freed_memory
    from fp8core.run.build import wants_gpus
    from fp8core.run.open import check_runnable
    from fp8core.store.run_directory import read_description

    with Part("checking model and data", say):
        check_runnable(config, new_code=parameters.get("new_code", False))
    check_trackers(config)
    if not wants_gpus(config):
        # Before Prefect's threads, in which the steps run, have arenas of their own.
        keep_freed_memory()

    def reason(word: str) -> str:
        has_folder = read_description(config.runs / str(config.run)) is not None
        return f"{word}; {resume} continues the run" if has_folder else f"{word} before the run had begun"

    say("starting Prefect and MLflow")
    # An exception, so that the run is closed and Prefect's server stops with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_with(reason("terminated"), ExitCode.TERMINATED)))
    try:
        prepare_prefect("flows.grpo")
        return _train(config, parameters, summary, resume)
    except KeyboardInterrupt:
        return exit_with(reason("interrupted"), ExitCode.INTERRUPTED)


def check_trackers(config: "RunConfig") -> None:
    """Raises UserError: a run that a service does not know yet cannot begin there."""
    from flows.tracking.tracker import find_tracker

    record = read_record(config.runs / str(config.run))
    for service in config.tracking.services:
        # MLflow takes seconds to import, which otherwise pass while Prefect starts.
        if service == "mlflow" and config.tracking.uri is None and not is_set("MLFLOW_TRACKING_URI"):
            continue
        if record is None or service not in record.services:
            find_tracker(service).check(config)


def say(text: object, file: TextIO | None = None) -> None:
    """Print a text of one or several lines to `file` (standard output), with all of others' in it escaped."""
    print(printable_lines(str(text)), file=file, flush=True)


def long_part(name: str) -> Part:
    """A part of a command's work, whose lines of progress go to standard error: results go to standard output."""
    return Part(name, partial(say, file=sys.stderr))


def exit_with(reason: str, code: int) -> int:
    say(f"fp8-grpo: {printable(reason)}", sys.stderr)
    return code


def _train(config: "RunConfig", parameters: Mapping[str, Any], summary: Output | None, resume: str) -> int:
    import httpx

    from flows.grpo import grpo

    try:
        # To Prefect's types a call with a dict may be that of an async flow.
        state: Any = grpo.with_options(flow_run_name=config.run)(**parameters, return_state=True)
    except httpx.TransportError as error:
        _end_without_prefect(config, summary, resume, error)
    if state.is_paused():
        return exit_with(f"{state.message}; {resume} continues the run", ExitCode.PAUSED)
    if not state.is_completed():
        explain(state)
        return ExitCode.FAILED
    if summary is not None:
        summary.write_json(state.result())
    return ExitCode.DONE


def _end_without_prefect(config: "RunConfig", summary: Output | None, resume: str, error: Exception) -> NoReturn:
    """End this process, with the code of how the run's folder ended: Prefect's server did not hear of the end."""
    from fp8core.store.layout import SUMMARY
    from fp8core.store.run_view import RunView

    folder = config.runs / str(config.run)
    summary_file = folder / SUMMARY
    complete = summary_file.exists() and max(RunView.read(folder).steps, default=0) >= config.steps
    code = ExitCode.DONE if complete else ExitCode.FAILED
    if not complete:
        exit_with(f"Prefect does not answer ({first_line(error)}); {resume} continues the run", code)
    else:
        if summary is not None:
            summary.write(summary_file.read_bytes())
        say("Prefect does not answer: its UI lacks the end of this run, which is complete")
    # Not a return: Prefect's threads would try for minutes to deliver what they hold.
    os._exit(code)


def explain(state: Any) -> None:
    from prefect.exceptions import FailedRun

    cause = state.result(raise_on_failure=False)
    if isinstance(cause, BaseException) and not isinstance(cause, FailedRun):
        say("".join(traceback.format_exception(cause)).rstrip("\n"), sys.stderr)
    exit_with(state.message.splitlines()[0], ExitCode.FAILED)
