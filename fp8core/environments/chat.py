"""Conversations as tokens: the policy's stand as it drew them, and those of its environment are encoded once.

With a chat template an observation is the difference of two renderings: up to where the policy spoke, and with the
environment's answer. The first must be a prefix of the second, but for what the template has begun
of the policy's turn (`<think>`). A mark stands for each turn of the policy in both: its text is never rewritten, nor
decoded and encoded again. Control tokens come from the template alone (`Tokenizer.plain_pieces`).

Without a chat template messages follow one another, and `=` precedes each observation (`3*4` -> `[3*4]$=12`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8core.config.environment import EnvironmentConfig
from fp8core.config.run import RunConfig
from fp8core.environments.protocol import Action, Said, Tool, Turn
from fp8core.environments.tool_calls import parse_calls
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer

OBSERVATION = "="
_THOUGHT = "<think>"
# A mark inside control tokens, and one for the policy's turns: code points that are no characters. Templates neither
# strip nor escape them.
_CUT = "\ufdd0"
_GAP = "\ufdd1"


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
        return cls(tokenizer, tool_calls_of(config.environment, tokenizer), config.data.template_arguments)

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
        self._begun = ""
        if not talk.tokenizer.has_template:
            self.prompt = self._encoded(self._plain("".join(message.content for message in turn.messages)), first=True)
            return
        rendered = self._rendered(self._messages)
        if turn.tools and rendered == self._rendered(self._messages, tools=()):
            raise UserError(f"{talk.tokenizer.where}: the chat template leaves tools out")
        self._begun = _thought_at_end(rendered)
        self.prompt = self._encoded(rendered.split(_CUT))

    def action(self, tokens: Sequence[int], finish: str) -> Action:
        written = tokens[:-1] if finish == "stop" else tokens
        text = self._begun + self._talk.tokenizer.decode(written, special=True)
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
            return self._encoded(self._plain("".join(OBSERVATION + message.content for message in messages)))
        tokens = self._encoded(self._rendered_after(before).split(_CUT))
        ended = last is not None and tokens and tokens[0] in tokenizer.eos_ids
        return tokens[1:] if ended else tokens

    def _rendered_after(self, before: Sequence[Said | None]) -> str:
        """The template's text after these messages and the policy's turn. Raises UserError: it rewrites them."""
        whole = self._rendered(self._messages)
        rendering = self._rendered(before)
        stands, mark, after = whole.rpartition(_GAP)
        if not mark or not (stands == rendering or self._only_begun(stands, rendering, before)):
            first = rendering + _GAP
            place = next((i for i, (a, b) in enumerate(zip(first, whole, strict=False)) if a != b), len(whole))
            raise UserError(
                f"{self._talk.tokenizer.where}: the chat template rewrites what is before an observation: it has "
                f"{whole[place : place + 40]!r} where {first[place : place + 40]!r} stands already"
            )
        self._begun = _thought_at_end(whole)
        return after

    def _only_begun(self, stands: str, asked: str, before: Sequence[Said | None]) -> bool:
        """True if a turn of the policy merely begins in another way in `stands` than in `asked`, the prompt for it.

        Templates leave out of earlier turns a `<think>` that they write in a prompt, or close it.
        """
        said = self._rendered(before, add_generation_prompt=False)
        begun = asked.removeprefix(said)
        now = stands.removeprefix(said)
        both = 0 < len(begun) < len(asked) and len(now) < len(stands) and _GAP not in now
        return both and (begun.startswith(now) or now.startswith(begun))

    def _rendered(
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

    def _encoded(self, pieces: Sequence[str], *, first: bool = False) -> tuple[int, ...]:
        try:
            return tuple(self._talk.tokenizer.encode_pieces(pieces, first))
        except ValueError as error:
            raise ObservationError(str(error)) from error


def _thought_at_end(rendered: str) -> str:
    return _THOUGHT if rendered.rstrip().endswith(_THOUGHT) else ""
