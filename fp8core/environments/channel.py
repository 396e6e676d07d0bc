"""Lines between a pool and the processes of its episodes: JSON, an object a line, read without trust.

The same reading checks a reply where it is made, for an error that names the field. It checks it again on arrival, for
a process may write anything. Imported by child processes, hence free of everything heavy.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from fp8core.environments.protocol import Action, Ending, Outcome, Role, Said, Task, Tool, ToolCall, Turn
from fp8core.environments.tool_calls import DEEPEST, MOST_CALLS, is_too_deep
from fp8core.errors import InvalidReply
from fp8core.rewards.scorer import DETAIL_CHARACTERS, MOST_REWARD

_ENDINGS = get_args(Ending)
_ROLES = get_args(Role)
_MOST_FAILED = 1_000_000
_MOST_INFO = 32
_INFO_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def encode(message: Mapping[str, Any]) -> bytes:
    """A line. Raises ValueError and TypeError on what JSON has not."""
    try:
        return json.dumps(message).encode() + b"\n"
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def decode(line: bytes) -> dict[str, Any]:
    """The object of a line. Raises ValueError."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def task_message(task: Task) -> dict[str, Any]:
    return {**vars(task), "before": [list(said) for said in task.before], "columns": dict(task.columns)}


def read_task(message: Mapping[str, Any]) -> Task:
    return Task(**{**message, "before": tuple(Said(*said) for said in message["before"])})


def action_message(action: Action) -> dict[str, Any]:
    """An action, for `read_action`; calls that are too many or nested too deeply are told as malformed."""
    calls = [[call.name, dict(call.arguments)] for call in action.calls]
    malformed = action.malformed
    if len(calls) > MOST_CALLS:
        calls, malformed = [], f"{len(calls)} calls in a turn; at most {MOST_CALLS} are made"
    try:
        json.dumps(calls)
    except (RecursionError, ValueError):
        calls, malformed = [], "arguments nested too deeply, or a number too long"
    return {"text": action.text, "calls": calls, "malformed": malformed, "finish": action.finish}


def read_action(message: Mapping[str, Any]) -> Action:
    return Action(**{**message, "calls": tuple(ToolCall(*call) for call in message["calls"])})


def reply_message(reply: object) -> dict[str, Any]:
    """The reply of an environment, for `read_reply`. Raises InvalidReply: it is neither a turn nor an outcome."""
    if isinstance(reply, Turn):
        messages = [[_attribute(said, "role"), _attribute(said, "content")] for said in reply.messages]
        tools = [[tool.name, tool.description, dict(tool.parameters)] for tool in reply.tools]
        return {"turn": {"messages": messages, "tools": tools, **_common(reply)}}
    if isinstance(reply, Outcome):
        return {"outcome": {"outcome": reply.outcome, "detail": reply.detail, **_common(reply)}}
    raise InvalidReply(f"the environment returned {type(reply).__name__}, neither a Turn nor an Outcome")


def read_reply(message: Mapping[str, Any], first: bool) -> Turn | Outcome:
    """The reply of a message; `first` is whether it answers `start`. Raises ValueError naming the field."""
    if message.keys() == {"turn"}:
        return _turn(_fields(message["turn"], {"messages", "tools", "reward", "failed", "info"}), first)
    if message.keys() != {"outcome"}:
        raise ValueError("neither a turn nor an outcome")
    fields = _fields(message["outcome"], {"outcome", "detail", "reward", "failed", "info"})
    if fields["outcome"] not in _ENDINGS:
        raise InvalidReply(f"outcome is {_shown(fields['outcome'])}; there are: {', '.join(_ENDINGS)}")
    detail = _text(fields["detail"], "detail")[:DETAIL_CHARACTERS]
    return Outcome(fields["outcome"], detail=detail, **_numbers(fields))


