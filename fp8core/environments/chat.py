"""Conversations as tokens: the policy's stand as it drew them, and those of its environment are encoded once.

With a chat template an observation is the difference of two renderings: up to where the policy spoke, and with the
environment's answer. The first must be a prefix of the second, but for what the template has begun
of the policy's turn (`<think>`). A mark stands for each turn of the policy in both: its text is never rewritten, nor
decoded and encoded again. Control tokens come from the template alone (`Tokenizer.plain_pieces`).

Without a chat template messages follow one another, and `=` precedes each observation (`3*4` -> `[3*4]$=12`).

Tool calls are read as models write them: `qwen`, and `plain` for models from scratch. A policy writes whatever it
likes: the parser never raises, and takes time in proportion to the text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fp8core.config.environment import EnvironmentConfig
from fp8core.config.run import RunConfig
from fp8core.environments.protocol import Action, Said, Tool, ToolCall, Turn
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer

OBSERVATION = "="
_THOUGHT = "<think>"
# A mark inside control tokens, and one for the policy's turns: code points that are no characters. Templates neither
# strip nor escape them.
_CUT = "\ufdd0"
_GAP = "\ufdd1"
DEEPEST = 32
_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
# The template may have begun the first thought. One without an end lasts up to the end of the text.
_THOUGHTS = re.compile(r"\A(?:(?!<think>).)*</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)


class ObservationError(ValueError):
    """Text of an environment that cannot be put into tokens."""


def tool_calls_of(config: EnvironmentConfig, tokenizer: Tokenizer) -> str:
    """A form of `parse_calls`. Raises UserError: the chat template writes no tool calls that are known."""
    if config.format != "auto":
        return config.format
    if not tokenizer.has_template:
        return "plain"
    # Qwen3-Coder writes XML between the same tags: <tool_call><function=NAME><parameter=NAME>VALUE ...
    if "<tool_call>" in tokenizer.template and "<function=" not in tokenizer.template:
        return "qwen"
    raise UserError(
        f"environment.format=auto: {tokenizer.where}: the chat template writes no tool calls that are known; set it to "
        "qwen or plain"
    )


@dataclass(frozen=True)
class Talk:
    """`tool_calls`: a form of `parse_calls`; `arguments`: of the chat template (`data.template_arguments`)."""

    tokenizer: Tokenizer
    tool_calls: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer) -> "Talk":
        assert config.environment is not None, "a talk is with an environment"
        arguments = next(iter(config.sources.values())).template_arguments  # Those of all sources.
        return cls(tokenizer, tool_calls_of(config.environment, tokenizer), arguments)

    def open(self, turn: Turn) -> "Conversation":
        """Raises ObservationError: a text cannot be put into tokens; UserError: the template refuses the messages."""
        return Conversation(self, turn)


class Conversation:
    """The messages of one episode so far. `prompt`: token ids of the first messages, up to where the policy speaks."""

    def __init__(self, talk: Talk, turn: Turn) -> None:
        self._talk = talk
        self._tools = turn.tools
        # Every turn renders again what was said before.
        self._pieces: dict[str, list[str]] = {}
        # None: a turn of the policy.
        self._messages: list[Said | None] = [*turn.messages]
        # The part of the policy's present turn that the template has written.
        self._think_prefix = ""
        if not talk.tokenizer.has_template:
            self.prompt = self._encode(self._plain("".join(message.content for message in turn.messages)), first=True)
            return
        rendered = self._render(self._messages)
        if turn.tools and rendered == self._render(self._messages, tools=()):
            raise UserError(f"{talk.tokenizer.where}: the chat template leaves tools out")
        self._think_prefix = _thought_at_end(rendered)
        self.prompt = self._encode(rendered.split(_CUT))

    def action(self, tokens: Sequence[int], finish: str) -> Action:
        written = tokens[:-1] if finish == "stop" else tokens
        text = self._think_prefix + self._talk.tokenizer.decode(written, special=True)
        calls, malformed = parse_calls(self._talk.tool_calls, text, self._tools)
        return Action(self._talk.tokenizer.decode(written), calls, malformed, finish)

    def observe(self, messages: Sequence[Said], last: int | None) -> tuple[int, ...]:
        """Token ids of the environment's answer, up to where the policy speaks again.

        Args:
            last: the token with which the policy ended its turn; None where it was cut. Where the template ends a turn
                with a token that ends completions, the policy's own stands for it.

        Raises:
            ObservationError: its text cannot be put into tokens.
            UserError: the template rewrites what was before the observation.
        """
        tokenizer = self._talk.tokenizer
        before = [*self._messages]
        self._messages += [None, *messages]
        if not tokenizer.has_template:
            return self._encode(self._plain("".join(OBSERVATION + message.content for message in messages)))
        tokens = self._encode(self._rendered_after(before).split(_CUT))
        has_end_token = last is not None and tokens and tokens[0] in tokenizer.eos_ids
        return tokens[1:] if has_end_token else tokens

    def _rendered_after(self, before: Sequence[Said | None]) -> str:
        """The template's text after these messages and the policy's turn. Raises UserError: it rewrites them."""
        whole = self._render(self._messages)
        rendering = self._render(before)
        stands, mark, after = whole.rpartition(_GAP)
        if not mark or not (stands == rendering or self._is_think_prefix(stands, rendering, before)):
            first = rendering + _GAP
            place = next((i for i, (a, b) in enumerate(zip(first, whole, strict=False)) if a != b), len(whole))
            raise UserError(
                f"{self._talk.tokenizer.where}: the chat template rewrites what is before an observation: it has "
                f"{whole[place : place + 40]!r} where {first[place : place + 40]!r} stands already"
            )
        self._think_prefix = _thought_at_end(whole)
        return after

    def _is_think_prefix(self, stands: str, asked: str, before: Sequence[Said | None]) -> bool:
        """True if a turn of the policy merely begins in another way in `stands` than in `asked`, the prompt for it.

        Templates leave out of earlier turns a `<think>` that they write in a prompt, or close it.
        """
        said = self._render(before, add_generation_prompt=False)
        prefix = asked.removeprefix(said)
        now = stands.removeprefix(said)
        both = 0 < len(prefix) < len(asked) and len(now) < len(stands) and _GAP not in now
        return both and (prefix.startswith(now) or now.startswith(prefix))

    def _render(
        self,
        messages: Sequence[Said | None],
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Messages in the chat template, with marks in their texts; `tools`: others than those that there are."""
        dicts = [
            {"role": "assistant", "content": _GAP}
            if said is None
            else {"role": said.role, "content": self._cut(said.content)}
            for said in messages
        ]
        functions = [
            {"type": "function", "function": self._cut(tool._asdict())}
            for tool in (self._tools if tools is None else tools)
        ]
        return self._talk.tokenizer.render(dicts, functions, add_generation_prompt, self._talk.arguments)

    def _cut(self, value: Any) -> Any:
        """JSON whose strings are cut inside control tokens."""
        if isinstance(value, str):
            return _CUT.join(self._plain(value))
        if isinstance(value, Mapping):
            return {self._cut(key): self._cut(below) for key, below in value.items()}
        return [self._cut(below) for below in value] if isinstance(value, list | tuple) else value

    def _plain(self, text: str) -> list[str]:
        """The text in pieces without control tokens."""
        if text not in self._pieces:
            if _CUT in text or _GAP in text:
                raise ObservationError("a text has code points that are no characters")
            try:
                self._pieces[text] = self._talk.tokenizer.plain_pieces(text)
            except ValueError as error:
                raise ObservationError(str(error)) from error
        return self._pieces[text]

    def _encode(self, pieces: Sequence[str], *, first: bool = False) -> tuple[int, ...]:
        try:
            return tuple(self._talk.tokenizer.encode_pieces(pieces, first))
        except ValueError as error:
            raise ObservationError(str(error)) from error


