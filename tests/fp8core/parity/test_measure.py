from dataclasses import replace

import pytest

from fp8core.parity.measure import MemorySample, measure, slope
from fp8core.report.run_data import read_run
from fp8core.report.run_verdict import rollout_speed


def test_a_run_as_the_verdict_takes_it(whole_run):
    run = read_run(whole_run.folder, "whole")
    measured = measure(run, "fp8-end-to-end-kv", 0, 2)
    assert (measured.steps, measured.whole, measured.idle) == ((4, 4), True, ())
    assert measured.errors == measured.ess == measured.weights == (1.0,) * 4
    assert measured.ratios == pytest.approx((1.0,) * 4)
    assert measured.k3 == (0.0,) * 4
    held = [row["reward/heldout_accuracy"] for row in run.history if "reward/heldout_accuracy" in row]
    assert measured.accuracy == sum(held[-2:]) / 2
    assert measured.speed == rollout_speed(run) > 0
    assert measured.slope is None


def test_a_geometric_mean_of_ratios_is_no_weight_of_updates(whole_run):
    run = read_run(whole_run.folder, "whole")
    assert run.view.config is not None
    loss = run.view.config.loss.model_copy(update={"policy": "gspo"})
    by_row = replace(run, view=replace(run.view, config=run.view.config.model_copy(update={"loss": loss})))
    assert measure(by_row, "fp8-end-to-end-kv", 0, 2).ratios is None


def test_a_run_that_was_cut_is_not_whole(run_copy):
    run_copy.cut_after(3, "train")
    measured = measure(read_run(run_copy.folder, "cut"), "fp8-end-to-end-kv", 0, 2)
    assert (measured.steps, measured.whole) == ((2, 4), False)


def test_a_slope_needs_twenty_steps_and_does_not_bend_to_a_jump():
    line = [(float(x), 3.0 * x + 5) for x in range(20)]
    assert slope(line) == pytest.approx(3.0)
    assert slope([*line[:-1], (19.0, 500.0)]) == pytest.approx(3.0)
    assert slope(line[1:]) is None


def test_memory_is_that_of_the_second_half_and_of_the_last_process(whole_run):
    run = read_run(whole_run.folder, "whole")
    last = run.view.steps[4]
    begun = last.entry.committed_ms / 1000
    commits = [
        replace(last, entry=last.entry.model_copy(update={"step": step, "committed_ms": int(1000 * (begun + step))}))
        for step in range(1, 61)
    ]
    longer = replace(run, view=replace(run.view, commits=commits), history=[])
    # The first half grows faster, in another process.
    memory = [
        MemorySample(begun + step - 0.1, 1, 900.0 * step)
        if step <= 30
        else MemorySample(begun + step - 0.1, 2, 4.0 * step)
        for step in range(1, 61)
    ]
    assert measure(longer, "bf16", 0, 1, memory).slope == pytest.approx(4.0)
    # Fewer than twenty steps of the process that made the last one.
    late = [replace(sample, process=1 if sample.time < begun + 45 else 2) for sample in memory]
    assert measure(longer, "bf16", 0, 1, late).slope is None
