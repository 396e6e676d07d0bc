"""Episodes side by side: their order, their room, their seeds, and how a pool begins and ends."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from fp8core.environments.pool import EnvironmentPool, EpisodeLimits
from fp8core.environments.protocol import Action, Outcome, Said, Task, ToolCall, Turn
from fp8core.errors import UserError
from tests.fp8core.environments.conftest import LIMITS, collect

StartPool = Callable[..., EnvironmentPool]


@pytest.fixture(scope="module")
def pool(start_pool: StartPool, hostile_file: Path) -> EnvironmentPool:
    return start_pool(f"{hostile_file}:Hostile", greeting="good day")


def said(text: str) -> Turn:
    return Turn((Said("user", text),))


def test_more_episodes_than_there_is_room_for_wait(pool: EnvironmentPool) -> None:
    keys = [(group, sample) for group in range(4) for sample in range(5)]
    for key in keys:
        pool.begin(key, Task("", "", 0))
    turns = collect(pool, 4)
    assert set(turns) == set(keys[:4])
    assert pool.replies(wait=True) == []  # All that could come have; the others wait for these to end.
    for begun in range(0, 20, 4):
        ours, following = keys[begun : begun + 4], keys[begun + 4 : begun + 8]
        for key in ours:
            assert turns[key] == said("good day")
            pool.act(key, Action(f"give Outcome('right', {key[0]}.5)"))
        # One that ends makes room: the first turn of the next may come before the other ends.
        replies = collect(pool, 4 + len(following))
        assert {key: replies.pop(key) for key in ours} == {key: Outcome("right", key[0] + 0.5) for key in ours}
        assert set(turns := replies) == set(following)


def test_a_slow_episode_keeps_no_other_waiting(pool: EnvironmentPool) -> None:
    for sample, text in enumerate(["give (time.sleep(1.5), Outcome('right'))[1]", "say fast"]):
        pool.begin((0, sample), Task(text, "", 0))
    ((key, _, seconds),) = pool.replies(wait=True)
    assert (key, seconds < 1.4) == ((0, 1), True)
    ((key, reply, seconds),) = pool.replies(wait=True)
    assert (key, reply, 1.5 <= seconds < 7) == ((0, 0), Outcome("right"), True)
    pool.end((0, 1))


def test_a_wait_that_is_bounded_ends_without_a_reply(pool: EnvironmentPool, tmp_path: Path) -> None:
    begin = f"give [time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(tmp_path / 'go')!r}), True)] and None"
    pool.begin((0, 0), Task(f"{begin} or Turn((Said('user', 'went'),))", "", 0))
    assert pool.replies(wait=True, most_seconds=0.2) == []
    (tmp_path / "go").touch()
    assert collect(pool, 1) == {(0, 0): said("went")}
    pool.end((0, 0))


def test_numbers_at_random_follow_from_the_task_alone(pool: EnvironmentPool) -> None:
    seeds = [7, 8, 7, -12345 % 2**64]
    for sample, seed in enumerate(seeds):
        pool.begin((0, sample), Task("draw", "", seed))
    drawn = collect(pool, 4)
    assert drawn[0, 0] == drawn[0, 2] != drawn[0, 1]
    # As earlier versions drew, whose seeds had a sign.
    assert drawn[0, 3] == said(str(random.Random(-12345).random()))
    for sample in range(4):
        pool.end((0, sample))


def test_a_task_and_an_action_arrive_as_they_are(pool: EnvironmentPool) -> None:
    task = Task(
        "give Turn((Said('user', ascii(self.task)),))", "18\ud800", 2**64 - 1,
        before=(Said("system", "be kind"),), columns={"level": [1, {"a": None}]},
    )  # fmt: skip
    pool.begin((0, 0), task)
    assert collect(pool, 1) == {(0, 0): said(ascii(task))}
    text = "give Turn((Said('user', repr(self.action)),))"
    action = Action(text, (ToolCall("f", {"a": [1.5, "\N{SNOWMAN}"]}),), "odd", "length")
    pool.act((0, 0), action)
    assert collect(pool, 1) == {(0, 0): said(repr(action))}
    pool.end((0, 0))


def test_calls_that_are_too_many_or_too_deep_are_told_as_malformed(start_pool: StartPool) -> None:
    calculator = start_pool("calculator")
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    for calls, told in (
        ((ToolCall("calculate", {"expression": "1"}),) * 65, "error: 65 calls in a turn; at most 64 are made"),
        ((ToolCall("calculate", deep),), "error: arguments nested too deeply, or a number too long"),
    ):
        calculator.begin((0, 0), Task("1+1", "2", 0))
        collect(calculator, 1)
        calculator.act((0, 0), Action("", calls))
        assert collect(calculator, 1) == {(0, 0): Turn((Said("tool", told),), failed=1)}
        calculator.end((0, 0))


def test_an_end_lets_the_environment_close(pool: EnvironmentPool, tmp_path: Path) -> None:
    pool.begin((0, 0), Task(f"at_close note {tmp_path / 'closed'}", "", 0))
    collect(pool, 1)
    pool.end((0, 0))
    pool.end((0, 0))
    wait_for(lambda: pool.replies(wait=False) == [] and not pool._open)
    assert (tmp_path / "closed").read_text() == "x"
    pool.begin((0, 1), Task(f"at_close note {tmp_path / 'once'}|give Outcome('right')", "", 0))
    assert collect(pool, 1) == {(0, 1): Outcome("right")}
    wait_for(lambda: pool.replies(wait=False) == [] and not pool._open)
    assert (tmp_path / "once").read_text() == "x"


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize(
    ("then", "detail"),
    [
        ("raise it", "ValueError: no good: it"),
        ("quit", "SystemExit: 4"),
        ("give Turn((Said('user', 'x' * 10**6),))", "ValueError: a reply of 1,000,"),
        ("give Outcome('fine')", "InvalidReply: outcome is 'fine'"),
    ],
)
def test_an_environment_that_crashes_is_closed_once(
    pool: EnvironmentPool, tmp_path: Path, start: bool, then: str, detail: str
) -> None:
    """And what its `close` raises hides nothing."""
    crash = f"at_close note_and_raise {tmp_path / 'closed'}|{then}"
    pool.begin((0, 0), Task(crash if start else "", "", 0))
    if not start:
        collect(pool, 1)
        pool.act((0, 0), Action(crash))
    ((_, ended),) = collect(pool, 1).items()
    assert isinstance(ended, Outcome)
    assert ended.outcome == "crashed"
    assert ended.detail.startswith(detail)
    wait_for(lambda: pool.replies(wait=False) == [] and not pool._open)
    assert (tmp_path / "closed").read_text() == "x"


def test_an_environment_whose_close_fails_is_not_closed_again(pool: EnvironmentPool, tmp_path: Path) -> None:
    pool.begin((0, 0), Task(f"at_close note_and_raise {tmp_path / 'closed'}|give Outcome('right')", "", 0))
    ((_, ended),) = collect(pool, 1).items()
    assert isinstance(ended, Outcome)
    assert (ended.outcome, ended.detail[:25]) == ("crashed", "ValueError: no good: late")
    wait_for(lambda: pool.replies(wait=False) == [] and not pool._open)
    assert (tmp_path / "closed").read_text() == "x"


@pytest.mark.parametrize("close", ["self.opened.close()", "raise SystemExit(3)", "os._exit(3)"])
def test_what_close_does_without_start_refuses_no_run(start_pool: StartPool, tmp_path: Path, close: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(OPENS.format(close=close, closed=str(tmp_path / "closed")))
    pool = start_pool(f"{path}:Opens")
    assert (tmp_path / "closed").exists(), "what its constructor holds is released"
    pool.begin((0, 0), Task("", "", 0))
    assert collect(pool, 1) == {(0, 0): said("open")}
    pool.end((0, 0))


OPENS = """
import os
from fp8core.environments.protocol import Said, Turn

