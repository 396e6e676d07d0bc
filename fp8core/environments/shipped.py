"""The environments that are shipped: a calculator and an interpreter of Python."""

import re
from collections.abc import Callable, Sequence

from fp8core.environments.protocol import Action, Outcome, Said, Task, Tool, ToolCall, Turn
from fp8core.environments.sandbox import Interpreter
from fp8core.errors import UserError, printable


class ToolError(Exception):
    """A call failed; the policy reads the message."""


class _OneTool:
    """An environment with one tool. An action without a call ends the episode."""

    TOOL: Tool

    def start(self, task: Task) -> Turn:
        return Turn((*task.before, Said("user", task.question)), tools=(self.TOOL,))

    def step(self, action: Action) -> Turn | Outcome:
        """A message for every call, in their order."""
        if action.malformed:
            return Turn((Said("tool", f"error: {action.malformed}"),), failed=max(1, len(action.calls)))
        if not action.calls:
            return Outcome("judge")
        answers = [self._answer(call) for call in action.calls]
        return Turn(
            tuple(Said("tool", content) for content, _ in answers), failed=sum(is_error for _, is_error in answers)
        )

    def close(self) -> None:
        pass

    def _answer(self, call: ToolCall) -> tuple[str, bool]:
        tool = self.TOOL
        (name,) = tool.parameters["properties"]
        try:
            if call.name != tool.name:
                raise ToolError(f"there is no tool {call.name[:40]!r}; there is {tool.name}")
            if call.arguments.keys() != {name}:
                names = ", ".join(name[:40] for name in list(call.arguments)[:4]) or "none"
                raise ToolError(f"{tool.name} takes {name}; it got {names}")
            if not isinstance(call.arguments[name], str):
                raise ToolError(f"{name} is no text")
            return self._call(call.arguments[name])
        except ToolError as error:
            return f"error: {error}", True

    def _call(self, argument: str) -> tuple[str, bool]:
        """The text of the answer, and whether the call failed; it may raise ToolError instead."""
        raise NotImplementedError


class Calculator(_OneTool):
    """`calculate(expression)`: integers, + - * and parentheses."""

    TOOL = Tool(
        "calculate",
        "Compute an expression of integers with +, -, * and parentheses.",
        {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example (12+7)*3."}},
            "required": ["expression"],
        },
    )

    def __init__(self, *, modulus: int | None = None, left_to_right: bool = False) -> None:
        """`modulus`: every operation is taken modulo this, and written with as many digits as `modulus - 1` has.
        `left_to_right`: `*` binds no more strongly than `+` and `-`."""
        if modulus is not None and (type(modulus) is not int or not 2 <= modulus <= 10**9):
            raise ValueError(f"modulus={modulus!r} is no integer from 2 to 1,000,000,000")
        self._modulus = modulus
        self._left_to_right = left_to_right

    def _call(self, argument: str) -> tuple[str, bool]:
        value = evaluate(argument, self._modulus, self._left_to_right)
        return (str(value) if self._modulus is None else f"{value:0{len(str(self._modulus - 1))}}"), False


_LONGEST_EXPRESSION = 1000
_DEEPEST = 50
_MOST_BITS = 3000
"""Some 900 digits."""
_TOKEN = re.compile(r"\s*([0-9]+|[-+*()])", re.ASCII)


def evaluate(expression: str, modulus: int | None, left_to_right: bool) -> int:
    """The value of an expression; modulo `modulus` it is from 0 to `modulus - 1`. Raises ToolError."""
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError(f"the expression has more than {_LONGEST_EXPRESSION} characters")
    return _Expression(expression, modulus, left_to_right).value()


class _Expression:
    def __init__(self, text: str, modulus: int | None, left_to_right: bool) -> None:
        self._modulus = modulus
        self._levels = ["+-*"] if left_to_right else ["+-", "*"]
        self._depth = 0
        self._tokens: list[str] = []
        at = 0
        text = text.rstrip()
        while at < len(text):
            if (token := _TOKEN.match(text, at)) is None:
                raise ToolError(f"cannot read {text[at:].lstrip()[:1]!r}; there are integers, + - * and parentheses")
            self._tokens.append(token[1])
            at = token.end()
        self._tokens.append("")

    def value(self) -> int:
        operations = self._operations(self._levels)
        if self._tokens[0]:
            raise ToolError(f"{self._tokens[0][:20]!r} is not expected there")
        return operations

    def _operations(self, levels: Sequence[str]) -> int:
        """A chain of the operations of a level, between chains of the levels that bind more strongly."""
        if not levels:
            return self._sign_term()
        value = self._operations(levels[1:])
        while self._tokens[0] and self._tokens[0] in levels[0]:
            value = self._apply(self._tokens.pop(0), value, self._operations(levels[1:]))
        return value

    def _sign_term(self) -> int:
        negative = False
        while self._tokens[0] and self._tokens[0] in "+-":
            negative ^= self._tokens.pop(0) == "-"
        value = self._number()
        return self._apply("-", 0, value) if negative else value

    def _number(self) -> int:
        token = self._tokens.pop(0)
        if token.isdigit():
            return self._apply("+", int(token), 0)
        if token != "(":
            raise ToolError(f"a number is expected {f'in place of {token!r}' if token else 'at the end'}")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ToolError(f"more than {_DEEPEST} parentheses within each other")
        value = self._operations(self._levels)
        if self._tokens.pop(0) != ")":
            raise ToolError("a parenthesis is not closed")
        self._depth -= 1
        return value

    def _apply(self, operation: str, left: int, right: int) -> int:
        value = left + right if operation == "+" else left - right if operation == "-" else left * right
        if value.bit_length() > _MOST_BITS:
            raise ToolError("the number is too large")
        return value if self._modulus is None else value % self._modulus


class Python(_OneTool):
    """`python(code)`: what it printed, the value of its last line, or an error; it sees names of earlier calls."""

    TOOL = Tool(
        "python",
        "Run Python code and show what it prints and the value of its last line. There is no network and no file.",
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "For example sum(range(10))."}},
            "required": ["code"],
        },
    )

    @classmethod
    def prepare(
        cls, *, seconds: int = 6, memory_mb: int = 512, characters: int = 2000, container: Sequence[str] = ()
    ) -> "Callable[[], Python]":
        """Try the sandbox, once for all episodes. Arguments as of `Interpreter`.

        Raises UserError: the sandbox is missing, or does not run with these limits.
        """
        for name, value in (("seconds", seconds), ("memory_mb", memory_mb), ("characters", characters)):
            if type(value) is not int or value < 1:
                raise UserError(f"{name}={value!r} is no number from 1")
        trial = Interpreter(seconds, memory_mb, 2000, container)
        answer, _ = trial.run("1 + 1")
        trial.close()
        if answer != "2":
            raise UserError(f"its sandbox does not run: {printable(' '.join(answer.split()))[:400]}")
        return lambda: cls(Interpreter(seconds, memory_mb, characters, container))

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def _call(self, argument: str) -> tuple[str, bool]:
        return self._interpreter.run(argument)

    def close(self) -> None:
        self._interpreter.close()
