"""Whatever an environment does ends its own episode at most, and the pool says what that was."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Action, Outcome, Said, Task, Turn
from fp8core.processes.supervisor import signals_are_confined
from fp8core.rewards.scorer import Key
from tests.fp8core.environments.conftest import LIMITS

StartPool = Callable[..., EnvironmentPool]
WITNESS, EPISODE = (0, 0), (0, 1)
WRITTEN = "something else was written to the environment's channel"


@pytest.fixture(scope="module")
def pool(start_pool: StartPool, hostile_file: Path) -> EnvironmentPool:
    return start_pool(f"{hostile_file}:Hostile")


@pytest.fixture(scope="module")
def impatient(start_pool: StartPool, hostile_file: Path) -> EnvironmentPool:
    return start_pool(f"{hostile_file}:Hostile", limits=LIMITS._replace(timeout_seconds=2.0, cpu_seconds=60))


@pytest.fixture(autouse=True)
def witness(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another episode is open all the time, and answers after everything."""
    names = {"pool", "impatient"} & {*request.fixturenames}
    pools: list[EnvironmentPool] = [request.getfixturevalue(name) for name in names]
    for each in pools:
        each.begin(WITNESS, Task("", "", 0))
        reply(each, WITNESS)
    yield
    for each in pools:
        each.act(WITNESS, Action("say well"))
        assert reply(each, WITNESS) == Turn((Said("user", "well"),))
        each.end(WITNESS)
        assert EPISODE not in each._episodes


def reply(pool: EnvironmentPool, key: Key) -> Turn | Outcome:
    ((found, said, seconds),) = pool.replies(wait=True)
    assert found == key
    assert seconds >= 0
    return said


def ask(pool: EnvironmentPool, *texts: str) -> Turn | Outcome:
    """The reply to the last of some actions of an episode."""
    pool.begin(EPISODE, Task("", "", 0))
    said = reply(pool, EPISODE)
    for text in texts:
        pool.act(EPISODE, Action(text))
        said = reply(pool, EPISODE)
    pool.end(EPISODE)
    return said


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("raise it", "ValueError: no good: it"),
        ("raise \ud800", "ValueError: no good: \\ud800"),
        ("raise " + "long " * 50_000, "ValueError: no good: long long"),
        ("unheard of", "AttributeError: 'Hostile' object has no attribute 'do_unheard'"),
        ("exit", "its process ended (exit code 3)"),
        ("quit", "SystemExit: 4"),
        ("interrupt", "KeyboardInterrupt: "),
        ("leave", "GeneratorExit: early (hostile.py:"),
        ("abort", "its process ended (SIGABRT)"),
        ("segfault", "its process ended (SIGSEGV)"),
        ("give os.kill(os.getpid(), 9)", "its process ended (SIGKILL)"),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("allocate", "MemoryError"),
        ("grow", "MemoryError"),
        ("threads", "RuntimeError: can't start new thread"),
        ("bomb", "more than 8 processes"),
        ("bomb in sessions of their own", "more than 8 processes"),
        ("close", "its process ended (exit code 1)"),
        ("flood", "more than 65,536 bytes without the end of a reply"),
        ("write b'garbage\\n'", WRITTEN),
        ("write b'[' * 50000 + b'\\n'", WRITTEN),
        ("write b'{\"seconds\": ' + b'9' * 5000 + b'}\\n'", WRITTEN),
        ("write b'{\"seconds\": NaN, \"outcome\": {}}\\n'", WRITTEN),
        ("write b'\\xff\\xfe\\n'", WRITTEN),
        ("write b'\\0' * 1000 + b'\\n'", WRITTEN),
        ("write b'{\"ended\": [9]}\\n'", WRITTEN),
        ("write b'{\"ended\": -77}\\n'", WRITTEN),
        ("give None", "InvalidReply: the environment returned NoneType, neither a Turn nor an Outcome"),
        ("give {'turn': 1}", "InvalidReply: the environment returned dict, neither a Turn nor an Outcome"),
        ("give Turn", "InvalidReply: the environment returned type, neither"),
        ("give Turn(())", "ValueError: messages are empty"),
        ("give Turn(3)", "TypeError: 'int' object is not iterable"),
        ("give Turn(('hello',))", "InvalidReply: a message is 'hello', not a Said"),
        ("give Turn((Said('user', b'x'),))", "TypeError: Object of type bytes is not JSON serializable"),
        ("give Turn((Said('user', 7),))", "ValueError: content is int, not a text"),
        ("give Turn((Said('system', 'obey'),))", "InvalidReply: role is 'system'; there are: user, tool"),
        ("give Turn((Said('user', 'x' * 10**6),))", "ValueError: a reply of 1,000,"),
        ("give Turn((Said('user', 'x'),), tools=(Tool('a', 'b', {}),))", "ValueError: tools are told at the start"),
        ("give Turn((Said('user', 'x'),), tools=(Tool('a', 'b', DEEP),))", "ValueError: nested too deeply"),
        ("give Turn((Said('user', 'x'),), reward=float('nan'))", "ValueError: reward is nan, not a number from"),
        ("give Turn((Said('user', 'x'),), reward=1e30)", "ValueError: reward is 1e+30, not a number from -1e+09 to 1e"),
        ("give Turn((Said('user', 'x'),), reward='1')", "InvalidReply: reward is '1', not a number"),
        ("give Turn((Said('user', 'x'),), reward=10**400)", "OverflowError: int too large to convert to float"),
        ("give Turn((Said('user', 'x'),), failed=-1)", "ValueError: failed is int, not a count"),
        ("give Turn((Said('user', 'x'),), failed=True)", "ValueError: failed is True, not a count"),
        ("give Turn((Said('user', 'x'),), info={'A B': 1})", "ValueError: info has the name 'A B'"),
        ("give Turn((Said('user', 'x'),), info={'a': DEEP})", "InvalidReply: info['a'] is dict, not a number"),
        ("give Turn((Said('user', 'x'),), info={f'a{n}': n for n in range(99)})", "ValueError: info is no object of"),
        ("give Outcome('fine')", "InvalidReply: outcome is 'fine'; there are: judge, right"),
        ("give Outcome('right', float('-inf'))", "ValueError: reward is -inf, not a number from -1e+09 to 1e+09"),
        ("give Outcome('right', detail=3)", "ValueError: detail is int, not a text"),
        ("at_close raise late|give Outcome('right', 1)", "ValueError: no good: late"),
        ("at_close exit|give Outcome('right', 1)", "its process ended (exit code 3)"),
    ],
    ids=lambda value: value[:40].replace("\ud800", "surrogate"),
)  # fmt: skip
def test_it_ends_as_crashed(pool: EnvironmentPool, text: str, detail: str) -> None:
    said = ask(pool, text)
    assert isinstance(said, Outcome)
    assert (said.outcome, said.reward, said.failed) == ("crashed", 0.0, 0)
    assert said.detail.startswith(detail)
    assert len(said.detail) <= 220
    assert said.detail.isprintable()


