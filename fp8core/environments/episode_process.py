"""The process of an episode: it makes the environment, passes tasks and actions on, and closes it.

An exception of the environment becomes an outcome of its episode, and so does a reply that is none.
"""

import hashlib
import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fp8core.config.shipped import SHIPPED_ENVIRONMENTS
from fp8core.environments.protocol import Action, Ending, Environment, Outcome, Role, Said, Task, Turn
from fp8core.errors import InvalidReply, UserError, described_error, whole_characters
from fp8core.processes.pool import Service
from fp8core.rewards.scorer import DETAIL_CHARACTERS, MOST_REWARD
from fp8core.user_code import check_call, file_of, find_neighbours, load_code

_INFO_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def serve_environment(name: str, options: Mapping[str, Any]) -> Service:
    """The service of a pool for a shipped environment, `module:Class` or `path/to/file.py:Class`.

    A class method `prepare(**options)` is called here, and returns what makes the environment of an episode.

    Raises UserError: there is none, importing it fails, it has not the methods of an environment, or not these options.
    """
    if name in SHIPPED_ENVIRONMENTS:
        module = importlib.import_module("fp8core.environments.shipped")
        factory = getattr(module, SHIPPED_ENVIRONMENTS[name])
        digest = _builtin_digest()
    else:
        find_neighbours(name)
        factory, _, digest = load_code(name, "class")
    prepare = getattr(factory, "prepare", None)
    check_call(prepare or factory, factory.__name__, (), options)
    if lacking := [
        part for part in ("start", "step", "close") if inspect.isclass(factory) and not hasattr(factory, part)
    ]:
        raise UserError(f"{factory.__name__} has no method {lacking[0]}")
    create = partial(factory, **options) if prepare is None else prepare(**options)
    return Service({"environment": name, "source": digest}, lambda: EpisodeHandler(create, file_of(factory)))


def _builtin_digest() -> str:
    """Digest of all files that observations depend on."""
    folder = Path(__file__).parent
    content = b"".join((folder / name).read_bytes() for name in ("shipped.py", "sandbox.py", "interpreter.py"))
    return hashlib.sha256(content).hexdigest()


class EpisodeHandler:
    """Answers a `Task` and then every `Action`."""

    def __init__(self, create: Callable[[], Environment], file: str | None) -> None:
        """`file`: that of a user's class, for errors."""
        self._create = create
        self._file = file
        self._environment: Environment | None = None

    def answer(self, request: Task | Action) -> Turn | Outcome:
        try:
            reply = checked_reply(self._call_user_code(request), isinstance(request, Task))
            if isinstance(reply, Outcome):
                self.close()
        except BaseException as error:  # noqa: BLE001 - the outcome says what was raised
            detail = described_error(error, self._file)[:DETAIL_CHARACTERS]
            reply = Outcome("crashed", detail=whole_characters(detail))
        return reply

    def close(self) -> None:
        """Close the environment, unless it was closed or never made."""
        environment = self._environment
        self._environment = None
        if environment is not None:
            environment.close()

    def _call_user_code(self, request: Task | Action) -> Turn | Outcome:
        if isinstance(request, Task):
            _seed(request.seed)
            try:
                self._environment = self._create()
            except Exception as error:
                raise InvalidReply(f"it cannot be made: {described_error(error, self._file)}") from error
            return self._environment.start(request)
        assert self._environment is not None, "an action follows a turn"
        return self._environment.step(request)


def _seed(seed: int) -> None:
    """All episodes are forked from one process: without this they would draw the same numbers."""
    # `random` ignores a sign, and stored seeds had one: older episodes are played again with their numbers.
    random.seed(min(seed, 2**64 - seed))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def checked_reply(reply: object, first: bool) -> Turn | Outcome:
    """A reply of plain texts and numbers; `first` is whether it answers `start`. Raises ValueError naming the field."""
    if isinstance(reply, Outcome):
        if reply.outcome not in get_args(Ending):
            raise InvalidReply(f"outcome is {reply.outcome!r:.60}; there are: {', '.join(get_args(Ending))}")
        detail = whole_characters(str(reply.detail))[:DETAIL_CHARACTERS]
        return Outcome(reply.outcome, detail=detail, **_numbers(reply))
    if not isinstance(reply, Turn):
        raise InvalidReply(f"the environment returned {type(reply).__name__}, neither a Turn nor an Outcome")
    if not reply.messages:
        raise ValueError("messages are empty; the policy would have nothing to answer")
    roles = get_args(Role) if first else ("user", "tool")
    for message in reply.messages:
        if not isinstance(message, Said) or message.role not in roles or not isinstance(message.content, str):
            raise InvalidReply(f"a message is {message!r:.60}, not a Said of a text by {', '.join(roles)}")
    messages = tuple(Said(message.role, whole_characters(message.content)) for message in reply.messages)
    tools = tuple(tool._replace(parameters=json.loads(json.dumps(dict(tool.parameters)))) for tool in reply.tools)
    return Turn(messages, tools, **_numbers(reply))


def _numbers(reply: Turn | Outcome) -> dict[str, Any]:
    if type(reply.failed) is not int or reply.failed < 0:
        raise ValueError(f"failed is {reply.failed!r:.60}, not a count")
    info = {str(name): _number(value, f"info[{name!r:.60}]") for name, value in reply.info.items()}
    for name in info:
        if not _INFO_NAME.fullmatch(name):
            raise ValueError(f"info has the name {name!r:.60}; names are like `guesses`")
    return {"reward": _number(reply.reward, "reward"), "failed": reply.failed, "info": info}


def _number(value: Any, name: str) -> float:
    """A number of any library; a text is none."""
    if not hasattr(value, "__float__"):
        raise InvalidReply(f"{name} is {value!r:.60}, not a number")
    number = float(value)
    if not abs(number) <= MOST_REWARD:
        raise ValueError(f"{name} is {number}, not a number from {-MOST_REWARD:g} to {MOST_REWARD:g}")
    return number
