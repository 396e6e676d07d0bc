"""How a flow says why it failed: in its state, which the UI shows, and in its log, which `--watch` prints."""

from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Failed


def failed(reason: str, cause: BaseException | None = None) -> State[Any]:
    """The state of a flow run that failed for `reason`; `cause` is for whoever asks the state for its result."""
    get_run_logger().error(reason)
    return Failed(message=reason, data=cause)
