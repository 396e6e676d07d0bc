"""Tell an MLflow that does not answer, which passes, from an MLflow that refuses, which does not."""

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException
from requests import HTTPError
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from fp8core.errors import UserError, first_line

# What MLflow raises for a server that cannot be reached or is overloaded, and for a database that is locked or away.
_PASSING_CODES = {
    "INTERNAL_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "IO_ERROR",
    "SERVICE_UNDER_MAINTENANCE",
    "WORKSPACE_TEMPORARILY_UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "REQUEST_LIMIT_EXCEEDED",
    "COULD_NOT_ACQUIRE_LOCK",
}
_PASSING_STATUS = {408, 429}


class Outage(RuntimeError):
    """The tracking store does not answer, or answers that it cannot at the moment; one line."""


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Errors of MLflow's client in the block as ours.

    Raises:
        Outage: trying again later may help.
        UserError: it will not.
    """
    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        kind = Outage if _passes(error) else UserError
        raise kind(f"tracking.uri {uri}: {first_line(error)}") from error


def _passes(error: Exception) -> bool:
    match error:
        case MlflowException():
            return error.error_code in _PASSING_CODES
        case HTTPError() if error.response is not None:
            return error.response.status_code >= 500 or error.response.status_code in _PASSING_STATUS
        case SQLAlchemyError():
            return isinstance(error, OperationalError)
        case FileNotFoundError():
            return False
        case _:
            return True
