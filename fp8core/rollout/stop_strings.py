"""Completions that end where a string is complete in their text (`rollout.stop_strings`), whatever engine wrote them.

A token depends on those before it alone. So a completion that is cut after the token that completes the string equals,
bit for bit, that of an engine which stops there.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from fp8core.models.tokenizer import Tokenizer
from fp8core.rollout.engine import Completion


def text_until(text: str, strings: Sequence[str]) -> str:
    """The text up to the end of the string that is complete first; all of it where none is."""
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return text[: min(ends, default=len(text))]


def cut_at(completion: Completion, tokenizer: Tokenizer, strings: Sequence[str]) -> Completion:
    """The completion up to the token that completes the first of the strings; all of it without one."""
    if not strings:
        return completion

    def complete(count: int) -> bool:
        text = tokenizer.decode(completion.tokens[:count])
        return any(string in text for string in strings)

    whole = len(completion.tokens)
    if not complete(whole):
        return completion
    count = bisect_left(range(whole), True, key=complete)
    experts = completion.experts
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        finish="stop_string",
        experts=None if experts is None else experts[: len(experts) - (whole - count)],
    )
