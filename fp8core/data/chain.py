"""The generated task: `2*7*6+0+9=`, every operation applied left to right and taken modulo 10.

Modulo 100 and 1000 all numbers have two and three digits, leading zeros included (`07*45-03=`). A number's place then
follows from how many precede it, whatever the numbers are.
"""

import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from fp8core.config.data import ChainTaskConfig
from fp8core.data.prompt import HELDOUT_ONE_IN, Problem, generator, is_heldout, problem
from fp8core.errors import UserError

_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATIONS = "".join(_APPLY)
EOS = "$"
_QUESTION = re.compile(r"[0-9]+([-+*][0-9]+)+=")
ALPHABET = "0123456789" + OPERATIONS + "=,#" + EOS

# Questions drawn at once. Part of the random stream: another value gives other questions for the same seed.
_BLOCK = 256
# Draws per held-out question before giving up; enough to find every one of a small task.
_PATIENCE = 100

Style = Literal["bare", "step_by_step", "tool"]


@dataclass(frozen=True)
class Demonstration:
    """A question with a right completion, for the supervised warm start; the completion ends with EOS."""

    question: str
    completion: str
    style: Style


def running_values(question: str) -> list[str]:
    """The value after each operation, as it is written: `2*7*6+0+9=` gives 4, 4, 4, 3 and `07*45-03=` 15, 12."""
    first, *rest = re.split(r"([-+*])", question.removesuffix("="))
    value = int(first)
    digits = len(first)
    values = []
    for operation, number in zip(rest[0::2], rest[1::2], strict=True):
        value = _APPLY[operation](value, int(number)) % 10**digits
        values.append(f"{value:0{digits}}")
    return values


def completion(question: str, style: Style) -> str:
    """A right completion: `#3$`, or step by step `4,4,4,3#3$`; what follows a tool's answer is as the bare one."""
    values = running_values(question)
    work = ",".join(values) if style == "step_by_step" else ""
    return f"{work}#{values[-1]}{EOS}"


def tool_call(question: str) -> str:
    return f"[{question.removesuffix('=')}]{EOS}"


class ChainSource:
    """Problems of the chain task, generated; see PromptSource."""

    def __init__(self, config: ChainTaskConfig) -> None:
        self._config = config
        self._holds_out: Callable[[str], bool] = is_heldout

    def training_digest(self) -> str:
        settings = {"generator": __name__, "heldout_one_in": HELDOUT_ONE_IN, **self._config.model_dump()}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def digest(self) -> None:
        return None

    def training(self, step: int, count: int, seed: int) -> list[Problem]:
        """Independent draws that are not held out; a question may come again."""
        return self.at(step, count, seed)

    def at(self, position: int, count: int, seed: int) -> list[Problem]:
        return [_problem(question) for question in self._training_questions("training", position, count, seed)]

    def heldout(self, count: int) -> list[Problem]:
        """Different held-out questions in a fixed random order. Raises UserError when too few exist."""
        draws = itertools.islice(_questions(self._config, generator(0, "heldout", 0)), count * _PATIENCE)
        questions = list(itertools.islice(dict.fromkeys(filter(is_heldout, draws)), count))
        if len(questions) < count:
            raise UserError(
                f"evaluation.prompts takes {count} questions, but the chain task with at most data.chain.max_operands="
                f"{self._config.max_operands} operands has only {len(questions)} held-out questions"
            )
        return [_problem(question) for question in questions]

    def to_check(self) -> list[Problem]:
        one = "1".zfill(self._config.digits)
        return [_problem(self._config.operations[0].join([one] * self._config.max_operands) + "=")]

    def without(self, rows: Iterable[Problem]) -> Self:
        assert not [*rows], "nothing is left out of what is generated"
        return self

    def holds_out(self, question: str) -> bool:
        return _QUESTION.fullmatch(question) is not None and is_heldout(question)

    def never_training(self, holds_out: Callable[[str], bool]) -> Self:
        less = copy(self)
        less._holds_out = lambda question: is_heldout(question) or holds_out(question)
        return less

    def demonstrations(
        self, step: int, count: int, seed: int, step_by_step_share: float, tool_share: float = 0.0
    ) -> list[Demonstration]:
        """Demonstrations of a supervised step. Shares are probabilities of styles; questions do not depend on them."""
        questions = self._training_questions("demonstrations", step, count, seed)
        numbers = generator(seed, "styles", step).random(count).tolist()
        with_work = step_by_step_share + tool_share
        styles: list[Style] = [
            "step_by_step" if place < step_by_step_share else "tool" if place < with_work else "bare"
            for place in numbers
        ]
        return [
            Demonstration(question, completion(question, style), style)
            for question, style in zip(questions, styles, strict=True)
        ]

    def _training_questions(self, purpose: str, step: int, count: int, seed: int) -> list[str]:
        draws = _questions(self._config, generator(seed, purpose, step))
        return list(itertools.islice(itertools.filterfalse(self._holds_out, draws), count))


def _questions(config: ChainTaskConfig, rng: np.random.Generator) -> Iterator[str]:
    longest = config.max_operands
    digits = config.digits
    operations = np.frombuffer(config.operations.encode(), np.uint8)
    text = np.empty((_BLOCK, (digits + 1) * longest - 1), np.uint8)
    while True:
        operands = rng.integers(config.min_operands, longest, _BLOCK, endpoint=True)
        numbers = rng.integers(0, config.modulus, (_BLOCK, longest))
        for place in range(digits):
            text[:, place :: digits + 1] = ord("0") + numbers // 10 ** (digits - 1 - place) % 10
        text[:, digits :: digits + 1] = operations[rng.integers(0, len(operations), (_BLOCK, longest - 1))]
        for row, length in zip(text, (digits + 1) * operands - 1, strict=True):
            yield row[:length].tobytes().decode() + "="


def _problem(question: str) -> Problem:
    return problem(question, running_values(question)[-1])
