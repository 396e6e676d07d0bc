"""Environment variables of this process, but those of Prefect and MLflow (`flows.environment`)."""

import os
from collections.abc import Mapping

from fp8core.errors import UserError


def set_variables(required: Mapping[str, str], suggested: Mapping[str, str]) -> None:
    """Set what libraries read when they are imported; a user's own values override suggested ones."""
    os.environ.update(required)
    for name, value in suggested.items():
        os.environ.setdefault(name, value)


def check_variables(required: Mapping[str, str], moment: str) -> None:
    """Raises UserError: a variable has another value than is required at this moment, or none."""
    for name, value in required.items():
        if (current := os.environ.get(name)) != value:
            raise UserError(f"{name} must be {value} before {moment}, it is {current}")


def secret(name: str, setting: str) -> str:
    """The value of a variable, for a header of HTTP. Raises UserError, which does not show it: it is not set so."""
    value = os.environ.get(name, "").strip()
    if not (value and value.isascii() and value.isprintable()):
        problem = "holds what no key has" if value else "is not set"
        raise UserError(f"{setting}={name}: the environment variable {problem}")
    return value