def _thought_at_end(rendered: str) -> str:
    return _THOUGHT if rendered.rstrip().endswith(_THOUGHT) else ""


class TurnCalls(NamedTuple):
    """The calls of a turn; where one is `malformed`, why, and none of the turn's calls is made."""

    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


class _CallError(ValueError):
    pass


def parse_calls(form: str, text: str, tools: Sequence[Tool]) -> TurnCalls:
    """The calls in the text of a turn, special tokens included; `form`: a key of `TOOL_CALLS`.

    Without `tools` the environment may have explained its own: what is no whole call is text then, and never malformed.
    """
    try:
        return TurnCalls(tuple(TOOL_CALLS[form](text, tools)))
    except _CallError as error:
        return TurnCalls((), str(error)) if tools else TurnCalls()


def _qwen_calls(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, outside of what was thought."""
    rest = _THOUGHTS.sub("\n", text)
    end = 0
    while (start := rest.find(_CALL, end)) >= 0:
        start += len(_CALL)
        end = rest.find(_CALL_END, start)
        if end < 0:
            raise _CallError("<tool_call> is not closed")
        yield _qwen_call(rest[start:end].strip())


def _qwen_call(written: str) -> ToolCall:
    try:
        value = json.loads(written)
    except RecursionError:
        raise _CallError(f"JSON is deeper than {DEEPEST}") from None
    except ValueError as error:
        raise _CallError(f"no JSON: {' '.join(str(error).split())[:200]}") from None
    if _is_deeper(value, DEEPEST):
        raise _CallError(f"JSON is deeper than {DEEPEST}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _CallError("a call is an object with a name")
    if not isinstance(value.get("arguments"), dict):
        raise _CallError("arguments of a call is an object")
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
            raise _CallError("[ is not closed")
        arguments_text = text[start + 1 : end]
        if "[" in arguments_text:
            raise _CallError("[ in a call")
        names = [*tools[0].parameters.get("properties", {})]
        if len(tools) != 1 or len(names) != 1:
            raise _CallError("a plain call is of the only tool, which has one argument")
        yield ToolCall(tools[0].name, {names[0]: arguments_text})


TOOL_CALLS = {"qwen": _qwen_calls, "plain": _plain_calls}
