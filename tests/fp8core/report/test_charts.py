import math

from fp8core.report.charts import POINTS_OF_A_SERIES, Series, bucket_means, colour, thinned
from fp8core.report.svg import DASHES, marker


def test_styles_are_told_apart_by_more_than_colour() -> None:
    styles = range(28)
    drawn = {(colour(style), DASHES[style % len(DASHES)], marker(style, 0, 0)) for style in styles}
    assert len(drawn) == len(styles)
    assert len({(DASHES[style % len(DASHES)]) for style in range(5)}) == 5


def test_a_long_series_keeps_its_ends_and_its_spikes() -> None:
    y = [math.sin(i / 500) for i in range(10_000)]
    y[3210], y[7654] = 40.0, -40.0
    series = Series("long", range(10_000), y, 0)
    kept = thinned(series)
    assert len(kept.x) <= POINTS_OF_A_SERIES
    assert {(0, y[0]), (3210, 40.0), (7654, -40.0), (9999, y[-1])} <= set(zip(kept.x, kept.y, strict=True))
    assert list(kept.x) == sorted(kept.x)


def test_a_short_series_stays_as_it_is() -> None:
    series = Series("short", [1, 2], [3, math.nan], 0)
    assert thinned(series) is series
    assert series.finite() == [(1, 3)]


def test_bucket_means_leave_out_what_is_not_finite() -> None:
    assert bucket_means([1.0, 3.0, math.nan, 5.0], 2) == [2.0, 5.0]
    assert math.isnan(bucket_means([math.nan], 1)[0])
