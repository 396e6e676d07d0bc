"""A problem, the protocol of everything that yields problems, and the tokens of a prompt."""

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

import numpy as np

from fp8core.config.data import DataConfig, data_key
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rollout.registry import longest_prompt

HELDOUT_ONE_IN = 8


class Message(NamedTuple):
    """A turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """A question with the text that its answer is checked against, and where it was read, for errors.

    `before` are the turns before the question, and `columns` other columns of its row, a JSON object or empty.
    `source` is the name of its source where `data` is a list.
    """

    prompt_id: str
    question: str
    answer: str
    place: str = field(default="", compare=False)
    before: tuple[Message, ...] = ()
    columns: str = ""
    source: str = ""

    @property
    def whole_question(self) -> str:
        """All that is asked, by which problems are told apart: the question, with the turns before it as JSON."""
        return conversation_text(self.question, self.before)


def conversation_text(question: str, before: tuple[Message, ...]) -> str:
    return json.dumps([*before, question]) if before else question


class PromptSource(Protocol):
    """Problems for training and for evaluation. No state: the step number is the position in the data.

    `training` and `heldout` raise UserError where there are fewer than `count`.
    """

    def training_digest(self) -> str:
        """SHA-256 of all that determines the problems that training can meet."""

    def digest(self) -> str | None:
        """SHA-256 of all problems that were read, of training and held out; None where settings determine them."""

    def training(self, step: int, count: int, seed: int) -> list[Problem]:
        """The problems of a step (from 0); a pure function of its arguments."""

    def heldout(self, count: int) -> list[Problem]:
        """The first of a fixed list of different problems, none of whose questions training ever yields."""

    def to_check(self) -> Iterable[Problem]:
        """Problems that show, before any work, what may be wrong with any of them: all rows, or the longest made."""

    def without(self, rows: Iterable[Problem]) -> Self:
        """The same source without some of its rows. Raises UserError when nothing is left to train on."""


def problems_digest(problems: Iterable[Problem]) -> str:
    digest = hashlib.sha256()
    for row in problems:
        parts = [row.whole_question, row.answer, *([row.columns] if row.columns else [])]
        digest.update(f"{json.dumps(parts)}\n".encode())
    return digest.hexdigest()


def problem(
    question: str, answer: str, place: str = "", before: tuple[Message, ...] = (), columns: str = ""
) -> Problem:
    """A problem named by the first 16 hexadecimal digits of the SHA-256 of what is asked."""
    name = hashlib.sha256(conversation_text(question, before).encode()).hexdigest()[:16]
    return Problem(name, question, answer, place, before, columns)


def is_heldout(question: str) -> bool:
    """True if a question is one of the eighth kept from training: by CRC-32, hence the same in every process."""
    return zlib.crc32(question.encode()) % HELDOUT_ONE_IN == 0


def generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    """Random numbers that depend on these three alone, independent between purposes and between indices."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


# More than tokenizers put around a text.
_ADDED_TOKENS = 8


def encode_prompt(
    problem: Problem, config: RunConfig, tokenizer: Tokenizer, max_positions: int
) -> tuple[str, list[int]]:
    """Text and token ids of a prompt: the template around the question, in the chat template if there is one.

    A chat template writes its own special tokens; a plain prompt gets those of the tokenizer (Llama's BOS).
    Raises UserError: the prompt is empty, longer than allowed, leaves no room for the completion, or has a character
    that the tokenizer lacks."""
    text, chat = prompt_text(problem, config, tokenizer)
    try:
        tokens = tokenizer.encode(text, add_special_tokens=not chat)
    except UserError as error:
        raise UserError(f"{problem.place}: {error}" if problem.place else str(error)) from error
    check_length(problem, len(tokens), "tokens", config, max_positions)
    return text, tokens


def check_length(problem: Problem, tokens: int, of_what: str, config: RunConfig, max_positions: int) -> None:
    """Raises UserError, with the place of the problem, on a prompt of so many tokens that does not fit."""
    limit = _longest(problem, config, max_positions)
    if not 0 < tokens <= limit:
        fitting = f"1 to {limit} fit" if limit > 0 else "none fit"
        place = f"{problem.place}: " if problem.place else ""
        setting = f"{data_key(problem.source)}.max_prompt_tokens={_data(problem, config).max_prompt_tokens}"
        raise UserError(
            f"{place}prompt {problem.prompt_id} ({problem.question[:40]!r}) has {tokens} {of_what}; {fitting} "
            f"({setting}, {max_positions} positions of model and engine, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}); change one of these, or the row"
        )


def _data(problem: Problem, config: RunConfig) -> DataConfig:
    return config.sources[problem.source]


def _longest(problem: Problem, config: RunConfig, max_positions: int) -> int:
    return min(_data(problem, config).max_prompt_tokens, longest_prompt(config, max_positions))


def check_prompt(problem: Problem, config: RunConfig, tokenizer: Tokenizer, max_positions: int) -> None:
    """Raises UserError as `encode_prompt`, at the cost of encoding only where a text may be too long.

    A token stands for a byte at least; where a tokenizer's normaliser lengthens a text, `encode_prompt` still refuses.
    The characters of a model from scratch are few: of that every prompt is encoded.
    """
    text, _ = prompt_text(problem, config, tokenizer)
    if config.architecture is not None or len(text.encode()) + _ADDED_TOKENS > _longest(problem, config, max_positions):
        encode_prompt(problem, config, tokenizer, max_positions)


def question_text(problem: Problem, config: RunConfig) -> str:
    return _data(problem, config).template.replace("{question}", problem.question)


def prompt_messages(problem: Problem, config: RunConfig) -> list[Message]:
    """The messages of a prompt: `data.system` unless the row has a system prompt, earlier turns, the question."""
    system = _data(problem, config).system
    has_system = any(message.role == "system" for message in problem.before)
    first = [] if system is None or has_system else [Message("system", system)]
    return [*first, *problem.before, Message("user", question_text(problem, config))]


def messages_of(problem: Problem, config: RunConfig) -> str:
    """As JSON."""
    return json.dumps(prompt_messages(problem, config))


def prompt_text(problem: Problem, config: RunConfig, tokenizer: Tokenizer) -> tuple[str, bool]:
    """The text of a prompt, and whether a chat template made it. Raises UserError: there is no way to write it."""
    data = _data(problem, config)
    if data.chat and tokenizer.has_template:
        messages = [message._asdict() for message in prompt_messages(problem, config)]
        return tokenizer.render(messages, arguments=data.template_arguments), True
    if data.system is not None:
        key = data_key(problem.source)
        raise UserError(f"{key}.system: the model has no chat template; write the text into {key}.template")
    if problem.before:
        raise UserError(f"{problem.place}: there are turns before the question, and the model has no chat template")
    return question_text(problem, config), False