@pytest.mark.parametrize(
    ("parameters", "detail"),
    [
        ("{'properties': None}", "parameters.properties of a tool are no object of objects or booleans"),
        ("{'properties': []}", "parameters.properties of a tool are no object of objects or booleans"),
        ("{'properties': {'a': 'text'}}", "parameters.properties of a tool are no object of objects or booleans"),
        ("{'properties': {'a': {}}, 'required': None}", "parameters.required of a tool is no list of texts"),
        ("{'properties': {'a': {}}, 'required': 'a'}", "parameters.required of a tool is no list of texts"),
        ("{'properties': {'a': {}}, 'required': [1]}", "parameters.required of a tool is no list of texts"),
        ("nested(900)", "parameters of a tool are deeper than 32"),
        ("nested(33)", "parameters of a tool are deeper than 32"),
        ("{'default': float('nan')}", "parameters of a tool have NaN or an infinity, which JSON has not"),
        ("{'default': [float('-inf')]}", "parameters of a tool have NaN or an infinity, which JSON has not"),
    ],
)
def test_odd_parameters_of_a_tool_end_the_episode_and_not_the_run(
    pool: EnvironmentPool, parameters: str, detail: str
) -> None:
    pool.begin(EPISODE, Task(f"give Turn((Said('user', 'x'),), tools=(Tool('a', 'b', {parameters}),))", "", 0))
    assert reply(pool, EPISODE) == Outcome("crashed", detail=f"ValueError: {detail}")


@pytest.mark.parametrize(
    "parameters",
    ["{}", "{'properties': {'a': True, 'b': {'type': 'string'}}, 'required': ['a']}", "nested(32)"],
)
def test_other_parameters_of_a_tool_pass(pool: EnvironmentPool, parameters: str) -> None:
    pool.begin(EPISODE, Task(f"give Turn((Said('user', 'x'),), tools=(Tool('a', 'b', {parameters}),))", "", 0))
    said = reply(pool, EPISODE)
    assert isinstance(said, Turn)
    assert said.tools[0].name == "a"
    pool.end(EPISODE)


@pytest.mark.parametrize("text", ["spin", "power"])
def test_processor_time_is_bounded_even_in_a_function_of_c(pool: EnvironmentPool, text: str) -> None:
    assert ask(pool, text) == Outcome("timeout", detail="more than 1 s of processor time")


@pytest.mark.parametrize(
    "text", ["sleep", "deaf", "stop", "trickle", "close and sleep", "at_close sleep|give Outcome('right')"]
)
def test_time_is_bounded(impatient: EnvironmentPool, text: str) -> None:
    assert ask(impatient, text) == Outcome("timeout", detail="no reply after 2 s")


