import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fp8core.report.charts import REFERENCE, Bound, Chart, Series, colour
from fp8core.report.png import draw_png


def chart(y, style: int = 0, mark="line", **options) -> Chart:
    return Chart("Reward", "step", "reward", [Series("run", range(len(y)), y, style, mark)], **options)


def has_colour(path: Path, name: str) -> bool:
    rgb = np.round(imread(path)[..., :3] * 255).astype(int)
    return bool((rgb == [int(name[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).any())


def test_charts_lie_in_rows_and_equal_charts_give_equal_bytes(tmp_path: Path) -> None:
    charts = [chart([0, 1, 2]), chart([1, 2], 1, include=(0.0, 3.0)), chart([0, 1e-3], 2, y_scale="log")]
    draw_png(charts, tmp_path / "a.png", "two runs")
    draw_png(charts, tmp_path / "b.png", "two runs")
    assert imread(tmp_path / "a.png").shape[:2] == (760, 1200)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert all(has_colour(tmp_path / "a.png", colour(style)) for style in range(3))


@pytest.mark.parametrize("y", [[], [1.0], [math.nan], [0.0, 0.0], [-1.0, math.inf]])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_degenerate_data_are_drawn(y, scale, tmp_path: Path) -> None:
    draw_png([chart(y, y_scale=scale, bounds=[Bound("limit", 0.1)])], tmp_path / "a.png", "")
    assert imread(tmp_path / "a.png").shape[:2] == (400, 600)


def test_dots_outlines_and_references_are_drawn(tmp_path: Path) -> None:
    draw_png([chart([0, 1], 0, "dots"), chart([0, 1], 1, "outline"), chart([0, 1], REFERENCE)], tmp_path / "a.png", "")
    assert has_colour(tmp_path / "a.png", colour(1))
    assert has_colour(tmp_path / "a.png", colour(REFERENCE))


def test_a_legend_of_many_lines_lies_below_the_panels(tmp_path: Path) -> None:
    """In a panel whose lines fill it, it would hide some of them."""
    lines = [Series(f"run {style}", range(5), [style] * 5, style) for style in range(6)]
    charts = [Chart(title, "step", "reward", lines) for title in ("Reward", "Accuracy")]
    draw_png(charts, tmp_path / "shared.png", "six runs")
    draw_png([charts[0], replace(charts[1], series=lines[:5])], tmp_path / "own.png", "six runs")
    below = {path.stem: imread(path)[-25:, ..., :3] for path in tmp_path.iterdir()}
    inks = {name: (np.ptp(rows, axis=-1) > 0.3).sum() for name, rows in below.items()}
    assert inks["shared"] > 0 == inks["own"]
