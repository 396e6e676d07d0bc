import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8core.report.summary import Overhead, StepTiming, overhead_ms, summarise, union_seconds
from fp8core.store.metrics import series, start_metrics

ticks = st.integers(0, 60)
intervals = st.lists(st.tuples(ticks, ticks).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=8)


def covered_ticks(spans: list[tuple[float, float]], start: float = 0.0, end: float = 60.0) -> int:
    return sum(any(a <= tick and tick + 1 <= b for a, b in spans) for tick in range(int(start), int(end)))


@given(intervals)
def test_a_union_is_the_count_of_covered_ticks_in_any_order(spans: list[tuple[float, float]]) -> None:
    assert union_seconds(spans) == covered_ticks(spans)
    assert union_seconds(reversed(spans)) == union_seconds(spans)


@given(intervals, ticks, ticks)
def test_overhead_is_the_uncovered_part_of_the_step(spans: list[tuple[float, float]], a: int, b: int) -> None:
    start, end = float(min(a, b)), float(max(a, b))
    assert overhead_ms((start, end), spans) == 1000 * (end - start - covered_ticks(spans, start, end))


def test_overlapping_tasks_count_once_and_work_outside_the_step_not_at_all() -> None:
    tasks = [(0.25, 0.75), (0.5, 1.0), (-5.0, 0.125), (2.0, 9.0), (1.5, 3.0)]
    assert overhead_ms((0.0, 2.0), tasks) == 1000 * (0.125 + 0.5)


def test_an_interval_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(AssertionError, match="ends before it starts"):
        union_seconds([(1.0, 0.5)])


def test_a_series_skips_steps_at_which_nothing_was_measured() -> None:
    history = [{"step": 0, "b": 5.0}, {"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": 3.0}]
    assert series(history, "a") == ([1, 3], [1.0, 3.0])


def test_a_summary_has_the_fields_of_the_json_file() -> None:
    gap = {"nats": 0.125, "k3": 0.01, "error": 1.2, "accuracy": {"value": 0.5}, "bf16_accuracy": {"value": 0.75}}
    gap |= {"difference": {"value": -0.25, "low": -0.5, "high": 0.125}, "prompts": 32}
    history = [{"step": 0, "reward/heldout_accuracy": 0.4, **start_metrics("precision_gap", gap)}]
    for step in range(1, 31):
        history.append(
            {"step": step, "reward/mean": step / 30, "alignment/token_mult_prob_error": 1.0 + (step == 7) / 128}
            | {"alignment/tokens_differing": float(step == 7) * 3}
        )
    history[20]["reward/heldout_accuracy"] = 0.9
    for step, share in ((3, 0.0), (4, 0.5), (5, 0.0)):
        history[step]["reward/groups_with_signal"] = share
    timings = [
        StepTiming(step=step, interval=(0, 1), tasks={"train": [(0, share)]})
        for step, share in ((1, 0.5), (2, 0.75), (3, 1.0))
    ]
    summary = summarise(
        history,
        timings,
        run="tiny-1",
        mlflow_run_id="abc",
        chain_head="30:e",
        weights_digest="def",
        total_seconds=9.0,
        task_seconds={"warm_start": 4.0, "train": 2.25},
        bounds="exact contract, fails if tmpe > 1",
        bounds_crossed=0,
    )
    assert summary.steps == 30
    assert math.isclose(summary.reward_first10, 5.5 / 30)
    assert math.isclose(summary.reward_last10, 25.5 / 30)
    assert (summary.heldout_first, summary.heldout_last) == (0.4, 0.9)
    assert (summary.tmpe_max, summary.tokens_differing) == (1.0 + 1 / 128, 3)
    assert summary.overhead_ms_per_step == Overhead(median=250.0, mean=250.0)
    assert json.loads(summary.model_dump_json()) == {
        "run": "tiny-1",
        "mlflow_run_id": "abc",
        "chain_head": "30:e",
        "weights_digest": "def",
        "steps": 30,
        "reward_first10": summary.reward_first10,
        "reward_last10": summary.reward_last10,
        "reward_edge_steps": 10,
        "heldout_first": 0.4,
        "heldout_last": 0.9,
        "tmpe_max": 1.0078125,
        "tokens_differing": 3,
        "tokens_compared": 0,
        "tokens_compared_share": 1.0,
        "steps_without_signal": 2,
        "diagnosis": None,
        "precision_gap": {
            "nats": 0.125,
            "accuracy": 0.5,
            "bf16_accuracy": 0.75,
            "difference": -0.25,
            "difference_low": -0.5,
            "difference_high": 0.125,
            "prompts": 32,
            # Of a run of an earlier version.
            "kl": None,
            "same_choice": None,
            "answer_shift": None,
        },
        "bounds": "exact contract, fails if tmpe > 1",
        "bounds_crossed": 0,
        "overhead_ms_per_step": {"median": 250.0, "mean": 250.0},
        "seconds": {"warm_start": 4.0, "train": 2.25, "total": 9.0},
    }


def test_a_run_without_a_step_has_no_numbers() -> None:
    names = {"run": "r", "mlflow_run_id": "m", "chain_head": "0:e", "weights_digest": "w", "bounds": "none"}
    summary = summarise([], [], **names, total_seconds=0.0, task_seconds={}, bounds_crossed=0)
    assert (summary.steps, summary.reward_first10, summary.tmpe_max, summary.overhead_ms_per_step) == (
        0,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(("steps", "edge"), [(0, 0), (1, 1), (4, 2), (5, 2), (20, 10), (80, 10)])
def test_a_summary_says_of_how_many_steps_its_rewards_are_means(steps: int, edge: int) -> None:
    names = {"run": "r", "mlflow_run_id": "m", "chain_head": "0:e", "weights_digest": "w", "bounds": "none"}
    history = [{"step": step, "reward/mean": float(step)} for step in range(1, steps + 1)]
    summary = summarise(history, [], **names, total_seconds=0.0, task_seconds={}, bounds_crossed=0)
    assert summary.reward_edge_steps == edge
    assert summary.reward_first10 == (sum(range(1, edge + 1)) / edge if edge else None)
