"""Drawings as PNG and as SVG: every datum has a place, equal ones give equal bytes, and pointing shows values."""

import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.image import imread

from fp8core.alignment.bisect import Bisection, LogprobDistance, UnitError
from fp8core.report.chart import (
    COLOURS,
    POINTS_OF_A_SERIES,
    REFERENCE,
    Bound,
    Chart,
    Graph,
    Heatmap,
    Node,
    Series,
    Stack,
    bucket_means,
    colour,
    thinned,
)
from fp8core.report.drawing import BARS, BISECTED, DASHES, MARKERS, draw_bisection, draw_png, figure_html
from fp8core.report.text import bisection_text
from fp8core.report.training_charts import training_charts

SVG = "{http://www.w3.org/2000/svg}"
NAN, INF = math.nan, math.inf


def chart(*series: Series, **options) -> Chart:
    return Chart("Reward", "step", "mean reward", series, **options)


def line(y, style: int = 0, mark="line") -> Series:
    return Series("run", range(len(y)), y, style, mark)


def parsed(drawing) -> ElementTree.Element:
    text = figure_html(drawing)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text), "a coordinate that is no number"
    return ElementTree.fromstring(text)


def words_of(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def titles(drawing) -> list[str]:
    return ["".join(label.itertext()) for label in parsed(drawing).iter("label")]


def pixels(path: Path, name: str) -> int:
    rgb = np.round(imread(path)[..., :3] * 255).astype(int)
    return int((rgb == [int(name[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).sum())


# Charts


@pytest.mark.parametrize(
    "y", [[], [0.5], [NAN], [NAN, 1.0], [INF, 1.0], [0.0, 0.0], [-3.0, 0.0], [7.0, 7.0], [1e-100, 1e100]]
)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_degenerate_data_are_drawn(y, scale, tmp_path: Path) -> None:
    for mark in ("line", "dots", "outline"):
        root = parsed(chart(line(y, mark=mark), y_scale=scale, bounds=[Bound("limit", 0.1)]))
        assert ("not measured" in words_of(root)) == (not any(map(math.isfinite, y)))
    draw_png([chart(line(y), y_scale=scale, bounds=[Bound("limit", 0.1)])], tmp_path / "a.png", "")
    assert imread(tmp_path / "a.png").shape[:2] == (400, 600)


def test_a_chart_names_its_axes_its_series_and_its_bounds() -> None:
    series = Series("one", [1, 2], [0, 1], 0), Series("two & <3> $", [1], [0], 1)
    root = parsed(chart(*series, bounds=[Bound("NeMo RL: 0.1", 0.1)], note="a note"))
    assert {"Reward", "step", "mean reward", "one", "two & <3> $", "NeMo RL: 0.1", "a note"} <= set(words_of(root))
    assert root[0].attrib["aria-label"] == "Reward"


def test_pointing_at_a_step_shows_the_values_of_all_series() -> None:
    series = Series("one", [1, 2], [0.25, 1], 0), Series("two", [1], [0.5], 1), Series("equal", [1], [0], REFERENCE)
    assert titles(chart(*series)) == ["step 1\none: 0.25\ntwo: 0.5", "step 2\none: 1"]


def test_pointing_at_a_bar_of_a_histogram_shows_its_share() -> None:
    histogram = chart(Series("run", [-1.5, -0.5, 0.5, 1.5], [0.1, 0.8, 0.1, 0.0], 0, "outline"))
    assert titles(histogram) == ["step -1.5\nrun: 0.1", "step -0.5\nrun: 0.8", "step 0.5\nrun: 0.1"]
    places = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", figure_html(histogram))
    (first, second, third) = [(float(left), float(width)) for left, width in places]
    assert first[1] == pytest.approx(second[1], abs=0.02) == third[1], "bars are equally wide"
    # The middle bar is in the middle of the axes, which reach from 58 to 390 of 400 pixels.
    assert second[0] + second[1] / 2 == pytest.approx(100 * (58 + 390) / 2 / 400, abs=0.05)


def test_styles_are_told_apart_by_more_than_colour() -> None:
    styles = range(28)
    assert len({(style % len(COLOURS), style % len(DASHES), style % len(MARKERS)) for style in styles}) == len(styles)
    text = figure_html(chart(*(Series(f"run {i}", [1, 2], [i, i], i) for i in range(5))))
    assert all(colour(i).lower() in text for i in range(5))
    assert len(set(re.findall(r"stroke-dasharray: ([^;]+)", text))) >= 4


def test_equal_charts_give_equal_bytes_and_leave_pyplot_alone(tmp_path: Path) -> None:
    charts = [
        chart(line([0, 1, 2])),
        chart(line([1, 2], 1), include=(0.0, 3.0)),
        chart(line([0, 1e-3], 2), y_scale="log"),
    ]
    before = pyplot.get_fignums()
    for name in "ab":
        draw_png(charts, tmp_path / f"{name}.png", "two runs")
    assert imread(tmp_path / "a.png").shape[:2] == (760, 1200)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert all(pixels(tmp_path / "a.png", colour(style)) for style in range(3))
    assert figure_html(charts[2]) == figure_html(charts[2])
    assert pyplot.get_fignums() == before


def test_outlines_and_references_are_drawn(tmp_path: Path) -> None:
    draw_png([chart(line([0, 1], 1, "outline")), chart(line([0, 1], REFERENCE))], tmp_path / "a.png", "")
    assert pixels(tmp_path / "a.png", colour(1))
    assert pixels(tmp_path / "a.png", colour(REFERENCE))


def test_ten_thousand_steps_make_a_small_picture_that_keeps_ends_and_spikes() -> None:
    y = [math.sin(i / 500) for i in range(10_000)]
    y[3210], y[7654] = 40.0, -40.0
    series = Series("long", range(10_000), y, 0)
    kept = thinned(series)
    assert len(kept.x) <= POINTS_OF_A_SERIES
    assert {(0, y[0]), (3210, 40.0), (7654, -40.0), (9999, y[-1])} <= set(zip(kept.x, kept.y, strict=True))
    assert len(figure_html(chart(series))) < 90_000


@pytest.mark.parametrize(
    "history", [[{"step": 0, "reward/heldout_accuracy": 0.4}], [{"step": 5}], [{"step": 1, "reward/mean": 0.5}]]
)
def test_the_picture_of_a_run_is_drawn_whatever_was_measured(tmp_path: Path, history) -> None:
    draw_png(training_charts("tiny", history, None), tmp_path / "curves.png", "tiny")
    assert imread(tmp_path / "curves.png").shape[1] == 1200


# Stacks, heat maps and graphs


def test_a_stack_tells_seconds_and_shares() -> None:
    assert titles(Stack("Time", "step", "seconds", [1, 2], {"rollout": [1.0, 3.0], "train": [3.0, 1.0]})) == [
        "step 1: 4\nrollout: 1 (25%)\ntrain: 3 (75%)",
        "step 2: 4\nrollout: 3 (75%)\ntrain: 1 (25%)",
    ]
    found = titles(Stack("Time", "step", "seconds", list(range(1, 1001)), {"train": [2.0] * 1000}))
    assert (len(found), found[0]) == (BARS, "step 1 to 8: 2\ntrain: 2 (100%)")


def test_means_leave_out_what_is_not_finite() -> None:
    assert bucket_means([1.0, 3.0, NAN, 5.0], 2) == [2.0, 5.0]
    assert math.isnan(bucket_means([NAN], 1)[0])


def test_a_heat_map_names_layer_step_and_value_and_joins_what_is_equal() -> None:
    panels = {"keys": [[0.5, 0.5, 0.25], [1.0, NAN, 1.0]]}
    assert titles(Heatmap("Scales", "step", "layer", [1, 2, 3], panels)) == [
        "keys, layer 0, step 1 to 2: 0.5",
        "keys, layer 0, step 3: 0.25",
        "keys, layer 1, step 1: 1",
        "keys, layer 1, step 3: 1",
    ]


def test_degenerate_stacks_heat_maps_and_graphs_are_drawn() -> None:
    for x, layers in (([], {}), ([1], {"a": [0.0]}), ([1], {"a": [NAN]}), ([3, 4], {"a": [1.0, NAN]})):
        titles(Stack("Time", "step", "seconds", x, layers))
    for panels in ({}, {"q": []}, {"q": [[NAN]]}, {"q": [[0.0]]}, {"q": [[2.0]]}):
        titles(Heatmap("Scales", "step", "layer", [1], panels))
        titles(Heatmap("Scales", "step", "layer", [], panels))
    assert titles(Graph("Iteration", [], [])) == []


def test_an_edge_that_a_longer_path_implies_is_not_drawn() -> None:
    nodes = [Node(name, i, [name, "1 s"], f"hint of {name}", 0.5) for i, name in enumerate("abc")]
    found = titles(Graph("Iteration", nodes, [("a", "b", "x"), ("b", "c", "y"), ("a", "c", "x, z")]))
    assert found == ["x", "y", "hint of a", "hint of b", "hint of c"]


# Bisections

TOTAL = LogprobDistance(mean=0.02, mult_prob_error=1.0203, largest=0.5)


def unit(name, share, removed):
    alone = LogprobDistance(share * TOTAL.mean, 1 + share * TOTAL.mean, TOTAL.largest)
    return UnitError(name, alone, replace(alone, mean=(1 - removed) * TOTAL.mean), share, removed)


RANKED = Bisection(402, TOTAL, (unit("layer 1", 0.9, 0.55), unit("layer 10", 0.4, -0.05), unit("head", 0.0, 0.0)))


def test_both_shares_are_drawn_to_scale_and_a_long_ranking_is_cut(tmp_path):
    half = replace(RANKED, units=(unit("layer 1", 0.9, 0.1), *RANKED.units[1:]))
    many = replace(RANKED, units=tuple(unit(f"layer {i}", 1 / (i + 1), 0.0) for i in range(BISECTED + 30)))
    for name, bisection in {"whole": RANKED, "half": half, "many": many}.items():
        draw_bisection(bisection, tmp_path / f"{name}.png", "FP8 against BF16")
    whole, part = tmp_path / "whole.png", tmp_path / "half.png"
    assert pixels(part, COLOURS[3]) < 0.6 * pixels(whole, COLOURS[3])
    assert pixels(part, COLOURS[0]) == pytest.approx(pixels(whole, COLOURS[0]), rel=0.1)
    assert imread(tmp_path / "many.png").shape[:2] == (200 + 34 * BISECTED, 1200)
    assert len(bisection_text(many).splitlines()) == BISECTED + 32


def test_a_dollar_in_a_title_is_no_formula(tmp_path: Path) -> None:
    for title in ("runs/$\\foo$ against BF16", "runs/a$b$c_x"):
        draw_bisection(RANKED, tmp_path / "a.png", title)
        draw_png([chart(line([0, 1]))], tmp_path / "b.png", title)
        assert [imread(tmp_path / name).shape[1] for name in ("a.png", "b.png")] == [1200, 600]