class Opens:
    def start(self, task):
        self.opened = open(os.devnull)
        return Turn((Said("user", "open"),))

    def step(self, action): ...

    def close(self):
        open({closed!r}, "w").close()
        {close}
"""


def test_an_episode_that_does_not_close_is_killed(start_pool: StartPool, hostile_file: Path) -> None:
    pool = start_pool(f"{hostile_file}:Hostile", at_once=1, limits=LIMITS._replace(timeout_seconds=2.0))
    pool.begin((0, 0), Task("at_close sleep", "", 0))
    collect(pool, 1)
    pool.end((0, 0))
    pool.begin((0, 0), Task("say next", "", 0))
    assert collect(pool, 1) == {(0, 0): said("say next"[4:])}
    began = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - began < 30


def test_what_is_open_ends_with_the_pool_and_with_a_killed_training(hostile_file: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"{hostile_file}:Hostile"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"open\n"
    # The host and two episodes, each with its supervisor; that of the trial may be about to end.
    wait_for(lambda: len(psutil.Process(parent.pid).children(recursive=True)) == 2 + 2 * 2)
    below = psutil.Process(parent.pid).children(recursive=True)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert psutil.wait_procs(below, timeout=8)[1] == []


PARENT = """
import sys, time
from fp8core.environments.pool import EnvironmentPool, EpisodeLimits
from fp8core.environments.protocol import Task

