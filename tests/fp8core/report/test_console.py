import io
import re
from pathlib import Path

import pytest

from fp8core.report.chart import format_tmpe
from fp8core.report.console import Console
from fp8core.report.summary import Overhead, PrecisionGap, Summary

METRICS = {
    "step": 1,
    "reward/mean": 0.51234,
    "reward/heldout_accuracy": 0.4297,
    "rollout/length_mean": 5.12,
    "alignment/token_mult_prob_error": 1.0,
    "alignment/tokens_differing": 0.0,
}
GAP = PrecisionGap(
    nats=0.00798, accuracy=0.5, bf16_accuracy=0.53125, difference=-0.03125, difference_low=-0.125,
    difference_high=0.0625, prompts=32, kl=0.0345, same_choice=0.98,
)  # fmt: skip
SUMMARY = Summary(
    run="tiny-1",
    mlflow_run_id="abc",
    chain_head="80:" + "e" * 64,
    weights_digest="def",
    steps=80,
    reward_first10=0.55,
    reward_last10=0.97,
    reward_edge_steps=10,
    heldout_first=0.42,
    heldout_last=1.0,
    tmpe_max=1.0121,
    tokens_differing=2312,
    tokens_compared=568,
    tokens_compared_share=0.0625,
    steps_without_signal=0,
    diagnosis=f"Collapsed: after step 7 {'the reward fell ' * 12}[bold].",
    precision_gap=GAP,
    bounds="mismatched contract, fails if tmpe > 1.1, k3 > 0.01",
    bounds_crossed=2,
    overhead_ms_per_step=Overhead(median=31.4, mean=48.2),
    seconds={"warm_start": 45.0, "rollout": 30.0, "prompts": 0.8, "total": 90.0},
)
HOSTILE = "\x1b[2J\x1b]0;mine\x07\u202e https://me:secret@host"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rich reads to decide on colour and width."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_names_and_texts_of_others_are_shown_escaped() -> None:
    out = Terminal()
    console = Console(out, 80)
    console.header(HOSTILE, {"MLflow": HOSTILE})
    console.note(HOSTILE)
    console.step(METRICS, 1.0, {HOSTILE: 1.0})
    console.sample(HOSTILE, HOSTILE, 1.0)
    hostile = SUMMARY.model_copy(update={"run": HOSTILE, "bounds": HOSTILE, "seconds": {HOSTILE: 1.0, "total": 2.0}})
    console.summary(hostile, Path("\x1b[2J.png"), HOSTILE, HOSTILE)
    said = out.getvalue()
    assert not set("\x07\u202e") & set(said)
    assert "\x1b[2J" not in said
    assert "secret" not in said


def test_a_step_shows_what_was_measured_and_a_dash_for_the_rest() -> None:
    file = io.StringIO()
    console = Console(file, 80)
    console.step(METRICS, 1.234, {"rollout": 0.2, "train": 0.617})
    console.step({"step": 3, "reward/groups_with_signal": 0.0}, 1.0, {})
    header, measured, empty = file.getvalue().splitlines()[-3:]
    assert header.endswith("slowest task")
    # 79 steps of 1.234 s are left, then 77 of the mean of 1.234 and 1.0 s.
    row = ["1/80", "0.512", "0.430", "5.1", "1", "exactly", "0", "1.23", "1:37", "train", "50%"]
    assert measured.split() == row
    assert empty.split() == ["3/80", "-", "(0.430)", "-", "-", "-", "1.00", "1:26", "!", "-"]


@pytest.mark.parametrize("total", [80, 10_000_000])
def test_lines_of_steps_and_samples_never_wrap(total: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = Terminal()
    console = Console(file, total)
    metrics = METRICS | {"step": total, "rollout/staleness_mean": 12.25}
    console.step(metrics, 1234.5, {"a_step_with_quite_a_long_name_" * 3: 1000.0})
    console.sample("Megan has read 32 books. " * 20, "So we add them. " * 20 + "#### 41", 1.0)
    *lines, sample = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()
    assert max(map(len, (*lines, sample))) <= 80
    assert lines[-1].startswith(f"{total}/{total} ")
    assert sample.startswith("  wrote  Megan has read 32 books. ")
    assert sample.endswith(" them. #### 41  reward 1")


def test_a_log_file_has_no_control_characters_and_the_whole_result() -> None:
    file = io.StringIO()
    console = Console(file, 80)
    console.step(METRICS, 1.0, {"rollout": 1.0})
    console.summary(SUMMARY, Path("/runs/tiny-1"), "mlflow ui", "http://page", learning="learned")
    text = file.getvalue()
    assert all(character == "\n" or character.isprintable() for character in text)
    assert SUMMARY.diagnosis in text.splitlines()
    words = " ".join(text.replace("│", " ").split())
    for shown in (
        "result learned held-out 0.420 -> 1.000",
        "reward 0.550 -> 0.970",
        "tmpe 1.012100 largest of all steps; 2,312 differ of the 568 tokens that were compared, 6.2 % of all",
        "FP8 from BF16 0.0345 nats a token at step 0; held-out -0.031 [-0.125, +0.062] on 32",
        "bounds crossed 2 times mismatched contract, fails if",
        "overhead 31 ms median per step; mean 48 ms",
        "time 90.0 s of all processes, 80 steps",
        "rollout 30.0 s 33%",
        "curves /runs/tiny-1/curves.png",
        "then open http://page",
    ):
        assert shown in words
    assert "prompts 0.8" not in words, "it took less than 1 % of the time"


@pytest.mark.parametrize(
    ("value", "shown"), [(1.0, "1 exactly"), (1.009255, "1.009255"), (1.0000005, "1.000001"), (1.0 + 2**-40, "1+9e-13")]
)
def test_exact_equality_is_told_from_a_tiny_error(value: float, shown: str) -> None:
    assert format_tmpe(value) == shown
