"""Types of the flows' parameters, logs of the flows, and states of a flow run that has no result."""

import logging
from typing import Annotated, Any, TextIO

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Cancelled, Failed
from pydantic import Field, WithJsonSchema
from rich.text import Text

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
        logging.getLogger(name).addFilter(_escaped)


def _escaped(record: logging.LogRecord) -> bool:
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
    """A text file whose whole lines go to Prefect's log of this flow run too, without their colours."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._log = get_run_logger()
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = f"{self._rest}{text}".split("\n")
        for line in filter(str.strip, lines):
            self._log.info("%s", Text.from_ansi(line).plain)
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def failed(reason: str, cause: BaseException | None = None) -> State[Any]:
    """The state of a flow run that failed for `reason`; `cause` is for callers that read the state's result."""
    shown = printable_lines(reason)
    get_run_logger().error(shown)
    return Failed(message=shown, data=cause)


def unanswered(name: str, reason: str) -> State[Any]:
    """The state of a flow run that did its work and has no answer: final, grey in the UI, and no success."""
    shown = printable_lines(reason)
    get_run_logger().warning(shown)
    return Cancelled(name=name, message=shown)
