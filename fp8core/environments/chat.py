"""Conversations as tokens."""

from collections.abc import Sequence

from fp8core.environments.protocol import Action, Said, Turn
from fp8core.models.tokenizer import Tokenizer


class ObservationError(ValueError):
    """What an environment said cannot be put into tokens."""


class Conversation:
    """One episode's messages so far. Attribute `prompt`: token ids of the first ones."""

    prompt: tuple[int, ...]

    def action(self, tokens: Sequence[int], finish: str) -> Action:
        """What the policy wrote in a turn, with its tool calls."""
        raise NotImplementedError

    def observe(self, messages: Sequence[Said], last: int | None) -> tuple[int, ...]:
        """Token ids of the environment's answer, up to where the policy speaks again."""
        raise NotImplementedError


class Talk:
    """How a model's conversations are written: `Talk(tokenizer, tool_calls)`, tool_calls a key of `TOOL_CALLS`."""

    def __init__(self, tokenizer: Tokenizer, tool_calls: str) -> None:
        raise NotImplementedError

    def open(self, turn: Turn) -> Conversation:
        """Begin a conversation."""
        raise NotImplementedError
