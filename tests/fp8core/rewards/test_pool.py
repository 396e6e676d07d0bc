"""The pool survives whatever its function does, and says what that was."""

import os
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

from fp8core.errors import UserError
from fp8core.processes.supervisor import signals_are_confined
from fp8core.rewards.pool import VerifierPool
from fp8core.rewards.scorer import RIGHT, Verdict
from fp8core.rewards.verifier import Answer

# The machine may be busy: time limits are met by what never ends, and by nothing else.
SECONDS, CPU_SECONDS = 8.0, 0.5
SLACK = 4.0

StartPool = Callable[..., VerifierPool]


@pytest.fixture(scope="module")
def pool(start_pool: StartPool, hostile_file: Path) -> VerifierPool:
    return start_pool(f"{hostile_file}:score", cpu_seconds=CPU_SECONDS, timeout_seconds=SECONDS, memory_mb=256)


@pytest.fixture(scope="module")
def impatient(start_pool: StartPool, hostile_file: Path) -> VerifierPool:
    return start_pool(f"{hostile_file}:score", cpu_seconds=60, timeout_seconds=0.5, workers=1)


def ask(pool: VerifierPool, *completions: str) -> list[Verdict]:
    return pool.verify([Answer("?", completion, "18", "stop") for completion in completions])


