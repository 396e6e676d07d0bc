"""Conversations as tokens: the policy's stand as it drew them, and those of its environment are encoded once.

With a chat template an observation is the difference of two renderings. One is the conversation up to where the policy
spoke, the other has the environment's answer too. The first must be a prefix of the second, but for what the template
has begun of the policy's turn (`<think>`). A mark stands for each turn of the policy in both, so the template cannot
read or rewrite its text. That text is never decoded and encoded again. Thoughts of earlier turns stay where they are,
also where a template would leave them out.

Where a template leaves tools out, the first message begins with them (`instructions`).

Control tokens come from the template alone: texts of an environment are cut inside theirs (`Tokenizer.plain_pieces`).

Without a chat template messages follow one another, and `=` precedes each observation (`3*4` -> `[3*4]$=12`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

from fp8core.config.environment import EnvironmentConfig
from fp8core.config.run import RunConfig
from fp8core.environments.protocol import Action, Said, Tool, Turn
from fp8core.environments.tool_calls import TOOL_CALLS, instructions
from fp8core.errors import UserError
from fp8core.models.tokenizer import PiecesOf, Tokenizer

OBSERVATION = "="
_THOUGHT = "<think>"


class ObservationError(ValueError):
    """Text of an environment that cannot be put into tokens."""


def tool_calls_of(config: EnvironmentConfig, tokenizer: Tokenizer) -> str:
    """The name of the format of tool calls (`TOOL_CALLS`).
    Raises UserError: it is to be that of the chat template, which writes no tool calls that are known."""
    if config.format != "auto":
        return config.format
    if not tokenizer.has_template:
        return "plain"
    # Qwen3-Coder writes XML between the same tags: <tool_call><function=NAME><parameter=NAME>VALUE ...
    if "<tool_call>" in tokenizer.template and "<function=" not in tokenizer.template:
        return "qwen"
    if "<|python_tag|>" in tokenizer.template:
        return "llama3"
    raise UserError(
        f"environment.format=auto: {tokenizer.where}: the chat template writes no tool calls that are known; set it to "
        "qwen, llama3 or plain, and the first message says how to call"
    )


class Talk:
    def __init__(
        self, tokenizer: Tokenizer, tool_calls: str, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """`tool_calls`: a key of `TOOL_CALLS`; `arguments`: of the chat template (`data.template_arguments`)."""
        self.tokenizer, self.parse, self.tool_calls = tokenizer, TOOL_CALLS[tool_calls], tool_calls
        self.arguments = arguments

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer) -> "Talk":
        """That of a configuration with an environment. Raises UserError as `tool_calls_of`."""
        assert config.environment is not None, "a talk is with an environment"
        return cls(tokenizer, tool_calls_of(config.environment, tokenizer), config.data.template_arguments)

    def open(self, turn: Turn) -> "Conversation":
        """Begin a conversation with an environment's first turn.

        Raises:
            ObservationError: its text cannot be put into tokens.
            UserError: the chat template refuses its messages.
        """
        return Conversation(self, turn)


class Conversation:
    """The messages of one episode so far. `prompt`: token ids of the first messages, up to where the policy speaks."""

    def __init__(self, talk: Talk, turn: Turn) -> None:
        self._talk, self._tools = talk, turn.tools
        # Every turn renders again what was said before.
        self._pieces: dict[str, list[str]] = {}
        # None: a turn of the policy.
        self._messages: list[Said | None] = [*turn.messages]
        # The part of the policy's present turn that the template has written.
        self._begun = ""
        if talk.tokenizer.has_template:
            cut, gap = self._marks()
            rendered = self._rendered(cut, gap)
            if turn.tools and rendered == self._rendered(cut, gap, tools=()):
                (role, content), *others = turn.messages
                told = instructions(talk.tool_calls, turn.tools)
                self._messages = [Said(role, f"{told}\n\n{content}"), *others]
                cut, gap = self._marks()
            self._begun = _thought_at_end(rendered)
            self.prompt = self._encoded(self._rendered(cut, gap).split(cut))
        else:
            text = "".join(said.content for said in turn.messages)
            self.prompt = self._encoded(self._cut(text), first=True)

    def action(self, tokens: Sequence[int], finish: str) -> Action:
        """The policy's turn with its tool calls; `finish` is that of the turn."""
        written = tokens[:-1] if finish == "stop" else tokens
        text = self._begun + self._talk.tokenizer.decode(written, special=True)
        calls, malformed = self._talk.parse(text, self._tools)
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
        if not tokenizer.has_template:
            self._messages += [None, *messages]
            return self._encoded(self._cut("".join(OBSERVATION + said.content for said in messages)))
        before = [*self._messages]
        self._messages += [None, *messages]
        cut, gap = self._marks()
        tokens = self._encoded(self._rendered_after(before, cut, gap).split(cut))
        ended = last is not None and tokens and tokens[0] in tokenizer.eos_ids
        return tokens[1:] if ended else tokens

    def _rendered_after(self, before: Sequence[Said | None], cut: str, gap: str) -> str:
        """The template's text after these messages and the policy's turn. Raises UserError: it rewrites them."""
        whole, asked = self._rendered(cut, gap), self._rendered(cut, gap, before)
        stands, mark, after = whole.rpartition(gap)
        if not mark or not (stands == asked or self._only_begun(stands, asked, cut, gap, before)):
            first = asked + gap
            place = next((i for i, (a, b) in enumerate(zip(first, whole, strict=False)) if a != b), len(whole))
            raise UserError(
                f"{self._talk.tokenizer.where}: the chat template rewrites what is before an observation: it has "
                f"{whole[place : place + 40]!r} where {first[place : place + 40]!r} stands already"
            )
        self._begun = _thought_at_end(whole)
        return after

    def _only_begun(self, stands: str, asked: str, cut: str, gap: str, before: Sequence[Said | None]) -> bool:
        """True if a turn of the policy merely begins in another way in `stands` than in `asked`, the prompt for it.

        Templates leave out of earlier turns a `<think>` that they write in a prompt, or close it.
        """
        said = self._rendered(cut, gap, before, add_generation_prompt=False)
        begun, now = asked.removeprefix(said), stands.removeprefix(said)
        both = 0 < len(begun) < len(asked) and len(now) < len(stands) and gap not in now
        return both and (begun.startswith(now) or now.startswith(begun))

    def _marks(self) -> tuple[str, str]:
        """A mark inside control tokens, and one for the policy's turns: neither is in a text of the environment."""
        texts = [said.content for said in self._messages if said is not None]
        texts += [text for tool in self._tools for text in _texts(_function(tool))]
        for number in count():
            # Code points that are no characters: templates neither strip nor escape them.
            marks = f"\ufdd0{number}\ufdd1", f"\ufdd2{number}\ufdd1"
            if not any(mark in text for mark in marks for text in texts):
                return marks
        raise AssertionError("numbers have an end")

    def _rendered(
        self,
        cut: str,
        gap: str,
        messages: Sequence[Said | None] | None = None,
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation in the chat template, its texts cut at `cut`; `messages`, `tools`: others."""
        told = [
            {"role": "assistant", "content": gap}
            if said is None
            else {"role": said.role, "content": cut.join(self._cut(said.content))}
            for said in (self._messages if messages is None else messages)
        ]
        functions = [
            {"type": "function", "function": _cut(_function(tool), cut, self._cut)}
            for tool in (self._tools if tools is None else tools)
        ]
        return self._talk.tokenizer.render(told, functions, add_generation_prompt, self._talk.arguments)

    def _cut(self, text: str) -> list[str]:
        """The text in pieces without control tokens. Raises ObservationError: it cannot be put into tokens."""
        if text not in self._pieces:
            try:
                self._pieces[text] = self._talk.tokenizer.plain_pieces(text)
            except ValueError as error:
                raise ObservationError(str(error)) from error
        return self._pieces[text]

    def _encoded(self, pieces: Sequence[str], *, first: bool = False) -> tuple[int, ...]:
        try:
            return tuple(self._talk.tokenizer.encode_pieces(pieces, first))
        except ValueError as error:
            raise ObservationError(str(error)) from error


def _thought_at_end(rendered: str) -> str:
    """The thought that a generation prompt has begun, for readers of calls."""
    return _THOUGHT if rendered.rstrip().endswith(_THOUGHT) else ""


def _cut(value: Any, cut: str, pieces_of: PiecesOf) -> Any:
    """JSON whose strings are cut inside control tokens."""
    if isinstance(value, str):
        return cut.join(pieces_of(value))
    if isinstance(value, Mapping):
        return {_cut(key, cut, pieces_of): _cut(below, cut, pieces_of) for key, below in value.items()}
    return [_cut(below, cut, pieces_of) for below in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Iterator[str]:
    """The strings of JSON, keys included."""
    if isinstance(value, str):
        yield value
    below = [*value, *value.values()] if isinstance(value, Mapping) else value
    if isinstance(below, list | tuple):
        for each in below:
            yield from _texts(each)


def _function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
