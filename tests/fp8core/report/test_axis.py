import math

import pytest

from fp8core.report.axis import Axis, short


@pytest.mark.parametrize(
    "values",
    [[], [0.0], [3.0], [0.1, 0.9], [1e-9, 1e9], [0.0, 1e-3], [-5.0, 5.0], [math.nan, 2.0], [1e-300, 1.0], [12345678.0]],
)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_every_value_has_a_place_between_the_ends_and_there_is_a_tick(values: list[float], scale) -> None:
    axis = Axis.of(values, scale, 100.0, 500.0)
    for value in values:
        if math.isfinite(value):
            assert 100.0 <= axis.place(value) <= 500.0
    ticks = axis.ticks()
    assert ticks
    assert all(99.9 <= axis.place(value) <= 500.1 for value, _ in ticks)
    assert len({words for _, words in ticks}) == len(ticks)


def test_zeros_of_a_log_axis_have_a_lane_of_their_own() -> None:
    axis = Axis.of([0.0, 1e-4, 1e-2], "log", 0.0, 100.0)
    assert axis.place(0.0) < axis.place(1e-4) < axis.place(1e-2)
    assert (0.0, "0") in axis.ticks()
    assert (0.0, "0") not in Axis.of([1e-4, 1e-2], "log", 0.0, 100.0).ticks()


def test_steps_have_whole_ticks() -> None:
    assert [words for _, words in Axis.of([1, 2, 3], "linear", 0, 100).ticks()] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.123456, "0.1235"),
        (13080.4, "13,080"),
        (2e-5, "2e-5"),
        (1.0, "1"),
        (3e12, "3e12"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_short(value: float, words: str) -> None:
    assert short(value) == words