pool = EnvironmentPool(sys.argv[1], {}, EpisodeLimits(), 2)
for sample in range(2):
    pool.begin((0, sample), Task("at_close sleep", "", 0))
while sum(1 for _ in pool.replies(wait=True)) < 1: pass
while pool.replies(wait=True): pass
print("open", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("large", ["reply", "action"])
def test_what_is_larger_than_a_buffer_is_not_late_where_the_training_was_busy(
    start_pool: StartPool, hostile_file: Path, large: str
) -> None:
    """The rest of it waits for the training, however long that does something else."""
    pool = start_pool(f"{hostile_file}:Hostile", limits=LIMITS._replace(timeout_seconds=3.0, reply_bytes=1 << 20))
    pool.begin((0, 0), Task("", "", 0))
    collect(pool, 1)
    length, asked = (900_000, 0) if large == "reply" else (9, 900_000)
    pool.act((0, 0), Action(f"give Turn((Said('user', 'x' * {length}),)) #".ljust(asked)))
    time.sleep(3.5)
    assert collect(pool, 1) == {(0, 0): said("x" * length)}
    pool.end((0, 0))


COUNTING = """
import random
from fp8core.environments.protocol import Outcome, Said, Turn

class Counting:
    def start(self, task):
        self.draws, self.heard = random.Random(task.seed), []
        return Turn((Said("user", "go"),))
    def step(self, action):
        self.heard.append(action.text)
        return Turn((Said("user", f"{' '.join(self.heard)} {self.draws.random()}"),))
    def close(self): pass
"""


@pytest.fixture
def counting(start_pool: StartPool, tmp_path: Path) -> EnvironmentPool:
    """Two episodes that have answered twice."""
    (tmp_path / "counting.py").write_text(COUNTING)
    pool = start_pool(f"{tmp_path / 'counting.py'}:Counting", at_once=3)
    for sample in range(2):
        pool.begin((0, sample), Task("", "", sample))
    assert list(collect(pool, 2).values()) == 2 * [said("go")]
    answer_twice(pool)
    return pool


def answer_twice(pool: EnvironmentPool, *words: str) -> dict[tuple[int, int], Turn | Outcome]:
    for word in words or ("one", "two"):
        for sample in range(2):
            pool.act((0, sample), Action(word))
        found = collect(pool, 2)
    return found


def host_of(pool: EnvironmentPool) -> psutil.Process:
    assert pool._host is not None
    (host,) = psutil.Process(pool._host._supervisor._process.pid).children()
    return host


def test_episodes_of_a_killed_host_go_on_in_another(counting: EnvironmentPool) -> None:
    """The first is asked when it is killed, the other waits for the policy; a third begins later."""
    draws = [random.Random(sample) for sample in range(2)]
    expected = [f"one two three {[each.random() for _ in range(3)][2]}" for each in draws]
    killed = host_of(counting)
    below = killed.children(recursive=True)
    killed.suspend()
    counting.act((0, 0), Action("three"))
    killed.kill()
    assert psutil.wait_procs(below, timeout=8)[1] == []
    assert collect(counting, 1)[0, 0] == said(expected[0])
    counting.act((0, 1), Action("three"))
    assert collect(counting, 1)[0, 1] == said(expected[1])
    counting.begin((0, 2), Task("", "", 2))
    assert collect(counting, 1)[0, 2] == said("go")


def test_an_environment_that_was_edited_takes_no_episode_over(counting: EnvironmentPool, tmp_path: Path) -> None:
    """What it would answer now is no continuation of what it has answered."""
    (tmp_path / "counting.py").write_text(f"{COUNTING}# edited\n")
    host = host_of(counting)
    below = host.children(recursive=True)
    host.kill()
    # They may answer until they have ended.
    psutil.wait_procs(below, timeout=10)
    with pytest.raises(UserError, match=r"counting\.py:Counting: it changed while it was used: "):
        answer_twice(counting, "three")


def test_episodes_of_a_killed_host_are_not_late_where_the_next_takes_long(
    start_pool: StartPool, tmp_path: Path
) -> None:
    """The host is killed while the pool waits, so that it notices the host before some of the episodes."""
    path, slow = tmp_path / "slow.py", tmp_path / "slow"
    path.write_text(SLOW.format(slow=str(slow)))
    pool = start_pool(f"{path}:Slow", at_once=8, limits=LIMITS._replace(timeout_seconds=3.0))
    slow.touch()
    for sample in range(8):
        pool.begin((0, sample), Task("", "", 0))
    assert collect(pool, 8) == {(0, sample): said("go") for sample in range(8)}
    killed = host_of(pool)
    (tmp_path / "host").write_text(str(killed.pid))
    for sample in range(8):
        pool.act((0, sample), Action(str(tmp_path / "host")))
    threading.Timer(0.5, killed.kill).start()
    assert collect(pool, 8) == {(0, sample): said("on") for sample in range(8)}
    for sample in range(8):
        pool.end((0, sample))


@pytest.mark.parametrize("edited", [True, False])
def test_closing_starts_nothing_in_place_of_a_killed_host(tmp_path: Path, edited: bool) -> None:
    path, imported = tmp_path / "noted.py", tmp_path / "imported"
    text = COUNTING.replace("import random", f"import random\nopen({str(imported)!r}, 'a').write('x')")
    path.write_text(text)
    before = psutil.Process().children(recursive=True)
    pool = EnvironmentPool(f"{path}:Counting", {}, LIMITS, 2)
    pool.begin((0, 0), Task("", "", 0))
    collect(pool, 1)
    pool.rest((0, 0))
    path.write_text(f"{text}# edited\n" if edited else text)
    host_of(pool).kill()
    pool.close()
    assert imported.read_text() == "x"
    assert {*psutil.Process().children(recursive=True)} <= {*before}


SLOW = """
import os
import pathlib
import time

from fp8core.environments.protocol import Said, Turn

if pathlib.Path({slow!r}).exists():
    time.sleep(4)
HOST = os.getpid()


class Slow:
    def start(self, task):
        return Turn((Said("user", "go"),))

    def step(self, action):
        if HOST == int(pathlib.Path(action.text).read_text()):
            time.sleep(1000)
        return Turn((Said("user", "on"),))

    def close(self):
        pass
"""


def test_an_episode_that_is_killed_goes_on_once(counting: EnvironmentPool) -> None:
    def kill_first() -> None:
        supervisors = sorted(host_of(counting).children(), key=lambda process: process.pid)
        first = min(supervisors, key=lambda process: process.create_time())
        (episode,) = first.children()
        episode.kill()

    kill_first()
    replies = answer_twice(counting, "three")
    assert {reply.messages[0].content.rpartition(" ")[0] for reply in replies.values()} == {"one two three"}
    for process in host_of(counting).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # An episode ends with its supervisor.
            process.kill()
    outcomes = answer_twice(counting, "four")
    assert sorted(type(each).__name__ for each in outcomes.values()) == ["Outcome", "Turn"]


def test_the_host_has_no_thread_and_neither_torch_nor_pydantic(start_pool: StartPool, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    pool = start_pool(f"{tmp_path / 'look.py'}:Look")
    pool.begin((0, 0), Task("", "", 0))
    assert collect(pool, 1) == {(0, 0): said("")}


LOOK = """
import sys
from fp8core.environments.protocol import Said, Turn

class Look:
    def start(self, task):
        return Turn((Said("user", " ".join({"torch", "pydantic", "numpy", "asyncio"} & {*sys.modules})),))
    def step(self, action): ...
    def close(self): ...
"""


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ("", {}, "own.py has no class Own"),
        ("1/0", {}, "own.py cannot be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", {}, "own.py cannot be imported: SystemExit: 3"),
        ("import os; os._exit(3)", {}, "its process ended while it was imported"),
        ("class Own: ...", {}, "Own has no method start(task)"),
        ("class Own:\n def start(self): ...", {}, "start(task) is called, and is defined as start(self)"),
        ("METHODS", {"a": 1}, "it is called as Own(a=...), and is defined as Own(): got an unexpected keyword"),
        ("METHODS\n def __init__(self, *, a): ...", {}, "it is called as Own(), and is defined as Own(*, a): missing"),
        ("METHODS\n def __init__(self): raise ValueError('no\\nno')", {}, "ValueError: no"),
        ("METHODS\n def __init__(self):\n  while True: ...", {}, "more than 1 s of processor time"),
        ("METHODS\n def __init__(self): import os; os._exit(3)", {}, "its process ended (exit code 3)"),
        ("METHODS\n def __init__(self, *, a='" + "x" * 500 + "\\n'): ...", {"b": 1}, "it is called as Own(b=...)"),
        ("def Own(): return 3", {}, "it makes int, which has no method start"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\nMETHODS", {}, "loading it"),
    ],
)  # fmt: skip
def test_what_cannot_be_an_environment_is_refused_in_a_line(
    tmp_path: Path, source: str, options: dict[str, int], error: str
) -> None:
    path = tmp_path / "own.py"
    methods = "class Own:\n def start(self, task): ...\n def step(self, action): ...\n def close(self): ..."
    path.write_text(source.replace("METHODS", methods))
    with pytest.raises(UserError) as raised:
        EnvironmentPool(f"{path}:Own", options, LIMITS, 1)
    assert str(raised.value).startswith(f"environment.name={path}:Own: ")
    assert error in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 600


def test_a_module_of_the_path_and_its_digest(
    start_pool: StartPool, hostile_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(hostile_file.parent))
    by_module = start_pool("hostile:Hostile")
    by_file = start_pool(f"{hostile_file}:Hostile")
    assert by_module.description["source"] == by_file.description["source"]
    assert by_module.description["environment"] == "hostile:Hostile"


def test_more_episodes_than_files_are_refused() -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    try:
        with pytest.raises(
            UserError, match=r"environment.at_once=500 needs 564 open files, and `ulimit -n` allows 512"
        ):
            EnvironmentPool("calculator", {}, EpisodeLimits(), 500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


PREPARED = """
import os
import random

import pyarrow

from fp8core.environments.protocol import Outcome, Said, Turn


class Prepared:
    @classmethod
    def prepare(cls, *, word):
        host = os.getpid()
        return lambda: cls(f"{word} {host}"), word

    def __init__(self, said):
        self.said = said

    def start(self, task):
        return Turn((Said("user", self.said),))

    def step(self, action):
        return Outcome("right")

    def close(self):
        pass
"""


def test_a_class_is_prepared_once_for_all_episodes_and_its_digest_is_recorded(
    start_pool: StartPool, tmp_path: Path
) -> None:
    path = tmp_path / "prepared.py"
    path.write_text(PREPARED)
    pools = [start_pool(f"{path}:Prepared", word=word) for word in ("one", "two")]
    assert pools[0].description["source"] != pools[1].description["source"]
    for sample in range(3):
        pools[0].begin((0, sample), Task("", "", sample))
    turns = [*collect(pools[0], 3).values()]
    assert turns == [turns[0]] * 3
    assert isinstance(turns[0], Turn)
    assert turns[0].messages[0].content.startswith("one ")
    with pytest.raises(UserError, match=r"called as Prepared\(words=\.\.\.\), and is defined as Prepared\(\*, word\)"):
        start_pool(f"{path}:Prepared", words="one")


def test_an_episode_that_rests_ends_where_another_needs_its_process(counting: EnvironmentPool) -> None:
    for sample in range(2):
        counting.rest((0, sample))
    counting.begin((1, 0), Task("", "", 0))
    assert collect(counting, 1) == {(1, 0): said("go")}, "there was room for three"
    counting.begin((1, 1), Task("", "", 0))
    assert collect(counting, 1) == {(1, 1): said("go")}
    asked = [Action("one"), Action("two")]
    woken = [counting.wake((0, sample), Task("", "", sample), asked) for sample in range(2)]
    assert woken == [False, True], "the first that rested has ended"
    counting.act((0, 1), Action("three"))
    (reply,) = collect(counting, 1).values()
    assert isinstance(reply, Turn)
    assert reply.messages[0].content.startswith("one two three"), "an episode that is awake keeps its process"
    counting.begin((1, 2), Task("", "", 0))
    assert counting.replies(wait=True) == [], "none rests"


def test_an_episode_that_was_asked_something_else_is_not_gone_on_with(counting: EnvironmentPool) -> None:
    asked = [Action("one"), Action("two")]
    for sample in range(2):
        counting.rest((0, sample))
    assert not counting.wake((0, 0), Task("", "", 0), asked[:1]), "it is further"
    counting.begin((0, 0), Task("", "", 0))
    assert collect(counting, 1) == {(0, 0): said("go")}, "it has ended, and may begin again"
    assert not counting.wake((0, 1), Task("", "", 7), asked)
