"""Tool calls as models write them: `qwen`, and `plain` for models from scratch.

A policy writes whatever it likes. So a parser never raises, and takes time in proportion to the text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fp8core.environments.protocol import Tool, ToolCall

DEEPEST = 32
_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
# The template may have begun the first thought. One without an end lasts up to the end of the text.
_THOUGHT = re.compile(r"\A(?:(?!<think>).)*</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)


class TurnCalls(NamedTuple):
    """The calls of a turn; where one is `malformed`, why, and none of the turn's calls is made."""

    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


class _Malformed(ValueError):
    pass


def parse_calls(form: str, text: str, tools: Sequence[Tool]) -> TurnCalls:
    """The calls in the text of a turn, special tokens included; `form`: a key of `TOOL_CALLS`.

    Without `tools` the environment may have explained its own: what is no whole call is text then, and never malformed.
    """
    try:
        return TurnCalls(tuple(TOOL_CALLS[form](text, tools)))
    except _Malformed as error:
        return TurnCalls((), str(error)) if tools else TurnCalls()


def _qwen_calls(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, outside of what was thought."""
    rest = _THOUGHT.sub("\n", text)
    end = 0
    while (start := rest.find(_CALL, end)) >= 0:
        start += len(_CALL)
        end = rest.find(_CALL_END, start)
        if end < 0:
            raise _Malformed("<tool_call> is not closed")
        yield _qwen_call(rest[start:end].strip())


def _qwen_call(written: str) -> ToolCall:
    try:
        value = json.loads(written)
    except RecursionError:
        raise _Malformed(f"JSON is deeper than {DEEPEST}") from None
    except ValueError as error:
        raise _Malformed(f"no JSON: {' '.join(str(error).split())[:200]}") from None
    if _is_deeper(value, DEEPEST):
        raise _Malformed(f"JSON is deeper than {DEEPEST}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Malformed("a call is an object with a name")
    if not isinstance(value.get("arguments"), dict):
        raise _Malformed("arguments of a call is an object")
    return ToolCall(value["name"], value["arguments"])


def _is_deeper(value: Any, most: int) -> bool:
    """Functions that call themselves, as writers of JSON do, may not meet more."""
    if not isinstance(value, dict | list):
        return False
    below = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(each, most - 1) for each in below)


def _plain_calls(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    """`[3*4]` is a call of the one tool there is with its one argument, a text."""
    end = 0
    while tools and (start := text.find("[", end)) >= 0:
        end = text.find("]", start)
        if end < 0:
            raise _Malformed("[ is not closed")
        arguments_text = text[start + 1 : end]
        if "[" in arguments_text:
            raise _Malformed("[ in a call")
        names = [*tools[0].parameters.get("properties", {})]
        if len(tools) != 1 or len(names) != 1:
            raise _Malformed("a plain call is of the only tool, which has one argument")
        yield ToolCall(tools[0].name, {names[0]: arguments_text})


TOOL_CALLS = {"qwen": _qwen_calls, "plain": _plain_calls}
