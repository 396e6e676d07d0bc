import math
import re
from xml.etree import ElementTree

import pytest

from fp8core.report.charts import REFERENCE, Bound, Chart, Series, colour
from fp8core.report.svg import chart_svg

SVG = "{http://www.w3.org/2000/svg}"
NAN, INF = math.nan, math.inf


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', svg), "a coordinate that is no number"
    return root


def chart(*series: Series, **options) -> Chart:
    return Chart("Reward", "step", "mean reward", series, **options)


def words_of(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 0.5)],
        [(1, NAN)],
        [(1, NAN), (2, 1.0)],
        [(1, INF), (2, 1.0)],
        [(1, 0.0), (2, 0.0)],
        [(1, -3.0), (2, 0.0)],
        [(1, 7.0), (2, 7.0)],
        [(1, 1e-300), (2, 1e300)],
        [(5, 1.0), (5, 2.0)],
    ],
)
@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("mark", ["line", "dots", "outline"])
def test_degenerate_data_are_drawn(points, scale, mark) -> None:
    series = Series("a", [x for x, _ in points], [y for _, y in points], 0, mark)
    root = parsed(chart_svg(chart(series, y_scale=scale, bounds=[Bound("limit", 0.1)])))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter(f"{SVG}text"):
        assert -1 <= float(element.attrib["x"]) <= width
        assert 0 <= float(element.attrib["y"]) <= height
    drawable = any(math.isfinite(y) for _, y in points)
    assert ("not measured" in words_of(root)) == (not drawable)


def test_a_chart_names_its_axes_its_series_and_its_bounds() -> None:
    bound = Bound("NeMo RL: 0.1", 0.1)
    root = parsed(chart_svg(chart(Series("one", [1, 2], [0, 1], 0), Series("two & <3>", [1], [0], 1), bounds=[bound])))
    assert {"Reward", "step", "mean reward", "one", "two & <3>", "NeMo RL: 0.1"} <= set(words_of(root))
    assert root.attrib["aria-label"] == "Reward"


def test_pointing_at_a_step_shows_the_values_of_all_series() -> None:
    series = Series("one", [1, 2], [0.25, 1], 0), Series("two", [1], [0.5], 1), Series("equal", [1], [0], REFERENCE)
    titles = [element.text for element in parsed(chart_svg(chart(*series))).iter(f"{SVG}title")]
    assert titles == ["step 1\none: 0.25\ntwo: 0.5", "step 2\none: 1"]


def test_series_have_their_own_colours_dashes_and_markers() -> None:
    svg = chart_svg(chart(*(Series(f"run {i}", [1, 2], [i, i], i) for i in range(5))))
    assert all(colour(i) in svg for i in range(5))
    assert len(set(re.findall(r'stroke-dasharray="([^"]+)"', svg))) == 4


def test_many_labels_take_more_rows_and_stay_inside() -> None:
    series = [Series(f"a run with a rather long name {i}", [1], [1], i) for i in range(6)]
    root = parsed(chart_svg(chart(*series)))
    rows = {element.attrib["y"] for element in root.iter(f"{SVG}text") if (element.text or "").startswith("a run")}
    assert len(rows) == 6 // 2


def test_ten_thousand_steps_make_a_small_picture() -> None:
    svg = chart_svg(chart(Series("long", range(10_000), [i % 97 for i in range(10_000)], 0)))
    assert len(svg) < 60_000
