"""Speed of environments in episodes and steps a second, with a process of its own for each episode.

    python -m benchmarks.environment_speed

Writes benchmarks/results/environment_speed.json and prints a table. It takes half a minute on two cores.

- Single turn: episodes of the calculator that begin, answer at once and end, `AT_ONCE` of them open at a time. Almost
  all of it is the start and the end of their two processes. The median of three.
- Open: `OPEN` episodes of the calculator are begun, and then every one makes a call in each of `ROUNDS` rounds.
- Python: the first call of an episode, which starts an interpreter, and those that follow; one at a time.
- Memory: what the host and all processes of the open episodes take for themselves (their unique pages).
"""

import time
from statistics import median

import psutil

from benchmarks.harness import RESULTS, Row, provenance, table, write_rows
from fp8core.environments.pool import EnvironmentPool, EpisodeLimits
from fp8core.environments.protocol import Action, Outcome, Task, ToolCall, Turn

AT_ONCE, EPISODES, REPEATS = 32, 200, 3
OPEN, ROUNDS = 500, 10
CALLS = 50
TASK = Task("How many are 12*7+5?", "89", 1)
CALL = Action("[12*7+5]", (ToolCall("calculate", {"expression": "12*7+5"}),))
CODE = Action("", (ToolCall("python", {"code": "sum(range(100))"}),))


def main() -> None:
    rows: list[Row] = [
        {"kind": "environment_speed", "case": "single turn", **single_turn()},
        {"kind": "environment_speed", "case": "open at once", **open_at_once()},
        {"kind": "environment_speed", "case": "python", **python_calls()},
    ]
    rows = [{**row, **provenance()} for row in rows]
    write_rows(RESULTS / "environment_speed.json", rows)
    print(speed_table(rows))


def single_turn() -> Row:
    """Episodes a second."""
    pool = EnvironmentPool("calculator", {}, EpisodeLimits(), AT_ONCE)
    try:
        seconds = median(play(pool, EPISODES) for _ in range(REPEATS))
    finally:
        pool.close()
    return {"episodes": EPISODES, "at_once": AT_ONCE, "episodes_a_second": EPISODES / seconds}


def play(pool: EnvironmentPool, count: int) -> float:
    """Seconds of so many episodes without a call."""
    began = time.perf_counter()
    for sample in range(count):
        pool.begin((0, sample), TASK)
    left = count
    while left:
        for key, reply, _ in pool.replies(wait=True):
            if isinstance(reply, Turn):
                pool.act(key, Action("89"))
            else:
                assert reply == Outcome("judge")
                left -= 1
    return time.perf_counter() - began


def open_at_once() -> Row:
    """Episodes begun a second, steps a second with all of them open, and their memory."""
    pool = EnvironmentPool("calculator", {}, EpisodeLimits(), OPEN)
    try:
        began = time.perf_counter()
        for sample in range(OPEN):
            pool.begin((0, sample), TASK)
        turns(pool)
        opened = time.perf_counter()
        for _ in range(ROUNDS):
            for sample in range(OPEN):
                pool.act((0, sample), CALL)
            turns(pool)
        stepped = time.perf_counter()
        host, *episodes = (process.memory_full_info().uss for process in below())
    finally:
        pool.close()
    return {
        "open": OPEN,
        "begun_a_second": OPEN / (opened - began),
        "steps_a_second": OPEN * ROUNDS / (stepped - opened),
        "host_mib": host / 2**20,
        "mib_an_episode": sum(episodes) / OPEN / 2**20,
    }


def turns(pool: EnvironmentPool) -> None:
    """Wait until all that are open have answered."""
    left = OPEN
    while left:
        replies = pool.replies(wait=True)
        assert all(isinstance(reply, Turn) for _, reply, _ in replies)
        left -= len(replies)


def below() -> list[psutil.Process]:
    """The host, and the processes of its episodes."""
    (supervisor,) = psutil.Process().children()
    (host,) = supervisor.children()
    return [host, *host.children(recursive=True)]


def python_calls() -> Row:
    """Seconds of the first call of an episode, and of a later one."""
    pool = EnvironmentPool("python", {}, EpisodeLimits(), 1)
    first, later = [], []
    try:
        for sample in range(CALLS // 5):
            pool.begin((0, sample), TASK)
            pool.replies(wait=True)
            for call in range(5):
                pool.act((0, sample), CODE)
                ((_, _, seconds),) = pool.replies(wait=True)
                (later if call else first).append(seconds)
            pool.end((0, sample))
    finally:
        pool.close()
    return {"calls": CALLS, "first_call_seconds": median(first), "later_call_seconds": median(later)}


def speed_table(rows: list[Row]) -> str:
    """What was measured, a line each."""
    single, opened, python = rows
    return table(
        ["measure", "value"],
        [
            ["episodes of one turn a second", f"{single['episodes_a_second']:,.0f}"],
            [f"begun a second, until {opened['open']} are open", f"{opened['begun_a_second']:,.0f}"],
            [f"steps a second, {opened['open']} open", f"{opened['steps_a_second']:,.0f}"],
            ["MiB of the host", f"{opened['host_mib']:.1f}"],
            ["MiB an episode", f"{opened['mib_an_episode']:.2f}"],
            ["ms of the first call of Python", f"{1e3 * python['first_call_seconds']:.1f}"],
            ["ms of a later one", f"{1e3 * python['later_call_seconds']:.2f}"],
        ],
    )


if __name__ == "__main__":
    main()
