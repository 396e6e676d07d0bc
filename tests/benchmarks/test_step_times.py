"""Times between steps: what each quarter says of a stall and of a rollout that slows down."""

import gc
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from benchmarks.step_times import by_quarter, garbage_collections, processor_shares, timed


def test_a_stall_is_the_largest_of_its_quarter_alone():
    seconds = [0.01] * 400
    seconds[250] = 2.0
    quarters = by_quarter(seconds)
    assert [quarter["median"] for quarter in quarters] == [10.0] * 4
    assert [quarter["max"] for quarter in quarters] == [10.0, 10.0, 2000.0, 10.0]
    assert quarters[2]["p99"] == 2000.0


def test_a_rollout_that_slows_down_has_growing_medians():
    medians = [quarter["median"] for quarter in by_quarter([i / 1000 for i in range(100)])]
    assert medians == [12.0, 37.0, 62.0, 87.0]


def test_fewer_steps_than_quarters():
    assert by_quarter([0.5]) == [{"median": 500.0, "p99": 500.0, "max": 500.0}]
    assert by_quarter([]) == []


def test_steps_are_timed_as_they_come():
    def steps():
        yield []
        time.sleep(0.05)
        yield ["a", "b"]

    found, seconds = timed(steps())
    assert found == ["a", "b"]
    assert seconds[0] < 0.05 <= seconds[1]


def test_what_the_garbage_collector_took():
    alive = [[] for _ in range(200_000)]
    with garbage_collections() as collected:
        gc.collect()
    found = collected()
    assert found["count"] >= 1
    assert found["frozen"] == 0
    assert 0 < found["max"] <= found["all"]
    gc.collect()
    assert collected() == found, "it listens inside its block alone"
    assert len(alive) == 200_000


SPINS = "end = time.time() + 60\nwhile time.time() < end: pass"


@contextmanager
def child_that(does):
    """A Python process that has said that it runs."""
    program = f"import threading, time\nprint(1, flush=True)\n{does}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"1\n"
        try:
            yield child
        finally:
            child.kill()


def processor_seconds(child):
    return sum(psutil.Process(child.pid).cpu_times()[:2])


def test_who_was_busy():
    with child_that(SPINS) as child, processor_shares() as shares:
        began, used_before = time.perf_counter(), processor_seconds(child)
        while (used := processor_seconds(child) - used_before) < 1.0:
            time.sleep(0.1)
        expected = used / (time.perf_counter() - began)
    busy, *others = shares()
    assert busy["threads"] == [busy["all"]]
    assert busy["all"] == pytest.approx(expected, rel=0.25)
    driver = next(row for row in others if row["process"] == "driver")
    assert driver["all"] < 0.2


def test_threads_that_share_a_lock_are_told_apart_from_one_that_is_busy():
    spins_in_threads = f"def spin():\n  {SPINS.replace(chr(10), chr(10) + '  ')}\n"
    spins_in_threads += "for _ in range(4): threading.Thread(target=spin, daemon=True).start()\ntime.sleep(60)"
    with child_that(spins_in_threads), processor_shares() as shares:
        time.sleep(1.5)
    busy = shares()[0]
    assert len(busy["threads"]) == 3, "of its five"
    assert busy["threads"] == sorted(busy["threads"], reverse=True)
    assert 0 < busy["threads"][2] <= busy["threads"][0] < 0.7 * busy["all"]


def test_a_process_that_ends_inside_the_block_is_left_out():
    with child_that("time.sleep(60)") as child, processor_shares() as shares:
        child.kill()
        child.wait()
    assert "driver" in [row["process"] for row in shares()]
