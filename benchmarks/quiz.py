"""An environment of ten turns and more: questions of the chain task one after another, with the calculator at hand.

Imported by the processes of environments (`environment.name: benchmarks.quiz:Quiz`), hence free of everything heavy.
"""

import random

from fp8core.environments.protocol import Action, Outcome, Said, Task, Turn
from fp8core.environments.shipped import Calculator, evaluate

_MODULUS, _OPERATIONS, _MOST_NUMBERS = 10, "+-*", 4


class Quiz:
    """The task's question, then others that its seed draws. A right answer earns its share of the reward."""

    def __init__(self, *, questions: int = 10) -> None:
        """`questions`: of an episode. Each takes a turn, and one more for every call of the tool."""
        self._calculator = Calculator(modulus=_MODULUS, left_to_right=True)
        self._questions, self._asked, self._right, self._answer = questions, 0, 0, 0

    def start(self, task: Task) -> Turn | Outcome:
        self._random = random.Random(task.seed)
        self._ask(task.question)
        return self._calculator.start(task)

    def step(self, action: Action) -> Turn | Outcome:
        """What follows the last `#` is the answer."""
        reply = self._calculator.step(action)
        if isinstance(reply, Turn):
            return reply
        right = action.text.rpartition("#")[2] == str(self._answer)
        self._right += right
        reward = right / self._questions
        if self._asked == self._questions:
            return Outcome("right" if self._right == self._questions else "wrong", reward)
        numbers = [str(self._random.randrange(_MODULUS)) for _ in range(self._random.randint(2, _MOST_NUMBERS))]
        question = numbers[0] + "".join(self._random.choice(_OPERATIONS) + number for number in numbers[1:]) + "="
        self._ask(question)
        return Turn((Said("user", question),), reward=reward)

    def close(self) -> None:
        pass

    def _ask(self, question: str) -> None:
        self._asked += 1
        self._answer = evaluate(question.removesuffix("="), _MODULUS, left_to_right=True)