def test_verdicts_come_in_the_order_of_the_answers(pool: VerifierPool) -> None:
    said = [str(number % 50) for number in range(2000)]
    assert [verdict.outcome == "right" for verdict in ask(pool, *(f"say {number}" for number in said))] == [
        number == "18" for number in said
    ]


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("give True", RIGHT),
        ("give 1", RIGHT),
        ("give 0.25", Verdict(0.25, "wrong", "reward 0.25")),
        ("give 2", Verdict(2.0, "right", "reward 2")),
        ("give -1", Verdict(-1.0, "wrong", "reward -1")),
        ("give None", Verdict(0.0, "unparsed", "no answer found")),
        ("give Verdict(0.5, 'right', 'nearly')", Verdict(0.5, "right", "nearly")),
        ("give Verdict(1, 'fine', '')", "InvalidReply: the verifier returned the outcome 'fine'; there are: "),
        ("give float('nan')", "ValueError: the verifier returned nan; rewards are from -1e+09 to 1e+09"),
        ("give Verdict(float('inf'), 'right', '')", "ValueError: the verifier returned inf; rewards are from"),
        ("give -1.1e9", "ValueError: the verifier returned -1.1e+09; rewards are from"),
        ("give 'yes'", "InvalidReply: the verifier returned str, not a number, None or a Verdict"),
        ("raise it", "ValueError: no good: it"),
        ("raise \ud800", "ValueError: no good: \\ud800"),
        ("raise " + "long " * 100_000, "ValueError: no good: long long"),
        ("allocate", "MemoryError"),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("exit", "its process ended (exit code 3)"),
        ("quit", "SystemExit: 4"),
        ("segfault", "its process ended (SIGSEGV)"),
        ("scribble", "something else was written to the verifier's channel"),
        ("flood", "something else was written to the verifier's channel"),
        ("print", RIGHT),
        ("unheard of", "KeyError: 'do_unheard'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)  # fmt: skip
def test_what_a_function_returns_or_raises(pool: VerifierPool, completion: str, verdict: Verdict | str) -> None:
    said, after = ask(pool, completion, "say 18")
    assert after == RIGHT
    if isinstance(verdict, Verdict):
        assert said == verdict
    else:
        assert (said.score, said.outcome) == (0.0, "crashed")
        assert said.detail.startswith(verdict)
        assert len(said.detail) <= 220
        assert "\n" not in said.detail.encode().decode()


def test_scalars_of_numpy_count(start_pool: StartPool, hostile_file: Path) -> None:
    """Its import alone takes a large part of the processor time that others have here."""
    pool = start_pool(f"{hostile_file}:score", cpu_seconds=60, timeout_seconds=60)
    said = ask(pool, *(f"give __import__('numpy').{scalar}" for scalar in ("bool_(True)", "float32(0.25)")))
    assert said == [RIGHT, Verdict(0.25, "wrong", "reward 0.25")]


@pytest.mark.parametrize("completion", ["spin", "power"])
def test_processor_time_is_bounded_even_in_a_function_of_c(pool: VerifierPool, completion: str) -> None:
    said, after = ask(pool, completion, "say 18")
    assert said == Verdict(0.0, "timeout", "more than 0.5 s of processor time")
    assert after == RIGHT


@pytest.mark.parametrize("completion", ["sleep", "deaf"])
def test_time_is_bounded(impatient: VerifierPool, completion: str) -> None:
    ask(impatient, "say 18")
    begun = time.monotonic()
    (said,) = ask(impatient, completion)
    assert said == Verdict(0.0, "timeout", "no verdict after 0.5 s")
    assert time.monotonic() - begun < 0.5 + SLACK
    assert ask(impatient, "say 18") == [RIGHT]


def test_a_function_that_closes_the_channel_is_ended(impatient: VerifierPool) -> None:
    (said,) = ask(impatient, "close")
    assert said.outcome == "crashed"
    assert ask(impatient, "say 18") == [RIGHT]


def test_what_it_started_ends_with_it(impatient: VerifierPool, tmp_path: Path) -> None:
    assert ask(impatient, f"breed {tmp_path / 'pid'}")[0].outcome == "timeout"
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_copy_that_returns_has_no_verdict(pool: VerifierPool) -> None:
    """It would be that of the next answer."""
    scores = [0.0, 1.0, 2.0, 3.0, 0.5]
    assert [said.score for said in ask(pool, *(f"copy {score}" for score in scores))] == scores


@pytest.mark.parametrize("ending", ["return", "quit", "exit", "sleep"])
def test_a_daemon_ends_with_its_answer(impatient: VerifierPool, tmp_path: Path, ending: str) -> None:
    (said,) = ask(impatient, f"haunt {tmp_path / 'pid'} {ending}")
    assert said.outcome == {"return": "right", "sleep": "timeout"}.get(ending, "crashed")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert ask(impatient, "say 18") == [RIGHT]


def test_a_daemon_ends_with_a_killed_training(hostile_file: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{hostile_file}:score", f"haunt {pid} sleep"], stdout=subprocess.DEVNULL
    )
    wait_for(pid.exists)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until_gone(int(pid.read_text()))


def test_a_process_that_kills_its_parent_does_not_reach_us(impatient: VerifierPool) -> None:
    (said,) = ask(impatient, "orphan")
    assert (said.score, said.outcome) == (0.0, "crashed")
    assert ask(impatient, "say 18") == [RIGHT]


@pytest.mark.skipif(not signals_are_confined(), reason="this kernel confines no signals (Linux before 6.12)")
def test_a_process_cannot_signal_us_by_any_number(impatient: VerifierPool) -> None:
    received = []
    before = signal.signal(signal.SIGURG, lambda number, _: received.append(number))
    try:
        for to in (os.getpid(), -os.getpgrp(), os.getppid()):
            (said,) = ask(impatient, f"signal {signal.SIGURG} {to}")
            assert said.detail.startswith("PermissionError"), to
        # To every process that it may signal, its own group among them.
        assert ask(impatient, f"signal {signal.SIGURG} -1", f"signal {signal.SIGURG} 0") == [RIGHT, RIGHT]
        assert received == []
        os.kill(os.getpid(), signal.SIGURG)
        assert received == [signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kills", [1, 2])
def test_what_something_outside_kills_is_tried_again_once(
    start_pool: StartPool, hostile_file: Path, tmp_path: Path, number: signal.Signals, kills: int
) -> None:
    pool, tries = start_pool(f"{hostile_file}:score", timeout_seconds=60, workers=1), tmp_path / "tries"

    def kill() -> None:
        for done in range(kills):
            wait_for(lambda tried=done + 1: tries.exists() and tries.read_text().count("\n") == tried)
            os.kill(int(tries.read_text().split()[-1]), number)

    killer = threading.Thread(target=kill)
    killer.start()
    said, *others = ask(pool, f"try {tries} {kills} sleep", "say 18", "say 1")
    killer.join()
    assert said.outcome == ("right" if kills == 1 else "crashed")
    assert number.name in said.note
    assert said.record.endswith(said.note)
    assert [other.outcome for other in others] == ["right", "wrong"]
    assert [other.note for other in others] == ["", ""]


@pytest.mark.parametrize("ending", ["sleep", "exit", "segfault", "close", "raise"])
def test_what_a_limit_or_the_function_itself_ends_is_not_tried_again(
    impatient: VerifierPool, tmp_path: Path, ending: str
) -> None:
    (said,) = ask(impatient, f"try {tmp_path / 'tries'} 1 {ending}")
    assert said.outcome == ("timeout" if ending == "sleep" else "crashed")
    assert said.note == ""
    assert (tmp_path / "tries").read_text().count("\n") == 1


def test_those_behind_one_that_hangs_are_checked_by_another(impatient: VerifierPool) -> None:
    outcomes = [verdict.outcome for verdict in ask(impatient, "say 1", "sleep", *(f"say {n}" for n in range(10, 40)))]
    assert outcomes == ["wrong", "timeout", *("right" if n == 18 else "wrong" for n in range(10, 40))]


def test_answers_larger_than_the_channel(pool: VerifierPool) -> None:
    long = "say " + "9" * 3_000_000
    assert [verdict.outcome for verdict in ask(pool, long, "say 18", long + "1", long + "2")] == [
        "wrong", "right", "wrong", "wrong",
    ]  # fmt: skip


def test_what_was_begun_is_checked_once(pool: VerifierPool, tmp_path: Path) -> None:
    answers = [Answer("?", f"note {tmp_path / str(number)}", "18", "stop") for number in range(20)]
    pool.begin(answers[:10])
    pool.begin(answers)
    assert pool.verify([*answers, *answers]) == [RIGHT] * 40
    assert [(tmp_path / str(number)).read_text() for number in range(20)] == ["x"] * 20
    # A verdict is not remembered beyond that.
    assert pool.verify(answers[:1]) == [RIGHT]
    assert (tmp_path / "0").read_text() == "xx"


def test_nothing_is_a_reference_a_function_could_refuse(pool: VerifierPool) -> None:
    assert pool.faults([("?", "18"), ("?", "")]) == [None, None]
    assert pool.verify([]) == []


def test_options_are_keyword_arguments(start_pool: StartPool, hostile_file: Path) -> None:
    scaled = start_pool(f"{hostile_file}:score", options={"scale": 3}, workers=1)
    assert ask(scaled, "say 18") == [Verdict(3.0, "right", "reward 3")]
    assert scaled.describe()["verifier"] == f"{hostile_file}:score"


def test_a_file_finds_its_neighbours_and_a_module_is_looked_for_where_python_looks(
    start_pool: StartPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numbers_of_mine.py").write_text("ANSWER = '18'")
    (tmp_path / "my_verifier.py").write_text(
        "import numbers_of_mine\ndef score(*_): return numbers_of_mine.ANSWER == '18'"
    )
    by_file = start_pool(f"{tmp_path / 'my_verifier.py'}:score", workers=1)
    monkeypatch.syspath_prepend(str(tmp_path))
    by_module = start_pool("my_verifier:score", workers=1)
    assert ask(by_file, "") == ask(by_module, "") == [RIGHT]
    assert by_file.describe()["source"] == by_module.describe()["source"]
    assert "my_verifier" not in sys.modules


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (None, "score", "there_is_none.py cannot be read: No such file"),
        ("import no_such_library", "score", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def score(:", "score", "cannot be imported: SyntaxError"),
        ("1 / 0", "score", "cannot be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit('bye')", "score", "cannot be imported: SystemExit: bye"),
        ("import os; os._exit(7)", "score", "its process ended (exit code 7) before it was ready"),
        ("import os; os._exit(0)", "score", "its process ended (exit code 0) before it was ready"),
        ("import os; [os.write(n, b'hm\\n') for n in range(3, 256) if "
         "'socket:' in os.path.realpath(f'/proc/self/fd/{n}')]", "score", "something else was written"),
        ("score = 3", "score", "has no function score"),
        ("def other(): ...", "score", "has no function score"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_had_is_one_line_at_the_start(
    start_pool: StartPool, tmp_path: Path, source: str | None, function: str, message: str
) -> None:
    path = tmp_path / "there_is_none.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(UserError, match=r"^reward\.verifier=.*there_is_none\.py:score: ") as caught:
        start_pool(f"{path}:{function}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_no_verifier(start_pool: StartPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserError, match=r"pipe\.py is no regular file"):
        start_pool(f"{tmp_path / 'pipe.py'}:score", workers=1)


def test_a_function_that_changes_while_it_is_used(start_pool: StartPool, tmp_path: Path) -> None:
    path = tmp_path / "changing.py"
    path.write_text("import os\ndef score(*_): os._exit(1)")
    pool = start_pool(f"{path}:score", workers=1)
    path.write_text("def score(*_): return True")
    with pytest.raises(UserError, match="it changed while it was used"):
        ask(pool, "one", "two")


def test_closing_ends_the_processes(start_pool: StartPool, hostile_file: Path) -> None:
    before = set(psutil.Process().children())
    pool = start_pool(f"{hostile_file}:score", workers=3)
    started = set(psutil.Process().children()) - before
    assert len(started) == 3
    pool.close()
    pool.close()
    assert not any(process.is_running() for process in started)


PARENT = """
import sys
from fp8core.config.reward import RewardConfig
from fp8core.processes.supervisor import signals_are_confined
from fp8core.rewards.verifier import Answer, build_verifier

pool = build_verifier(RewardConfig(verifier=sys.argv[1], workers=2))
print("ready", flush=True)
pool.verify([Answer("?", sys.argv[2], "18", "stop")])
"""


@pytest.mark.parametrize("completion", ["sleep", "spin"])
def test_the_processes_of_a_killed_parent_end(hostile_file: Path, completion: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{hostile_file}:score", completion], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 4, "two supervisors and their verifiers"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for child in children:
        wait_until_gone(child.pid)


def test_a_process_gets_no_file_of_ours(hostile_file: Path, start_pool: StartPool, tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        before = set(psutil.Process().children())
        start_pool(f"{hostile_file}:score", workers=1)
        (supervisor,) = set(psutil.Process().children()) - before
        for process in (supervisor, *supervisor.children()):
            assert [opened for opened in process.open_files() if opened.path == file.name] == []


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} lives on"
            time.sleep(0.05)
