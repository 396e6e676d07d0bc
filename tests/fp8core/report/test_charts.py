"""What charts hold, and that each becomes a figure of a page and a picture."""

import json
import math

import pytest

from fp8core.report.chart import Bound, Chart, Collapse, Series, curve_chart, section_metrics, split_constant
from fp8core.report.drawing import draw_png
from fp8core.report.pages import chart_figure

NAN, INF = math.nan, math.inf


def chart(*series: Series, **options) -> Chart:
    return Chart("Reward", "step", "mean reward", series, **options)


def line(y) -> Series:
    return Series("run", range(len(y)), y, 0)


@pytest.mark.parametrize("y", [[], [NAN, 1.0, INF], [-3.0, 0.0], [1e-100, 1e100]])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_degenerate_data_are_drawn(y, scale, tmp_path) -> None:
    marks = {"bounds": [Bound("limit", 0.1), Bound("none", 0.0)], "collapses": [Collapse("collapse", 1)]}
    drawn = chart(line(y), y_scale=scale, include=(0.0, 1.0), **marks)
    content = json.loads(chart_figure(drawn).json)
    assert all(value is not None and math.isfinite(value) for value in content["data"][0]["y"])
    draw_png([drawn], tmp_path / "a.png", "two $ runs")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_shows_every_value_and_zero_has_a_lane_on_a_log_axis() -> None:
    y = [0.0, 1e-3, 0.25]
    plot = chart_figure(chart(line(y), y_scale="log", bounds=[Bound("stop: 0.1", 0.1)])).plot
    assert list(plot.data[0].customdata) == ["0", "0.001", "0.25"]
    lane, lowest, *_ = plot.layout.yaxis.tickvals
    assert plot.layout.yaxis.ticktext[0] == "0"
    assert list(plot.data[0].y) == [lane, *y[1:]]
    assert lane < lowest <= 1e-3
    assert plot.layout.annotations[0].text == "stop: 0.1"
    assert plot.layout.shapes[0].y0 == 0.1


def test_texts_of_others_are_no_markup_of_plotly_and_end_no_script() -> None:
    hostile = "</script><b>\x1b[2J\u202e & https://me:secret@host"
    content = str(chart_figure(chart(Series(hostile, [1], [1], 0), bounds=[Bound(hostile, 1.0)])).json)
    assert not {"<", ">", "\x1b", "\u202e"} & set(content)
    assert "secret" not in content
    (trace,) = json.loads(content)["data"]
    assert trace["name"].startswith("&lt;/script&gt;&lt;b&gt;\\x1b[2J\\u202e &amp; ")


@pytest.mark.parametrize(
    ("values", "drawn"),
    [(([0.0, 0.0], [0.0]), False), (([], [NAN]), False), (([0.0, 1e-9],), True), (([1.0], [0.0]), True)],
)
def test_a_chart_with_one_value_is_told_and_not_drawn(values, drawn: bool) -> None:
    one = Chart("Gap", "step", "nats", [Series(f"run {i}", range(len(y)), y, i) for i, y in enumerate(values)])
    charts, told = split_constant([one])
    assert (charts == [one]) == drawn
    assert any("Gap" in sentence for sentence in told) == (not drawn and values != ([], [NAN]))


def test_a_curve_has_the_steps_at_which_its_metric_was_measured_and_equality_is_zero() -> None:
    history = [{"step": 0, "reward/heldout_accuracy": 0.5}, {"step": 1, "reward/mean": 0.25}]
    series = curve_chart(section_metrics("learning")[0], [("a", history), ("b", [])]).series
    assert [(list(one.x), list(one.y), one.style) for one in series] == [([1], [0.25], 0), ([], [], 1)]
    exact = [{"step": 1, "alignment/token_mult_prob_error": 1.0, "alignment/ess": 0.75}]
    assert list(curve_chart(section_metrics("alignment")[0], [("a", exact)]).series[0].y) == [0.0]
    assert list(curve_chart(section_metrics("alignment")[2], [("a", exact)]).series[0].y) == [0.25]
    scales = [{"step": 1, "kv/scale_k_layer0": 0.5, "kv/scale_k_layer1": 2.0, "kv/scale_q_layer0": 8.0}]
    assert list(curve_chart(section_metrics("scales")[1], [("a", scales)]).series[0].y) == [2.0]


def test_sources_share_a_chart_with_a_line_each() -> None:
    history = [{"step": 1, "reward/source/b": 0.5}, {"step": 2, "reward/source/b": 0.25, "reward/source/a": 1.0}]
    (metric,) = (each for each in section_metrics("signals") if each.name == "reward/source/*")
    lines = [(one.label, list(one.x), list(one.y), one.style) for one in curve_chart(metric, [("r", history)]).series]
    assert lines == [("a", [2], [1.0], 0), ("b", [1, 2], [0.5, 0.25], 1)]
    labels = [one.label for one in curve_chart(metric, [("r", history), ("q", history[:1])]).series]
    assert labels == ["r: a", "r: b", "q: b"]


def test_metrics_of_verifiers_environments_and_own_steps_are_drawn_by_name() -> None:
    history = [
        {"step": 1, "reward/mean": 0.5, "reward/form": 0.5, "tone/polite": 0.25},
        {"step": 2, "kv/scale_q_layer7": 1.0, "environment/turns": 2.0},
    ]
    metrics = section_metrics("own", [history])
    assert [metric.name for metric in metrics] == ["environment/turns", "reward/form", "tone/polite"]
    drawn = curve_chart(metrics[1], [("a", history)])
    assert (drawn.title, list(drawn.series[0].x), list(drawn.series[0].y)) == ("reward/form", [1], [0.5])
