from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fp8core.report.curves import ORANGE, VERMILION, draw_curves

HISTORY = [{"step": 0, "reward/heldout_accuracy": 0.4}] + [
    {
        "step": step,
        "reward/mean": 0.5 + step / 40,
        "rollout/length_mean": 5.0 + step / 4,
        "rollout/entropy": 1.0 / (1 + step),
        "train/grad_norm": 0.5 + step % 3,
        "alignment/token_mult_prob_error": 1.0,
    }
    for step in range(1, 13)
]


def pixels_of(path: Path, colour: str, quadrant: tuple[slice, slice]) -> int:
    rgb = np.round(imread(path)[..., :3] * 255).astype(int)
    wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return int((rgb[quadrant] == wanted).all(axis=-1).sum())


TOP_LEFT = (slice(0, 400), slice(0, 600))
BOTTOM_LEFT = (slice(400, 800), slice(0, 600))


def test_the_picture_is_1200_by_800_and_its_bytes_depend_on_the_history_alone(tmp_path: Path) -> None:
    first, second, other = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.png"
    draw_curves(HISTORY, first, "tiny")
    draw_curves(HISTORY, second, "tiny")
    draw_curves(HISTORY[:-1], other, "tiny")
    assert imread(first).shape[:2] == (800, 1200)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()
    assert b"matplotlib" not in first.read_bytes().lower()


def test_held_out_accuracy_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    draw_curves(HISTORY, tmp_path / "with.png", "tiny")
    draw_curves(HISTORY[1:], tmp_path / "without.png", "tiny")
    legend_marker = pixels_of(tmp_path / "without.png", ORANGE, TOP_LEFT)
    assert pixels_of(tmp_path / "with.png", ORANGE, TOP_LEFT) > legend_marker > 0


@pytest.mark.parametrize("excess", [0.0, 1e-3, 1e-9])
def test_the_mismatch_is_visible_at_any_size(tmp_path: Path, excess: float) -> None:
    history = [row | {"alignment/token_mult_prob_error": 1.0 + excess * row["step"]} for row in HISTORY[1:]]
    draw_curves(history, tmp_path / "curves.png", "tiny")
    assert pixels_of(tmp_path / "curves.png", VERMILION, BOTTOM_LEFT) > 200


@pytest.mark.parametrize("history", [HISTORY[:1], HISTORY[1:2], [{"step": 5}]])
def test_a_run_of_one_step_or_of_nothing_measured_is_drawn(tmp_path: Path, history: list[dict[str, float]]) -> None:
    draw_curves(history, tmp_path / "curves.png", "tiny")
    assert imread(tmp_path / "curves.png").shape[:2] == (800, 1200)


def test_drawing_leaves_pyplot_without_figures(tmp_path: Path) -> None:
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    draw_curves(HISTORY, tmp_path / "curves.png", "tiny")
    assert pyplot.get_fignums() == before
