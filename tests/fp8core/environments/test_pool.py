"""Episodes side by side: whatever one does ends that one at most, with a reason; they end with the training."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Action, Outcome, Said, Task, ToolCall, Turn
from fp8core.errors import UserError
from tests.fp8core.environments.conftest import LIMITS, collect

StartPool = Callable[..., EnvironmentPool]


@pytest.fixture(scope="module")
def pool(start_pool: StartPool, hostile_file: Path) -> EnvironmentPool:
    return start_pool(f"{hostile_file}:Hostile")


def said(text: str) -> Turn:
    return Turn((Said("user", text),))


def ask(pool: EnvironmentPool, *texts: str, start: str = "") -> Turn | Outcome:
    """The reply to the last of some actions of an episode, beside which another one is open and answers."""
    pool.begin((9, 9), Task("said('well')", "", 0))
    pool.begin((0, 0), Task(start, "", 0))
    reply = collect(pool, 2)[0, 0]
    for text in texts:
        pool.act((0, 0), Action(text))
        reply = collect(pool, 1)[0, 0]
    pool.end((0, 0))
    pool.act((9, 9), Action("said('still well')"))
    assert collect(pool, 1) == {(9, 9): said("still well")}
    pool.end((9, 9))
    return reply


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("fail('it')", "ValueError: no good: it"),
        ("os._exit(3)", "its process ended (exit code 3)"),
        ("ctypes.string_at(0)", "its process ended (SIGSEGV)"),
        ("bytearray(2**40)", "MemoryError"),
        ("None", "InvalidReply: the environment returned NoneType, neither a Turn nor an Outcome"),
        ("Turn(())", "ValueError: messages are empty"),
        ("Turn((Said('system', 'obey'),))", "InvalidReply: a message is Said(role='system'"),
        ("Turn((Said('user', 'x'),), reward=float('nan'))", "ValueError: reward is nan, not a number from"),
        ("Turn((Said('user', 'x'),), info={'A B': 1})", "ValueError: info has the name 'A B'"),
        ("Outcome('fine')", "InvalidReply: outcome is 'fine'; there are: judge, right"),
        ("self.closing('fail(1)', Outcome('right', 1))", "ValueError: no good: 1"),
    ],
)
def test_an_episode_ends_alone_as_crashed(pool: EnvironmentPool, text: str, detail: str) -> None:
    reply = ask(pool, text)
    assert isinstance(reply, Outcome)
    assert (reply.outcome, reply.reward, reply.failed) == ("crashed", 0.0, 0)
    assert detail in reply.detail
    assert len(reply.detail) <= 220
    assert reply.detail.isprintable()


@pytest.mark.parametrize("text", ["9 ** 9 ** 9", "self.closing('time.sleep(99)', Outcome('right'))"])
def test_time_is_bounded_also_in_a_function_of_c(start_pool: StartPool, hostile_file: Path, text: str) -> None:
    pool = start_pool(f"{hostile_file}:Hostile", limits=LIMITS._replace(timeout_seconds=2))
    assert ask(pool, text) == Outcome("timeout", detail="no reply after 2 s")
    pool.close()


def test_what_arrives_is_what_was_said(pool: EnvironmentPool) -> None:
    assert ask(pool, r"said('\0\x1b[2J\r\n\u202e</tool_call>')") == said("\0\x1b[2J\r\n\u202e</tool_call>")
    assert ask(pool, "[print('noise' * 10**6), os.write(1, b'more'), said('printed')][-1]") == said("printed")
    half = "Turn((Said('tool', 'x'),), reward=__import__('fractions').Fraction(1, 2), info={'n': True})"
    assert ask(pool, half) == Turn((Said("tool", "x"),), reward=0.5, info={"n": 1.0})
    before, columns = (Said("system", "be kind"),), {"level": [1, {"a": None}]}
    task = Task("said(ascii(self.task))", "18\ud800", 2**64 - 1, before, columns)
    pool.begin((0, 0), task)
    assert collect(pool, 1) == {(0, 0): said(ascii(task))}
    action = Action("said(repr(self.action))", (ToolCall("f", {"a": [1.5, "\N{SNOWMAN}"]}),), "odd", "length")
    pool.act((0, 0), action)
    assert collect(pool, 1) == {(0, 0): said(repr(action))}
    pool.end((0, 0))


def test_more_episodes_than_there_is_room_for_wait(pool: EnvironmentPool) -> None:
    keys = [(group, sample) for group in range(3) for sample in range(4)]
    for key in keys:
        pool.begin(key, Task("", "", 0))
    turns = collect(pool, 4)
    assert set(turns) == set(keys[:4])
    assert pool.replies(wait=True) == []  # All that could come have; the others wait for these to end.
    for begun in range(0, 12, 4):
        ours, following = keys[begun : begun + 4], keys[begun + 4 : begun + 8]
        for key in ours:
            pool.act(key, Action(f"Outcome('right', {key[0]}.5)"))
        # One that ends makes room: the first turn of the next may come before the other ends.
        replies = collect(pool, 4 + len(following))
        assert {key: replies.pop(key) for key in ours} == {key: Outcome("right", key[0] + 0.5) for key in ours}
        assert set(replies) == set(following)


def test_numbers_at_random_follow_from_the_task_alone(pool: EnvironmentPool) -> None:
    seeds = [7, 8, 7, -12345 % 2**64]
    for sample, seed in enumerate(seeds):
        pool.begin((0, sample), Task("said(str(random.random()))", "", seed))
    drawn = collect(pool, 4)
    assert drawn[0, 0] == drawn[0, 2] != drawn[0, 1]
    assert drawn[0, 3] == said(str(random.Random(12345).random()))
    for sample in range(4):
        pool.end((0, sample))


PARENT = """
import sys, time
from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Task
from fp8core.processes.pool import Limits

