"""Environments by name: those that are shipped, or a class of the user's own.

Imported by child processes, hence free of everything heavy.
"""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fp8core.config.shipped import SHIPPED_ENVIRONMENTS
from fp8core.environments.protocol import Environment
from fp8core.errors import UserError
from fp8core.user_code import file_of, find_neighbours, load_code

_LONGEST_SIGNATURE = 200
_METHODS = {"start": ("task",), "step": ("action",), "close": ()}


class LoadedEnvironment(NamedTuple):
    """A maker of the environment of an episode; records get its name and the digest of its source.

    `file` is that of a user's class, for errors.
    """

    create: Callable[[], Environment]
    description: dict[str, str]
    file: str | None


def load_environment(name: str, options: Mapping[str, Any]) -> LoadedEnvironment:
    """The environment of a name: a shipped one, `module:Class` or `path/to/file.py:Class`.

    A class method `prepare(**options)` is called here, once for all episodes. It returns what makes the environment of
    an episode, and the digest of what else decides its answers.

    Raises UserError: there is none, importing it fails, it has not the methods of an environment, or not these options.
    """
    if name in SHIPPED_ENVIRONMENTS:
        module = importlib.import_module("fp8core.environments.shipped")
        made, digest = getattr(module, SHIPPED_ENVIRONMENTS[name]), _digest_of_shipped()
    else:
        find_neighbours(name)
        made, _, digest = load_code(name, "class")
    method = getattr(made, "prepare", None)
    prepare = method if inspect.isclass(made) and inspect.ismethod(method) else None
    _refuse_options(prepare or made, made, options)
    _refuse_methods(made)
    create = partial(made, **options)
    if prepare is not None:
        create, more = prepare(**options)
        digest = hashlib.sha256(f"{digest} {more}".encode()).hexdigest()
    return LoadedEnvironment(create, {"environment": name, "source": digest}, file_of(made))


def _digest_of_shipped() -> str:
    """Of all that observations depend on."""
    folder = Path(__file__).parent
    content = b"".join((folder / name).read_bytes() for name in ("shipped.py", "sandbox.py", "interpreter.py"))
    return hashlib.sha256(content).hexdigest()


def _refuse_options(called: Callable[..., Any], made: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises UserError on options that `called` does not take; errors have the name of `made`."""
    try:
        signature = inspect.signature(called)
    except ValueError:
        return  # One written in C may have none to read.
    try:
        signature.bind(**options)
    except TypeError as error:
        given = ", ".join(f"{option}=..." for option in options)
        name = made.__name__
        raise UserError(
            f"it is called as {name}({given}), and is defined as {name}{_shown(signature)}: {error}; "
            "environment.options={} drops options of a base"
        ) from error


def _refuse_methods(made: Callable[..., Any]) -> None:
    """Raises UserError on a class that lacks a method, or has it with other parameters."""
    if not inspect.isclass(made):
        return  # A function that makes environments: what it makes is seen when it is called.
    for name, parameters in _METHODS.items():
        method = getattr(made, name, None)
        if not callable(method):
            raise UserError(f"{made.__name__} has no method {name}({', '.join(parameters)})")
        signature = inspect.signature(method)
        try:
            signature.bind(None, *parameters)
        except TypeError as error:
            called = f"{name}({', '.join(parameters)})"
            raise UserError(f"{called} is called, and is defined as {name}{_shown(signature)}: {error}") from error


def _shown(signature: inspect.Signature) -> str:
    """For a line, which a default value may not fit."""
    text = str(signature)
    return text if text.isprintable() and len(text) <= _LONGEST_SIGNATURE else "(...)"
