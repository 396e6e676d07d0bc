import math
from dataclasses import replace

import numpy as np
import pytest

from fp8core.report.chart import Chart, Series, collapsed
from fp8core.report.run_data import read_run
from fp8core.report.tokens import TokenSample
from fp8core.report.training_charts import (
    ALIGNMENT,
    LEARNING,
    OTHERS,
    curve_chart,
    difference_by_position,
    difference_histogram,
    logprob_scatter,
    pipeline_graph,
    scale_heatmaps,
    time_stacks,
    token_charts,
)


def sample(differences, rollout=-1.0) -> TokenSample:
    d = np.asarray(differences, dtype=np.float64)
    base = np.full(len(d), rollout)
    return TokenSample((3,), base, base + d, np.arange(len(d)))


def test_a_curve_has_the_steps_at_which_its_metric_was_measured() -> None:
    history = [{"step": 0, "reward/heldout_accuracy": 0.5}, {"step": 1, "reward/mean": 0.25}]
    chart = curve_chart(LEARNING[0], [("a", history), ("b", [])])
    assert [(list(one.x), list(one.y), one.style) for one in chart.series] == [([1], [0.25], 0), ([], [], 1)]


def test_exact_equality_is_drawn_as_zero() -> None:
    history = [{"step": 1, "alignment/token_mult_prob_error": 1.0, "alignment/ess": 0.75}]
    assert [list(curve_chart(curve, [("a", history)]).series[0].y) for curve in (ALIGNMENT[0], ALIGNMENT[2])] == [
        [0.0],
        [0.25],
    ]


def test_the_histogram_holds_nearly_all_tokens_and_says_the_rest() -> None:
    d = np.concatenate([np.zeros(5000), np.linspace(-0.01, 0.01, 4999), [3.0]])
    chart = difference_histogram([("exact", sample([0.0] * 10)), ("gone", None), ("mixed", sample(d))])
    exact, mixed = chart.series
    assert (exact.style, mixed.style) == (0, 2)
    assert max(exact.y) == sum(exact.y) == 1.0
    assert sum(mixed.y) == pytest.approx(1.0, abs=2e-3)
    assert max(mixed.x) < 0.011
    assert "exact: 10 tokens of step 3, 100.0% exactly 0" in chart.note
    assert "50.0% exactly 0" in chart.note


def test_without_tokens_there_are_empty_charts() -> None:
    for draw in (difference_histogram, logprob_scatter, difference_by_position):
        assert list(draw([("a", None)]).series) == []


def test_the_scatter_shows_the_tokens_that_differ_most() -> None:
    d = np.zeros(50_000)
    d[12_345] = 2.0
    series = logprob_scatter([("a", sample(d, -3.0))]).series
    assert (-3.0, -1.0) in zip(series[0].x, series[0].y, strict=True)
    assert len(series[0].x) <= 1400
    assert series[1].label == "equal"


@pytest.mark.parametrize("count", [1, 31, 32, 33, 34, 40, 5000])
def test_every_position_is_in_one_bin(count: int) -> None:
    chart = difference_by_position([("a", sample(np.full(count, 0.5)))])
    (series,) = chart.series
    assert set(series.y) == {0.5}
    assert series.x[0] == 0
    assert len(series.x) == count if count <= 33 else 33 < len(series.x) <= 66


def test_scales_are_those_of_the_steps(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    (heatmap,) = scale_heatmaps([run])
    stored = [whole_run.store.get_json(whole_run.ledger.artifacts(i)["next_scales"])["layers"] for i in range(1, 5)]
    for kind, name in (("q", "queries"), ("k", "keys"), ("v", "values")):
        assert heatmap.panels[name] == [[layers[i][kind] for layers in stored] for i in range(2)]


def test_a_stack_holds_all_the_time_and_joins_what_is_small(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    (stack,) = time_stacks([run])
    for i, step in enumerate(stack.x):
        total = sum(task.seconds for task in whole_run.ledger.tasks(int(step)).values())
        assert sum(values[i] for values in stack.layers.values()) == pytest.approx(total)
    assert (OTHERS in stack.layers) == (OTHERS in stack.note)


def test_runs_side_by_side_have_equal_axes_and_a_task_has_one_colour(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    train, sync = run.seconds["train"], {step: 9.0 for step in range(1, 9)}
    scaled = [{**row, "step": row["step"] + 4, "kv/scale_q_layer0": 64.0} for row in run.history]
    other = replace(run, history=scaled, seconds={"own": sync, "sync": sync, "train": train})
    alone, stacks, maps = time_stacks([run])[0], time_stacks([run, other]), scale_heatmaps([run, other])
    assert [stack.last_x for stack in stacks] == [8, 8]
    assert [stack.tallest for stack in stacks] == [max(18 + (train.get(step, 0)) for step in sync)] * 2
    assert stacks[0].styles == stacks[1].styles
    assert alone.styles["train"] == stacks[1].styles["train"]
    assert len({*stacks[1].styles.values()}) == len(stacks[1].styles)
    assert {one.last_x for one in maps} == {8}
    assert maps[0].also == maps[1].also
    assert 64.0 in maps[0].also


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        (([0.0, 0.0], [0.0]), False),
        (([0.7, 0.7],), False),
        (([], [math.nan]), False),
        (([0.0, 1e-9],), True),
        (([1.0, 1.0], [0.0, 0.0]), True),
    ],
)
def test_a_chart_with_one_value_is_told_and_not_drawn(values, drawn: bool) -> None:
    chart = Chart("Gap", "step", "nats", [Series(f"run {i}", range(len(y)), y, i) for i, y in enumerate(values)])
    charts, told = collapsed([chart])
    assert (charts == [chart]) == drawn
    assert any("Gap" in sentence for sentence in told) != drawn


def test_tokens_that_are_all_equal_are_told_and_one_that_differs_is_drawn() -> None:
    equal, other = sample([0.0, 0.0]), sample([0.0, 1e-7])
    charts, told = token_charts([("one", equal), ("two", equal)])
    assert (charts, len(told)) == ([], 2)
    assert token_charts([("one", equal), ("two", other)])[0]


def test_the_graph_is_that_of_the_pipeline(whole_run) -> None:
    graph = pipeline_graph(read_run(whole_run.folder, "whole"))
    columns = {node.name: node.column for node in graph.nodes}
    assert columns["reward"] == columns["logprobs"] == 2
    assert columns["record"] == max(columns.values())
    assert ("rollout", "reward", "rollouts") in graph.edges
    assert sum(node.weight for node in graph.nodes) == pytest.approx(1.0)
