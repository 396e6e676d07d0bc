"""Tool calls, of texts that a model writes and of texts that nobody would."""

import json
import time

import pytest

from fp8core.environments.chat import DEEPEST, TOOL_CALLS, parse_calls
from fp8core.environments.protocol import Tool

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
ONE = (Tool("calculate", "", EXPRESSION),)
QWEN = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3*4"}}\n</tool_call>'
CALL = ("calculate", {"expression": "3*4"})


def parse(form, text, tools=ONE):
    """Calls as pairs, and why one is malformed; what is found can be stored."""
    calls, malformed = parse_calls(form, text, tools)
    assert not (calls and malformed)
    json.dumps([call._asdict() for call in calls])
    return [tuple(call) for call in calls], malformed


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("qwen", QWEN, [CALL]),
        ("qwen", f"First this.\n{QWEN}\n{QWEN} and more", [CALL, CALL]),
        ("qwen", f"<think>\nI write {QWEN}\n</think>\n\nThe answer is 12.", []),
        ("qwen", f"<think>\nI wonder\n</think>\n\n{QWEN}", [CALL]),
        ("qwen", f"<think>\n{QWEN}", []),
        ("qwen", f"thoughts begun by the template</think>{QWEN}", [CALL]),
        ("qwen", f"thoughts begun by the template, as {QWEN}</think>The answer is 12.", []),
        ("qwen", f"<think>a</think>{QWEN}<think>or {QWEN}</think>", [CALL]),
        ("qwen", "The answer is 12.", []),
        ("qwen", '<tool_call>{"name": "é☃", "arguments": {"a": [1, null, {"b": 2.5}]}}</tool_call>', None),
        ("plain", "[3*4]", [CALL]),
        ("plain", "so [3*4] and [3*4]", [CALL, CALL]),
    ],
)
def test_calls(form, text, calls):
    found, malformed = parse(form, text)
    assert malformed == ""
    assert found == ([("é☃", {"a": [1, None, {"b": 2.5}]})] if calls is None else calls)


@pytest.mark.parametrize(
    ("form", "text", "malformed"),
    [
        ("qwen", "<tool_call>{", "is not closed"),
        ("qwen", f"<tool_call>{QWEN}", "no JSON"),
        ("qwen", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', "an object with a name"),
        ("qwen", '<tool_call>{"name": "a"}</tool_call>', "arguments of a call is an object"),
        ("plain", "[3*4", "is not closed"),
    ],
)
def test_what_is_no_call_is_malformed_and_says_why(form, text, malformed):
    calls, why = parse(form, text)
    assert calls == []
    assert malformed in why
    assert "\n" not in why
    assert len(why) < 300


@pytest.mark.parametrize(("form", "text"), [("plain", "The list is [1, 2]"), ("qwen", "<tool_call>{")])
def test_without_tools_nothing_is_malformed(form, text):
    assert parse(form, text, ()) == ([], "")


def test_without_tools_a_whole_call_is_one_of_those_that_the_environment_has_explained():
    assert parse("qwen", QWEN, ()) == parse("qwen", QWEN)


@pytest.mark.parametrize("depth", [DEEPEST - 2, DEEPEST - 1, 100_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
def test_json_of_any_depth(depth, opened, closed):
    """What is returned can be written and sent by functions that call themselves. The call adds two levels."""
    nested = opened * depth + "1" + closed * depth
    calls, malformed = parse("qwen", f'<tool_call>{{"name": "a", "arguments": {{"x": {nested}}}}}</tool_call>')
    assert bool(calls) == (depth + 2 <= DEEPEST)
    assert malformed == ("" if calls else f"JSON is deeper than {DEEPEST}")


N = 200_000
HOSTILE = [
    *(
        text * N
        for text in ("<tool_call>", "</tool_call>", "<think>", "</think>", "[", "{", '{"name":', '"', "9", "\ud800")
    ),
    "<tool_call>" * N + "</tool_call>" * N,
    "<tool_call>{</think>}</tool_call><think>" * N,
    "[" * N + "]" * N,
    '{"name": "a", "arguments": {' + '"k": 1,' * N + '"k": 1}}',
]


@pytest.mark.parametrize("form", TOOL_CALLS)
def test_hostile_texts_take_time_in_proportion(form):
    """Of hundreds of thousands of characters; a time that grew with the square would be minutes."""
    for text in HOSTILE:
        began = time.process_time()
        for wrapped in (text, f"<tool_call>{text}</tool_call>"):
            parse(form, wrapped)
        assert time.process_time() - began < 2, text[:40]