def _turn(fields: Mapping[str, Any], first: bool) -> Turn:
    messages = tuple(_said(said, first) for said in _list(fields["messages"], "messages"))
    if not messages:
        raise ValueError("messages are empty; the policy would have nothing to answer")
    tools = tuple(_tool(tool) for tool in _list(fields["tools"], "tools"))
    if tools and not first:
        raise ValueError("tools are told at the start only")
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("two tools have one name")
    return Turn(messages, tools, **_numbers(fields))


def _said(said: Any, first: bool) -> Said:
    role, content = _parts(said, 2, "a message")
    roles = _ROLES if first else ("user", "tool")
    if role not in roles:
        raise InvalidReply(f"role is {_shown(role)}; there are: {', '.join(roles)}")
    return Said(role, _text(content, "content"))


def _tool(tool: Any) -> Tool:
    name, description, parameters = _parts(tool, 3, "a tool")
    if not isinstance(parameters, dict):
        raise ValueError("parameters of a tool are no object")
    _refuse_parameters(parameters)
    return Tool(_text(name, "the name of a tool"), _text(description, "the description of a tool"), parameters)


def _refuse_parameters(parameters: Mapping[str, Any]) -> None:
    """Raises ValueError on what templates, `instructions` or a parser of calls cannot read."""
    if is_too_deep(parameters):
        raise ValueError(f"parameters of a tool are deeper than {DEEPEST}")
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(about, dict | bool) for about in properties.values()):
        raise ValueError("parameters.properties of a tool are no object of objects or booleans")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError("parameters.required of a tool is no list of texts")
    try:
        json.dumps(parameters, allow_nan=False)
    except ValueError as error:
        # NaN differs from itself: an environment that is asked again would seem to answer otherwise.
        raise ValueError("parameters of a tool have NaN or an infinity, which JSON has not") from error


def _common(reply: Turn | Outcome) -> dict[str, Any]:
    info = {str(name): _float(value, f"info[{name!r:.60}]") for name, value in dict(reply.info).items()}
    return {"reward": _float(reply.reward, "reward"), "failed": reply.failed, "info": info}


def _numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    failed, info = fields["failed"], fields["info"]
    if type(failed) is not int or not 0 <= failed <= _MOST_FAILED:
        raise ValueError(f"failed is {_shown(failed)}, not a count")
    if not isinstance(info, dict) or len(info) > _MOST_INFO:
        raise ValueError(f"info is no object of at most {_MOST_INFO} numbers")
    for name in info:
        if not _INFO_NAME.fullmatch(name):
            raise ValueError(f"info has the name {_shown(name)}; names are like `guesses` or `tool_errors`")
    numbers = {name: _bounded(value, f"info[{name!r}]") for name, value in info.items()}
    return {"reward": _bounded(fields["reward"], "reward"), "failed": failed, "info": numbers}


def _float(value: Any, name: str) -> float:
    """A number of any library; a text is none."""
    if not hasattr(value, "__float__"):
        raise InvalidReply(f"{name} is {_shown(value)}, not a number")
    return float(value)


def _bounded(value: Any, name: str) -> float:
    if type(value) is not float or not abs(value) <= MOST_REWARD:
        raise ValueError(f"{name} is {_shown(value)}, not a number from {-MOST_REWARD:g} to {MOST_REWARD:g}")
    return value


def _shown(value: Any) -> str:
    """A value in an error: of what may be nested or large, its type."""
    return f"{value!r:.60}" if isinstance(value, str | float | bool | None) else type(value).__name__


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, not a text")
    # No tokenizer and no table holds half a surrogate pair.
    return value.encode("utf-8", "backslashreplace").decode()


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} are no list")
    return value


def _parts(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"{name} has not {count} parts")
    return value


def _fields(value: Any, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"a reply has not the fields {', '.join(sorted(names))}")
    return value


def _attribute(said: Any, name: str) -> Any:
    if not hasattr(said, name):
        raise InvalidReply(f"a message is {_shown(said)}, not a Said")
    return getattr(said, name)
