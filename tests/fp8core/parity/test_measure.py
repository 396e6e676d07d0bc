import pytest

from fp8core.parity.measure import measure
from fp8core.report.run_data import read_run
from fp8core.report.run_verdict import rollout_speed


def test_a_run_as_the_verdict_takes_it(whole_run):
    run = read_run(whole_run.folder, "whole")
    measured = measure(run, "fp8-end-to-end-kv", 0, 2)
    assert (measured.steps, measured.whole) == ((4, 4), True)
    assert measured.errors == measured.ess == measured.weights == (1.0,) * 4
    assert measured.ratios == pytest.approx((1.0,) * 4)
    assert measured.k3 == (0.0,) * 4
    held = [row["reward/heldout_accuracy"] for row in run.history if "reward/heldout_accuracy" in row]
    assert measured.accuracy == sum(held[-2:]) / 2
    assert measured.speed == rollout_speed(run) > 0


def test_a_run_that_was_cut_is_not_whole(run_copy):
    run_copy.cut_after(3, "train")
    measured = measure(read_run(run_copy.folder, "cut"), "fp8-end-to-end-kv", 0, 2)
    assert (measured.steps, measured.whole) == ((2, 4), False)
