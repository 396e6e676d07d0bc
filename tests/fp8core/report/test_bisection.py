from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from fp8core.alignment.bisect import Bisection, LogprobError, UnitError
from fp8core.report.bisection import DRAWN, bisection_text, draw_bisection
from fp8core.report.curves import BLUE, ORANGE

TOTAL = LogprobError(mean=0.02, mult_prob_error=1.0203, largest=0.5)


def unit(name, share, removed):
    alone = LogprobError(share * TOTAL.mean, 1 + share * TOTAL.mean, TOTAL.largest)
    return UnitError(name, alone, replace(alone, mean=(1 - removed) * TOTAL.mean), share, removed)


RANKED = Bisection(402, TOTAL, (unit("layer 1", 0.9, 0.55), unit("layer 10", 0.4, -0.05), unit("head", 0.0, 0.0)))


def pixels(path, colour):
    rgb = np.round(imread(path)[..., :3] * 255).astype(int)
    return int((rgb == [int(colour[start : start + 2], 16) for start in (1, 3, 5)]).all(axis=-1).sum())


def test_the_table_is_aligned_and_in_the_order_of_the_ranking():
    lines = bisection_text(RANKED).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["unit", "share", "alone", "removed", "mean", "|d|", "tmpe", "-", "1", "max", "|d|"]
    assert lines[1].split() == ["layer", "1", "90.0%", "55.0%", "1.800e-02", "1.800e-02", "5.000e-01"]
    assert lines[2].split()[:4] == ["layer", "10", "40.0%", "-5.0%"]
    assert lines[-1].split() == ["total", "2.000e-02", "2.030e-02", "5.000e-01"]


def test_equality_is_said():
    text = bisection_text(Bisection(402, LogprobError(0.0, 1.0, 0.0), ()))
    assert text == "all 402 log-probs are equal bit for bit; there is nothing to bisect"


def test_both_shares_are_drawn_to_scale(tmp_path):
    draw_bisection(RANKED, tmp_path / "a.png", "FP8 against BF16")
    draw_bisection(RANKED, tmp_path / "b.png", "FP8 against BF16")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert imread(tmp_path / "a.png").shape[1] == 1200
    half = replace(RANKED, units=(unit("layer 1", 0.9, 0.1), *RANKED.units[1:]))
    draw_bisection(half, tmp_path / "half.png", "FP8 against BF16")
    assert pixels(tmp_path / "half.png", ORANGE) < 0.6 * pixels(tmp_path / "a.png", ORANGE)
    assert pixels(tmp_path / "half.png", BLUE) == pytest.approx(pixels(tmp_path / "a.png", BLUE), rel=0.1)


def test_a_long_ranking_is_cut(tmp_path):
    many = replace(RANKED, units=tuple(unit(f"layer {i}", 1 / (i + 1), 0.0) for i in range(DRAWN + 30)))
    draw_bisection(many, tmp_path / "many.png", "many")
    draw_bisection(replace(many, units=many.units[:DRAWN]), tmp_path / "first.png", "many")
    assert imread(tmp_path / "many.png").shape == imread(tmp_path / "first.png").shape
    assert len(bisection_text(many).splitlines()) == DRAWN + 32
