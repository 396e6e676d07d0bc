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
from fp8core.environments.protocol import Action, Ending, Environment, Outcome, Role, Said, Task, Tool, Turn
from fp8core.errors import InvalidReply, UserError, described_error, whole_characters
from fp8core.processes.host import Service
from fp8core.rewards.scorer import DETAIL_CHARACTERS, MOST_REWARD
from fp8core.user_code import file_of, find_neighbours, load_code

_MOST_BYTES = 1 << 20
"""Of the texts of one reply."""
_INFO_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def serve_environment(name: str, options: Mapping[str, Any]) -> Service:
    """The service of a pool for a shipped environment, `module:Class` or `path/to/file.py:Class`.

    A class method `prepare(**options)` is called here, and returns what makes the environment of an episode.

    Raises UserError: there is none, importing it fails, it has not the methods of an environment, or not these options.
    """
    if name in SHIPPED_ENVIRONMENTS:
        module = importlib.import_module("fp8core.environments.shipped")
        made, digest = getattr(module, SHIPPED_ENVIRONMENTS[name]), _digest_of_shipped()
    else:
        find_neighbours(name)
        made, _, digest = load_code(name, "class")
    prepare = getattr(made, "prepare", None)
    _refuse_options(prepare or made, made.__name__, options)
    if lacking := [part for part in ("start", "step", "close") if inspect.isclass(made) and not hasattr(made, part)]:
        raise UserError(f"{made.__name__} has no method {lacking[0]}")
    create = partial(made, **options) if prepare is None else prepare(**options)
    return Service({"environment": name, "source": digest}, lambda: EpisodeHandler(create, file_of(made)))


def _digest_of_shipped() -> str:
    """Of all that observations depend on."""
    folder = Path(__file__).parent
    content = b"".join((folder / name).read_bytes() for name in ("shipped.py", "sandbox.py", "interpreter.py"))
    return hashlib.sha256(content).hexdigest()


def _refuse_options(called: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(called)
    except ValueError:
        return  # One written in C may have none to read.
    try:
        signature.bind(**options)
    except TypeError as error:
        given = ", ".join(f"{option}=..." for option in options)
        raise UserError(
            f"it is called as {name}({given}), and is defined as {name}{signature}: {error}; "
            "environment.options={} drops options of a base"
        ) from error


class EpisodeHandler:
    """Answers a `Task` and then every `Action`."""

    def __init__(self, create: Callable[[], Environment], file: str | None) -> None:
        """`file`: that of a user's class, for errors."""
        self._create, self._file = create, file
        self._environment: Environment | None = None
        self.finished = False

    def answer(self, request: Task | Action) -> Turn | Outcome:
        try:
            reply = checked_reply(self._asked(request), isinstance(request, Task))
            if isinstance(reply, Outcome):
                self.close()
        except BaseException as error:  # noqa: BLE001 - the outcome says what was raised
            detail = described_error(error, self._file)[:DETAIL_CHARACTERS]
            reply = Outcome("crashed", detail=whole_characters(detail))
        self.finished = isinstance(reply, Outcome)
        return reply

    def close(self) -> None:
        """Close the environment, unless it was closed or never made."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _asked(self, request: Task | Action) -> Turn | Outcome:
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
    if isinstance(reply, Turn):
        checked = _turn(reply, first)
        texts = [said.content for said in checked.messages] + [json.dumps(tool) for tool in checked.tools]
        size = sum(len(text.encode()) for text in texts)
        if size > _MOST_BYTES:
            raise ValueError(f"a reply of {size:,} bytes; at most {_MOST_BYTES:,}")
        return checked
    if not isinstance(reply, Outcome):
        raise InvalidReply(f"the environment returned {type(reply).__name__}, neither a Turn nor an Outcome")
    if reply.outcome not in get_args(Ending):
        raise InvalidReply(f"outcome is {reply.outcome!r:.60}; there are: {', '.join(get_args(Ending))}")
    return Outcome(reply.outcome, detail=_text(reply.detail, "detail")[:DETAIL_CHARACTERS], **_numbers(reply))


def _turn(turn: Turn, first: bool) -> Turn:
    messages = tuple(_said(said, first) for said in turn.messages)
    if not messages:
        raise ValueError("messages are empty; the policy would have nothing to answer")
    tools = tuple(map(_tool, turn.tools))
    if tools and not first:
        raise ValueError("tools are told at the start only")
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("two tools have one name")
    return Turn(messages, tools, **_numbers(turn))


def _said(said: Any, first: bool) -> Said:
    if not isinstance(said, Said):
        raise InvalidReply(f"a message is {said!r:.60}, not a Said")
    roles = get_args(Role) if first else ("user", "tool")
    if said.role not in roles:
        raise InvalidReply(f"role is {said.role!r:.60}; there are: {', '.join(roles)}")
    return Said(said.role, _text(said.content, "content"))


def _tool(tool: Tool) -> Tool:
    """Raises ValueError on parameters that templates, `instructions` or a parser of calls cannot read."""
    try:
        # NaN differs from itself: an environment that is asked again would seem to answer otherwise.
        parameters = json.loads(json.dumps(dict(tool.parameters), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"parameters of a tool are no JSON: {error}") from error
    if not isinstance(parameters.get("properties", {}), dict) or not isinstance(parameters.get("required", []), list):
        raise ValueError("parameters of a tool are no JSON schema of an object")
    return Tool(
        _text(tool.name, "the name of a tool"), _text(tool.description, "the description of a tool"), parameters
    )


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


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not a text")
    return whole_characters(value)
