"""Checks of an environment's replies, in its own process: errors name the field, and end the episode as crashed."""

import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from fp8core.environments.protocol import Ending, Outcome, Role, Said, Tool, Turn
from fp8core.environments.tool_calls import DEEPEST, is_too_deep
from fp8core.errors import InvalidReply, whole_characters
from fp8core.rewards.scorer import DETAIL_CHARACTERS, MOST_REWARD

_ENDINGS = get_args(Ending)
_ROLES = get_args(Role)
_MOST_FAILED = 1_000_000
_MOST_INFO = 32
_INFO_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def checked_reply(reply: object, first: bool, most_bytes: int) -> Turn | Outcome:
    """A reply of plain texts and numbers; `first` is whether it answers `start`. Raises ValueError naming the field."""
    if isinstance(reply, Turn):
        checked = _turn(reply, first)
        texts = [said.content for said in checked.messages] + [json.dumps(tool) for tool in checked.tools]
        size = sum(len(text.encode()) for text in texts)
        if size > most_bytes:
            raise ValueError(f"a reply of {size:,} bytes; at most {most_bytes:,}")
        return checked
    if not isinstance(reply, Outcome):
        raise InvalidReply(f"the environment returned {type(reply).__name__}, neither a Turn nor an Outcome")
    if reply.outcome not in _ENDINGS:
        raise InvalidReply(f"outcome is {_shown(reply.outcome)}; there are: {', '.join(_ENDINGS)}")
    return Outcome(reply.outcome, detail=_text(reply.detail, "detail")[:DETAIL_CHARACTERS], **_numbers(reply))


def _turn(turn: Turn, first: bool) -> Turn:
    messages = tuple(_said(said, first) for said in turn.messages)
    if not messages:
        raise ValueError("messages are empty; the policy would have nothing to answer")
    tools = tuple(_tool(tool) for tool in turn.tools)
    if tools and not first:
        raise ValueError("tools are told at the start only")
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("two tools have one name")
    return Turn(messages, tools, **_numbers(turn))


def _said(said: Any, first: bool) -> Said:
    if not (hasattr(said, "role") and hasattr(said, "content")):
        raise InvalidReply(f"a message is {_shown(said)}, not a Said")
    roles = _ROLES if first else ("user", "tool")
    if said.role not in roles:
        raise InvalidReply(f"role is {_shown(said.role)}; there are: {', '.join(roles)}")
    return Said(said.role, _text(said.content, "content"))


def _tool(tool: Any) -> Tool:
    """Raises ValueError on parameters that templates, `instructions` or a parser of calls cannot read."""
    if not isinstance(tool.parameters, Mapping):
        raise ValueError("parameters of a tool are no object")
    if is_too_deep(dict(tool.parameters)):
        raise ValueError(f"parameters of a tool are deeper than {DEEPEST}")
    try:
        # NaN differs from itself: an environment that is asked again would seem to answer otherwise.
        parameters = json.loads(json.dumps(dict(tool.parameters), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"parameters of a tool are no JSON: {error}") from error
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(about, dict | bool) for about in properties.values()):
        raise ValueError("parameters.properties of a tool are no object of objects or booleans")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError("parameters.required of a tool is no list of texts")
    return Tool(
        _text(tool.name, "the name of a tool"), _text(tool.description, "the description of a tool"), parameters
    )


def _numbers(reply: Turn | Outcome) -> dict[str, Any]:
    if type(reply.failed) is not int or not 0 <= reply.failed <= _MOST_FAILED:
        raise ValueError(f"failed is {_shown(reply.failed)}, not a count")
    info = {str(name): _number(value, f"info[{name!r:.60}]") for name, value in dict(reply.info).items()}
    if len(info) > _MOST_INFO:
        raise ValueError(f"info has more than {_MOST_INFO} numbers")
    for name in info:
        if not _INFO_NAME.fullmatch(name):
            raise ValueError(f"info has the name {_shown(name)}; names are like `guesses` or `tool_errors`")
    return {"reward": _number(reply.reward, "reward"), "failed": reply.failed, "info": info}


def _number(value: Any, name: str) -> float:
    """A number of any library; a text is none."""
    if not hasattr(value, "__float__"):
        raise InvalidReply(f"{name} is {_shown(value)}, not a number")
    number = float(value)
    if not abs(number) <= MOST_REWARD:
        raise ValueError(f"{name} is {number}, not a number from {-MOST_REWARD:g} to {MOST_REWARD:g}")
    return number


def _shown(value: Any) -> str:
    """A value in an error: of what may be nested or large, its type."""
    return f"{value!r:.60}" if isinstance(value, str | float | bool | None) else type(value).__name__


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, not a text")
    return whole_characters(value)
