import gc
import json
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import contextmanager

import psutil
import pytest

from benchmarks import vllm_hopper
from benchmarks import vllm_hopper_cases as cases
from benchmarks.vllm_hopper_cases import (
    by_quarter,
    garbage_collections,
    processor_shares,
    repeated,
    timed,
)
from fp8core.models.architecture import Architecture
from fp8core.rollout.engine import Completion
from fp8core.rollout.vllm.requirements import VllmBuild, aligned_refusals, aligned_shape_refusals


def _completion(tokens, logprobs):
    return Completion(0, 0, tokens, logprobs, "length")


def test_log_probs_are_compared_up_to_the_first_other_token():
    alone = _completion([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])
    row = cases.compared(alone, _completion([5, 6, 9, 8], [-1.0, -2.5, -9.0, -9.0]), "beside others", True)
    assert (row["tokens"], row["equal_tokens"], row["equal_logprobs"]) == (4, 2, 1)
    assert row["largest_difference"] == 0.5
    equal = cases.compared(alone, alone, "alone", False)
    assert (equal["equal_tokens"], equal["equal_logprobs"], equal["largest_difference"]) == (4, 4, 0.0)


def test_every_mode_of_exactness_is_measured_with_settings_that_fit(monkeypatch):
    asked = []
    monkeypatch.setattr(vllm_hopper, "_exactness", lambda rows, contract, settings: asked.append((contract, settings)))
    for measure in (vllm_hopper.exactness, vllm_hopper.exactness_invariant, vllm_hopper.exactness_aligned):
        measure(Namespace(), [])
    assert [(s.model, s.batch_invariant) for _, s in asked] == [("stock", False), ("stock", True), ("aligned", False)]
    assert not [*aligned_refusals(*asked[2], VllmBuild("vllm", "0.26.0", "cuda"))]
    assert not [*aligned_shape_refusals(Architecture(**cases._SMALL))]


def test_an_earlier_result_is_not_taken_for_that_of_a_measurement_that_was_ended(tmp_path):
    result = tmp_path / "unknown.json"
    result.write_text('[{"kind": "earlier"}]')
    started = vllm_hopper._start("unknown", Namespace(out=tmp_path, layers=2))
    started[-1].kill()
    vllm_hopper._finish([started], deadline=time.monotonic() + 60)
    (row,) = json.loads(result.read_text())
    assert (row["kind"], row["error"]) == ("error", "ended with -9")


def test_the_row_is_of_the_middle_run_and_has_all_of_them():
    speeds = {1: 100.0, 2: 300.0, 3: 200.0}

    def run(seed):
        return {
            "seed": seed,
            "tokens_per_s": speeds[seed],
            "seconds": 0.1 * seed,
            "step_ms": [],
            "collections": {},
            "processors": [seed],
        }

    rows = list(repeated(run, 3))
    assert [row["seed"] for row in rows] == [1, 1, 3], "the slower one of two"
    assert rows[-1]["all_tokens_per_s"] == [100.0, 300.0, 200.0]
    assert rows[-1]["runs"][1] == {
        "tokens_per_s": 300.0,
        "seconds": 0.2,
        "step_ms": [],
        "collections": {},
        "processors": [2],
    }
    assert [len(row["runs"]) for row in rows] == [row["repeats"] for row in rows] == [1, 2, 3]


def test_a_stall_is_the_largest_of_its_quarter_alone():
    seconds = [0.01] * 400
    seconds[250] = 2.0
    quarters = by_quarter(seconds)
    assert [quarter["median"] for quarter in quarters] == [10.0] * 4
    assert [quarter["max"] for quarter in quarters] == [10.0, 10.0, 2000.0, 10.0]
    assert quarters[2]["p99"] == 2000.0


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
