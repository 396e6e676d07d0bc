"""The calculator, and Python in its sandbox."""

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fp8core.data.chain import running_values
from fp8core.environments.protocol import Action, Environment, Outcome, Said, Task, ToolCall, Turn
from fp8core.environments.sandbox import Interpreter
from fp8core.environments.shipped import Calculator, Python, ToolError, evaluate
from fp8core.errors import UserError

TASK = Task("How many?", "18", 3)


def call(environment: Environment, name: str, **arguments: Any) -> Turn | Outcome:
    return environment.step(Action("", (ToolCall(name, arguments),)))


def played(environment: Environment, task: Task = TASK) -> Any:
    environment.start(task)
    return environment


def test_expressions_have_the_values_that_python_gives_them() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = expression(draw, 4)
        assert evaluate(text, None, False) == eval(text), text


def expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return f"{draw.choice(['', '', '-', '--', '-+-', '- -'])}{draw.randrange(100)}"
    parts = [expression(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
    text = draw.choice("+-*").join(parts) if draw.random() < 0.5 else draw.choice([" + ", "*", "-"]).join(parts)
    return f"({text})" if draw.random() < 0.5 else text


@pytest.mark.parametrize("question", ["2*7*6+0+9=", "1-9*3=", "07*45-03=", "999*999-001+500=", "5="])
def test_left_to_right_modulo_a_power_of_ten_it_is_the_chain_task(question: str) -> None:
    digits = len(question.split("=")[0].replace("*", "+").replace("-", "+").split("+")[0])
    calculator = played(Calculator(modulus=10**digits, left_to_right=True))
    said = call(calculator, "calculate", expression=question.removesuffix("="))
    assert said == Turn((Said("tool", [question[:digits], *running_values(question)][-1]),))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("9**9**9", "a number is expected in place of '*'"),
        ("9" * 1000, "the number is too large"),
        ("1" * 1001, "the expression has more than 1000 characters"),
        ("(" * 51 + "1" + ")" * 51, "more than 50 parentheses within each other"),
        ("", "a number is expected at the end"),
        ("(1", "a parenthesis is not closed"),
        ("1)", "')' is not expected there"),
        ("1 2", "'2' is not expected there"),
        ("2/3", "cannot read '/'"),
        ("\u0663+1", "cannot read '\u0663'"),
        ("__import__('os')", "cannot read '_'"),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_what_is_no_expression_is_a_failed_call(text: str, error: str) -> None:
    with pytest.raises(ToolError) as raised:
        evaluate(text, None, False)
    assert str(raised.value).startswith(error)
    assert call(played(Calculator()), "calculate", expression=text) == Turn(
        (Said("tool", f"error: {raised.value}"),), failed=1
    )


def test_every_call_has_an_answer_and_none_ends_the_episode() -> None:
    calculator = Calculator()
    start = calculator.start(Task("How many?", "18", 0, before=(Said("system", "Count."),)))
    assert start.messages == (Said("system", "Count."), Said("user", "How many?"))
    assert [tool.name for tool in start.tools] == ["calculate"]
    wrong: list[tuple[str, Mapping[str, Any]]] = [
        ("divide", {"expression": "1"}), ("calculate", {}), ("calculate", {"expression": 1}),
        ("calculate", {"expression": "1", "b": 2}), ("calculate", {"expression": {"a": []}}),
    ]  # fmt: skip
    calls = (ToolCall("calculate", {"expression": "2*(3+4)"}), *(ToolCall(*each) for each in wrong))
    said = calculator.step(Action("", calls))
    assert isinstance(said, Turn)
    assert [message.content for message in said.messages] == [
        "14",
        "error: there is no tool 'divide'; there is calculate",
        "error: calculate takes expression; it got none",
        "error: expression is no text",
        "error: calculate takes expression; it got expression, b",
        "error: expression is no text",
    ]
    assert said.failed == 5
    assert calculator.step(Action("", malformed="no JSON")) == Turn((Said("tool", "error: no JSON"),), failed=1)
    assert calculator.step(Action("It is 14.")) == Outcome("judge")


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreter]:
    interpreter = Interpreter(seconds=2, memory_mb=256, characters=300)
    yield interpreter
    interpreter.close()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1+1", "2"),
        ("print('a')\nx = 3", "a"),
        ("x = 3\nprint('b', end='')\nx * 2", "b\n6"),
        ("", "(no output)"),
        ("'x' * 400", "'" + "x" * 299 + "\n... (cut after 300 characters)"),
        ("print('y' * 10**7)", "y" * 300 + "\n... (cut after 300 characters)"),
        ("import os; {'HOME', 'PATH', 'USER'} & os.environ.keys()", "set()"),
        ("import subprocess; subprocess.run(['echo', 'e'])", "CompletedProcess(args=['echo', 'e'], returncode=0)"),
    ],
)  # fmt: skip
def test_code_prints_and_has_a_value(python: Interpreter, code: str, answer: str) -> None:
    assert python.run(code) == (answer, False)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1/0", "line 1: ZeroDivisionError: division by zero"),
        ("x = 1\nx = y_undefined", "line 2: NameError: name 'y_undefined' is not defined"),
        ("bytearray(2**40)", "line 1: MemoryError"),
        # Files
        ("open('/etc/passwd')", "line 1: FileNotFoundError"),
        ("open('/of_the_policy', 'w')", "line 1: OSError: [Errno 30] Read-only file system"),
        (f"open({__file__!r})", "line 1: FileNotFoundError"),
        # The network
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')", "line 1: URLError"),
        # Other processes
        ("import os; os.kill(1, 9); os.kill(os.getpid() + 1, 9)", "line 1: ProcessLookupError"),
        ("import os\nwhile True: os.fork()", "more than 16 processes; what it defined is lost"),
        ("import ctypes; ctypes.string_at(0)", "the interpreter ended (SIGSEGV); what it defined is lost"),
        ("import os; os._exit(3)", "the interpreter ended (exit code 3); what it defined is lost"),
    ],
    ids=lambda text: ascii(text)[:40],
)
def test_code_reaches_nothing_outside(python: Interpreter, code: str, answer: str) -> None:
    said, failed = python.run(code)
    assert failed
    assert said.startswith(answer)
    assert python.run("6*7") == ("42", False)


@pytest.mark.parametrize("code", ["import time; time.sleep(99)", "while True: pass"])
def test_a_call_that_takes_too_long_ends_and_says_so(python: Interpreter, code: str) -> None:
    assert python.run("kept = 1") == ("(no output)", False)
    assert python.run("kept + 1") == ("2", False)
    said, failed = python.run(code)
    assert (said, failed) == ("no end after 2 s; what it defined is lost", True)
    assert python.run("kept") == ("line 1: NameError: name 'kept' is not defined", True)


def test_a_command_of_the_users_runs_the_code_in_place_of_bubblewrap() -> None:
    tool = Python.prepare(container=[sys.executable, "-I"])()
    tool.start(Task("How many?", "", 0))
    reply = tool.step(Action("", (ToolCall("python", {"code": "import sys; sys.flags.isolated"}),)))
    assert reply == Turn((Said("tool", "1"),))
    tool.close()
    with pytest.raises(UserError, match="its sandbox does not run: the interpreter ended"):
        Python.prepare(container=["false"])
