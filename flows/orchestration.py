"""Types of the flows' parameters, logs of the flows, and states of a flow run that has no result."""

import logging
from typing import Annotated, Any, TextIO

from prefect import get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, FailedRun
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Failed
from pydantic import Field, WithJsonSchema
from rich.text import Text

from flows.environment import OWN_UI, program
from fp8core.config.run import RUN_NAME
from fp8core.errors import printable_lines

FlowOverrides = Annotated[
    dict[str, Any] | list[str] | None, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
]
"""Overrides of a flow, which a server takes as a mapping."""
RunName = Annotated[str, Field(max_length=120, pattern=RUN_NAME)]
ParityName = Annotated[RunName, Field(max_length=80)]


def prepare_logs() -> None:
    """Let Prefect's logs, on terminals and on its server, hold texts of others escaped, and one reason of a failure."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_escape_record)


def _escape_record(record: logging.LogRecord) -> bool:
    """Escapes a record, whose traceback quotes others, too. False leaves it out."""
    if record.exc_info and isinstance(record.exc_info[1], FailedRun | CancelledRun):
        # Prefect raises these where a flow returned such a state: `failed` and `unanswered` logged its reason.
        return False
    record.msg = printable_lines(record.getMessage())
    record.args = None
    if record.exc_info:
        # A formatter takes a text that is there already.
        record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
    return True


class LoggedLines:
    """A text file whose whole lines go to Prefect's logs too, without their colours.

    The logs are that of this flow run and, within a page of a step, that of the step.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._training = FlowRunContext.get()
        self._log = get_run_logger()
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = f"{self._rest}{text}".split("\n")
        place = FlowRunContext.get()
        logs = [self._log] if place in (None, self._training) else [self._log, get_run_logger()]
        for line in filter(str.strip, lines):
            for log in logs:
                log.info("%s", Text.from_ansi(line).plain)
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def run_links() -> dict[str, str]:
    """Words for a user -> the address of this flow run's page, and the command that serves it where nothing does."""
    page = runtime.flow_run.ui_url
    if page is None:
        return {}
    served = not page.startswith(OWN_UI) or get_current_settings().api.url == f"{OWN_UI}/api"
    return (
        {"Prefect run": page} if served else {"Prefect UI": f"{program('prefect')} server start", "Prefect run": page}
    )


def failed_state(reason: str, cause: BaseException | None = None) -> State[Any]:
    """The state of a flow run that failed for `reason`; `cause` is for callers that read the state's result."""
    shown = printable_lines(reason)
    get_run_logger().error(shown)
    return Failed(message=shown, data=cause)


def unanswered_state(name: str, reason: str) -> State[Any]:
    """The state of a flow run that did its work and has no answer: final, grey in the UI, and no success."""
    shown = printable_lines(reason)
    get_run_logger().warning(shown)
    return Cancelled(name=name, message=shown)
