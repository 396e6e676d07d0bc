"""The verdict over tasks and seeds together: a real gap is found, none is not, and one bad task shows by task."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_accuracy import ALL, FP8, REDRAWN, TrainedCurve, accuracy_tables, draw_gaps, gap_rows, outcome
from fp8core.parity.measure import BASELINE, LearningCurve
from fp8core.parity.verdict import FAIL, NOT_ENOUGH, PASS

TASKS, SEEDS, PROMPTS, STEPS = ("operations", "sums", "units"), (0, 1, 2), 1024, (0, 100, 200, 300)
PAIRS = len(TASKS) * len(SEEDS)
NAMES = tuple(f"{prompt:04}" for prompt in range(PROMPTS))


def trained(gaps, seed=0):
    """Curves of all trainings: a task has hard prompts, a training is a little better or worse, FP8 has gaps."""
    draw, found = np.random.default_rng(seed), []
    for task in TASKS:
        hardness = draw.normal(size=PROMPTS)
        for of_seed, variant in itertools.product(SEEDS, (BASELINE, REDRAWN, FP8)):
            lost = gaps.get(task, 0.0) if variant == FP8 else 0.0
            learned = np.array([0.4, 0.7, 0.9, 0.92]) - lost + 0.003 * draw.normal()
            noise = hardness + 0.3 * draw.normal(size=PROMPTS)
            right = noise.argsort().argsort() < (PROMPTS * learned)[:, None]
            found.append(TrainedCurve(task, variant, of_seed, LearningCurve(STEPS, NAMES, right.astype(float))))
    return found


def rows_of(curves):
    return gap_rows(curves, PAIRS, last=2, confidence=0.95)


def outcomes(rows):
    return {row["window"]: row["outcome"] for row in rows if (row["variant"], row["task"]) == (FP8, ALL)}


def test_no_gap_passes_and_a_real_one_fails_at_the_end_and_over_the_curve():
    assert outcomes(rows_of(trained({}))) == {"end": PASS, "curve": PASS}
    assert outcomes(rows_of(trained(dict.fromkeys(TASKS, 0.03)))) == {"end": FAIL, "curve": FAIL}


def test_one_bad_task_shows_by_task_and_widens_the_interval_of_all():
    rows = rows_of(trained({"units": 0.06}))
    means = {row["task"]: row["mean"] for row in rows if row["variant"] == FP8 and row["window"] == "end"}
    assert means["units"] == pytest.approx(-0.06, abs=0.01)
    assert abs(means["sums"]) < 0.01
    assert means[ALL] == pytest.approx(-0.02, abs=0.01)
    assert outcomes(rows) == {"end": FAIL, "curve": FAIL}
    width = {row["task"]: row["high"] - row["low"] for row in rows_of(trained(dict.fromkeys(TASKS, 0.02)))}
    assert {row["task"]: row["high"] - row["low"] for row in rows}[ALL] > 2 * width[ALL]


@pytest.mark.parametrize(
    ("mean", "low", "high", "expected"),
    [
        (-0.01, -0.02, 0.0, PASS),
        (-0.011, -0.012, -0.01, FAIL),
        (-0.005, -0.021, 0.011, NOT_ENOUGH),
        (0.01, -0.001, 0.021, NOT_ENOUGH),
    ],
)
def test_the_mean_and_both_ends_of_the_interval_are_bounded(mean, low, high, expected):
    assert outcome({"mean": mean, "low": low, "high": high, "pairs": PAIRS}, PAIRS) == expected


def test_pairs_need_both_trainings_at_the_same_steps_and_a_missing_one_leaves_the_verdict_open():
    curves = trained({})
    short = LearningCurve(STEPS[:3], NAMES, curves[-1].curve.scores[:3])
    rows = rows_of([*curves[:-1], curves[-1]._replace(curve=short)])
    assert {row["pairs"] for row in rows if row["task"] == ALL and row["variant"] == FP8} == {PAIRS - 1}
    assert outcomes(rows) == {"end": NOT_ENOUGH, "curve": NOT_ENOUGH}
    assert rows_of([each for each in curves if each.variant == FP8]) == []


def test_an_interval_covers_the_mean_of_new_seeds_and_prompts():
    """Of 100 repetitions without a gap about 95 % of the intervals hold zero: never far fewer."""
    held = 0
    for seed in range(100):
        of_all = [row for row in rows_of(trained_by_chance(seed)) if row["task"] == ALL and row["window"] == "end"]
        held += all(row["low"] <= 0 <= row["high"] for row in of_all)
    assert held >= 90


def trained_by_chance(seed):
    """Trainings of few prompts that differ by prompt and by seed, without a gap in the mean of many."""
    draw, prompts = np.random.default_rng(seed), tuple(NAMES[:32])
    found = []
    for task in TASKS:
        shift = 0.2 * draw.normal(size=32)
        for of_seed in SEEDS:
            base = draw.random((2, 32))
            moved = base + shift + 0.05 * draw.normal() + 0.1 * draw.normal(size=32)
            for variant, scores in ((BASELINE, base), (FP8, moved)):
                found.append(TrainedCurve(task, variant, of_seed, LearningCurve((0, 1), prompts, scores)))
    return found


def test_tables_and_picture_show_every_task_and_both_variants(tmp_path: Path):
    rows = rows_of(trained({"units": 0.06}))
    for each in trained({"units": 0.06}):
        first, *_, last = each.curve.accuracies
        about = {"task": each.task, "variant": each.variant, "seed": each.seed, "tmpe_max": 1.0}
        rows.append({"kind": "alignment", **about, "heldout_first": first, "heldout_last": last})
    verdict, by_task = accuracy_tables(rows)
    assert "mean >= -1.0, interval within 2 | FAIL |" in verdict
    assert verdict.count("the size of a draw") == 2
    assert "| units | FP8 everywhere | 3 | 0.34" in by_task
    assert by_task.count("| 3 |") == len(TASKS) * 3
    draw_gaps(rows, tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