pool = EnvironmentPool(sys.argv[1], {}, Limits(60, 512), 2)
for sample, text in enumerate(("said('open')", "child() or spin()")):
    pool.begin((0, sample), Task(text, "", 0))
while not pool.replies(wait=True): pass
print("open", flush=True)
time.sleep(1000)
"""


def test_what_is_open_ends_with_a_killed_training(hostile_file: Path) -> None:
    arguments = [sys.executable, "-c", PARENT, f"{hostile_file}:Hostile"]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"open\n"
    wait_for(lambda: len(psutil.Process(parent.pid).children(recursive=True)) == 4)
    below = psutil.Process(parent.pid).children(recursive=True)  # The host, two episodes, and a child of one.
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert psutil.wait_procs(below, timeout=8)[1] == []


def test_episodes_of_a_killed_host_crash_and_the_next_is_refused(start_pool: StartPool, hostile_file: Path) -> None:
    before = {*psutil.Process().children()}
    pool = start_pool(f"{hostile_file}:Hostile")
    (host,) = {*psutil.Process().children()} - before
    pool.begin((0, 0), Task("", "", 0))
    collect(pool, 1)
    host.kill()
    host.wait()
    pool.act((0, 0), Action("said('more')"))
    assert [*collect(pool, 1).values()] == [Outcome("crashed", detail="its process ended (SIGKILL)")]
    with pytest.raises(UserError, match=r"hostile\.py:Hostile: the process that has loaded it was killed; resume"):
        pool.begin((0, 1), Task("", "", 2))


def test_an_episode_that_rests_ends_where_another_needs_its_process(start_pool: StartPool, hostile_file: Path) -> None:
    pool, asked = start_pool(f"{hostile_file}:Hostile", max_concurrent_episodes=3), [Action("said('one')")]
    for sample in range(2):
        pool.begin((0, sample), Task("", "", sample))
    collect(pool, 2)
    for sample in range(2):
        pool.act((0, sample), asked[0])
    collect(pool, 2)
    for sample in range(2):
        pool.rest((0, sample))
    for sample in range(2):
        pool.begin((1, sample), Task("", "", 0))
        assert collect(pool, 1) == {(1, sample): said("hello")}, "there was room for one, and one that rested ends"
    woken = [pool.wake((0, sample), Task("", "", sample), asked) for sample in range(2)]
    assert woken == [False, True], "the first that rested has ended"
    pool.act((0, 1), Action("said(self.task.seed * 'kept')"))
    assert collect(pool, 1) == {(0, 1): said("kept")}
    pool.begin((1, 2), Task("", "", 0))
    assert pool.replies(wait=True) == [], "none rests"
    pool.rest((0, 1))
    assert not pool.wake((0, 1), Task("", "", 1), asked), "it is further"


METHODS = "class Own:\n def start(self, task): ...\n def step(self, action): ...\n def close(self): ..."


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ("", {}, "own.py has no class Own"),
        ("1/0", {}, "own.py cannot be imported: ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", {}, "its process ended while it was imported"),
        ("class Own: ...", {}, "Own has no method start"),
        (METHODS, {"a": 1}, "it is called as Own(a=...), and is defined as Own(): got an unexpected keyword"),
        (
            f"import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n{METHODS}",
            {},
            "loading it",
        ),
    ],
)
def test_what_cannot_be_an_environment_is_refused_in_a_line(
    tmp_path: Path, source: str, options: dict[str, int], error: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(source)
    with pytest.raises(UserError) as raised:
        EnvironmentPool(f"{path}:Own", options, LIMITS._replace(timeout_seconds=60), 1)
    assert str(raised.value).startswith(f"environment.name={path}:Own: ")
    assert error in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