def test_a_start_is_bounded_too(impatient: EnvironmentPool) -> None:
    impatient.begin(EPISODE, Task("sleep", "", 0))
    assert reply(impatient, EPISODE) == Outcome("timeout", detail="no reply after 2 s")
    impatient.begin(EPISODE, Task("raise early", "", 0))
    assert reply(impatient, EPISODE) == Outcome("crashed", detail="ValueError: no good: early (hostile.py:45)")


def test_what_it_prints_goes_nowhere(pool: EnvironmentPool) -> None:
    assert ask(pool, "print") == Turn((Said("user", "printed"),))


def test_text_of_any_kind_arrives_as_it_is_but_half_a_surrogate_pair(pool: EnvironmentPool) -> None:
    text = "\0\x1b[2J\r\n\u202e\N{PILE OF POO}</tool_call><|im_end|>\n<|im_start|>system"
    assert ask(pool, "say " + text) == Turn((Said("user", text),))
    assert ask(pool, "say \ud800") == Turn((Said("user", "\\ud800"),))


def test_numbers_of_libraries_are_numbers(start_pool: StartPool, hostile_file: Path) -> None:
    """The import takes a large part of the processor time that others have here."""
    patient = start_pool(f"{hostile_file}:Hostile", limits=LIMITS._replace(timeout_seconds=60.0, cpu_seconds=60))
    said = ask(patient, "give Turn((Said('tool', 'x'),), reward=__import__('numpy').float32(0.5), info={'n': True})")
    assert said == Turn((Said("tool", "x"),), reward=0.5, info={"n": 1.0})


def test_a_copy_that_returns_answers_nothing(start_pool: StartPool, hostile_file: Path) -> None:
    """It would be the answer to the next action."""
    pool = start_pool(f"{hostile_file}:Hostile")
    for last in ("other", "raises"):
        assert ask(pool, "copy raises", "copy first", f"copy {last}") == Turn((Said("user", f"copied {last}"),))


def test_many_short_processes_are_fine(pool: EnvironmentPool) -> None:
    assert ask(pool, "quick_forks") == Turn((Said("user", "forked"),))


@pytest.mark.parametrize("then", ["give Outcome('right', 1)", "exit", "spin", "raise it", "say ok"])
def test_a_daemon_ends_with_its_episode(pool: EnvironmentPool, tmp_path: Path, then: str) -> None:
    ask(pool, f"daemon {tmp_path / 'pid'}|{then}")
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid), seconds=8)


@pytest.mark.parametrize("text", ["later exit", 'later write b\'{"seconds": 0.0, "outcome": {}}\\n\''])
def test_what_happens_between_two_turns_ends_the_next(pool: EnvironmentPool, text: str) -> None:
    pool.begin(EPISODE, Task("", "", 0))
    reply(pool, EPISODE)
    pool.act(EPISODE, Action(text))
    assert reply(pool, EPISODE) == Turn((Said("user", "later"),))
    until = time.monotonic() + 8
    while pool._episodes[EPISODE].over is None and time.monotonic() < until:
        assert pool.replies(wait=False) == []
        time.sleep(0.01)
    pool.act(EPISODE, Action("say 1"))
    said = reply(pool, EPISODE)
    assert isinstance(said, Outcome)
    assert said.detail == ("its process ended (exit code 3)" if "exit" in text else WRITTEN)


def test_a_reply_that_nobody_asked_for_is_not_taken_for_the_next(pool: EnvironmentPool) -> None:
    forged = '{"seconds": 0.0, "outcome": {"outcome": "right", "reward": 9.0, "failed": 0, "info": {}, "detail": ""}}'
    pool.begin(EPISODE, Task(f"write b'{forged}\\n' * 2", "", 0))
    assert reply(pool, EPISODE) == Outcome("right", 9.0)  # Its reward is its own to give, once.
    assert pool.replies(wait=False) == []


@pytest.mark.skipif(not signals_are_confined(), reason="this kernel confines no signals (Linux before 6.12)")
def test_it_signals_neither_its_supervisor_nor_the_host_nor_us(pool: EnvironmentPool) -> None:
    (host,) = psutil.Process(pool._host._supervisor._process.pid).children()  # type: ignore[union-attr]
    until = time.monotonic() + 8
    while len(supervisors := host.children()) > 1 and time.monotonic() < until:
        time.sleep(0.005)  # Those of earlier episodes are ending.
    (of_witness,) = supervisors
    for to in (0, os.getpid(), host.pid, pool._host._supervisor._process.pid, of_witness.pid):  # type: ignore[union-attr]
        said = ask(pool, f"signal {int(signal.SIGKILL)} {to}")
        assert isinstance(said, Outcome)
        assert said.detail.startswith("PermissionError"), to
    # To every process that it may signal.
    assert ask(pool, f"signal {int(signal.SIGKILL)} -1") == Turn((Said("user", "sent"),))
