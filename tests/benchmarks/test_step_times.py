"""Times between steps: what each quarter says of a stall and of a rollout that slows down."""

import subprocess
import sys
import time

from benchmarks.step_times import by_quarter, processor_shares, timed


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


def test_who_was_busy():
    spins = "import time\nprint(1, flush=True)\nend = time.time() + 60\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spins], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"1\n"
        with processor_shares() as shares:
            time.sleep(1.0)
        child.kill()
    busy, *others = shares()
    assert busy["busiest"] > 0.3
    assert busy["all"] >= busy["busiest"]
    driver = next(row for row in others if row["process"] == "driver")
    assert driver["all"] < 0.2
