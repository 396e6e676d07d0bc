"""Tool calls as model families write them: `qwen`, `llama3`, and `plain` for models from scratch.

A policy writes whatever it likes. So a parser never raises, and takes time in proportion to the text. Its calls can be
stored and sent: JSON of bounded depth and number, without NaN, infinities and lone surrogates.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fp8core.environments.protocol import Tool, ToolCall

MOST_CALLS = 64
"""Of a turn; with more an environment gets none, and is told."""
DEEPEST = 32
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
"""Around a call of `qwen`."""
_THOUGHT = re.compile("(</?think>)")


class Parsed(NamedTuple):
    """The calls of a turn; where one is `malformed`, why, and none of the turn's calls is made."""

    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


Parser = Callable[[str, Sequence[Tool]], Parsed]
"""From the text of a turn, special tokens included, and the tools that there are.

Without any, the environment may have explained its own: what is no whole call is text then, and never malformed.
"""


class _Malformed(ValueError):
    pass


def _parser(calls_of: Callable[[str, Sequence[Tool]], Iterator[ToolCall]]) -> Parser:
    def parse(text: str, tools: Sequence[Tool]) -> Parsed:
        calls = list[ToolCall]()
        try:
            for call in calls_of(text, tools):
                calls.append(call)
                if len(calls) > MOST_CALLS:
                    raise _Malformed(f"more than {MOST_CALLS} calls")
        except _Malformed as error:
            return Parsed((), str(error)) if tools else Parsed()
        return Parsed(tuple(calls))

    return parse


def _qwen_calls(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, outside of what was thought."""
    rest, end = _without_thoughts(text), 0
    while (start := rest.find(_CALL, end)) >= 0:
        start += len(_CALL)
        end = rest.find(_CALL_END, start)
        if end < 0:
            raise _Malformed("<tool_call> is not closed")
        written = rest[start:end].strip()
        value, rest_at = _read_json(written, 0)
        if rest_at != len(written):
            raise _Malformed("there is more than one JSON value in <tool_call>")
        yield _call(value, "arguments")


def _without_thoughts(text: str) -> str:
    """The text outside of thoughts, each from `<think>` to `</think>`; neither is a mark within the JSON of a call.

    The template may have begun the first thought. One without an end lasts up to the end of the text.
    """
    kept, thinking, marked = list[str](), False, False
    for number, piece in enumerate(text.split(_CALL)):
        body, closed, after = piece.partition(_CALL_END)
        given = body.strip()
        whole = number > 0 and closed and given.startswith("{") and given.endswith("}")
        if whole and not thinking:
            kept.append(_CALL + body + _CALL_END)
        free = after if whole else _CALL * (number > 0) + piece
        for part in _THOUGHT.split(free):
            if part == "</think>" and not marked:
                kept.clear()
            if part in ("<think>", "</think>"):
                thinking, marked = part == "<think>", True
            elif not thinking:
                kept.append(part)
    # Apart: what stood around a thought is no tag together.
    return "\n".join(kept)


def _llama3_calls(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    """`{"name": ..., "parameters": {...}}` alone, after `<|python_tag|>` or not, with `;` between calls."""
    _before, tagged, rest = text.partition("<|python_tag|>")
    rest = (rest if tagged else text).strip()
    if not tagged and not rest.startswith("{"):
        return
    end = 0
    while True:
        value, end = _read_json(rest, end)
        yield _call(value, "parameters")
        end = _after_space(rest, end)
        if end == len(rest):
            return
        if rest[end] != ";":
            raise _Malformed("there is text after the call")
        end = _after_space(rest, end + 1)


def _plain_calls(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    """`[3*4]` is a call of the one tool there is with its one argument, a text; of several tools `[name:3*4]`."""
    by_name, end = {tool.name: tool for tool in tools}, 0
    while tools and (start := text.find("[", end)) >= 0:
        end = text.find("]", start)
        if end < 0:
            raise _Malformed("[ is not closed")
        given = text[start + 1 : end]
        if "[" in given:
            raise _Malformed("[ in a call")
        name = tools[0].name
        if len(tools) != 1:
            name, _, given = given.partition(":")
        tool = by_name.get(name)
        if tool is None:
            raise _Malformed(f"no tool is called {name[:40]!r}")
        yield ToolCall(name, {_only_argument(tool): _text(given)})


TOOL_CALLS: dict[str, Parser] = {
    "qwen": _parser(_qwen_calls),
    "llama3": _parser(_llama3_calls),
    "plain": _parser(_plain_calls),
}
_WRITTEN = {
    "qwen": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "llama3": '{"name": ..., "parameters": {...}} and nothing else',
}


def instructions(tool_calls: str, tools: Sequence[Tool]) -> str:
    """The tools that there are and how a call is written, for a model whose chat template leaves them out."""
    lines = ["Tools:"]
    for tool in tools:
        given = ", ".join(
            f"{name}: {about.get('description', about.get('type', 'any'))}" if isinstance(about, Mapping) else name
            for name, about in tool.parameters.get("properties", {}).items()
        )
        lines.append(f"- {tool.name}({given}): {tool.description}")
    plain = "its argument in brackets, as [2+3]" if len(tools) == 1 else "name and argument, as [name:2+3]"
    return "\n".join([*lines, f"To call a tool, write {_WRITTEN.get(tool_calls, plain)}."])


def _read_json(text: str, start: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _is_deeper(value, DEEPEST):
            raise _Malformed(f"JSON is deeper than {DEEPEST}")
        # Of texts with lone surrogates no bytes can be made.
        text[start:end].encode()
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _Malformed(f"JSON is deeper than {DEEPEST}") from None
    except _Malformed:
        raise
    except ValueError as error:
        raise _Malformed(f"no JSON: {' '.join(str(error).split())[:200]}") from None
    return value, end


def _no_number(written: str) -> float:
    raise _Malformed(f"{written[:40]} is no number of JSON")


def _finite(written: str) -> float:
    number = float(written)
    return number if math.isfinite(number) else _no_number(written)


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def _is_deeper(value: Any, most: int) -> bool:
    """Functions that call themselves, as writers of JSON do, may not meet more."""
    if not isinstance(value, dict | list):
        return False
    below = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(each, most - 1) for each in below)


def _call(value: Any, arguments: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Malformed("a call is an object with a name")
    given = value.get(arguments)
    if not isinstance(given, Mapping):
        raise _Malformed(f"{arguments} of a call is an object")
    return ToolCall(value["name"], given)


def _only_argument(tool: Tool) -> str:
    names = [*tool.parameters.get("properties", {})]
    required = [*tool.parameters.get("required", names)]
    if len(required) != 1:
        raise _Malformed(f"{tool.name} takes {len(required)} arguments, a plain call has one")
    return str(required[0])


def _text(written: str) -> str:
    try:
        written.encode()
    except UnicodeEncodeError:
        raise _Malformed("a lone surrogate") from None
    return written


def _after_space(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip())
