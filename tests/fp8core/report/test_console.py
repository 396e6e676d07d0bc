import io
import math
import re
from pathlib import Path

import pytest

from fp8core.report.console import Console, StyleAccuracy, format_tmpe, shows_sample
from fp8core.report.summary import Overhead, PrecisionGap, Summary

METRICS = {
    "step": 1,
    "reward/mean": 0.51234,
    "reward/heldout_accuracy": 0.4297,
    "rollout/length_mean": 5.12,
    "alignment/token_mult_prob_error": 1.0,
    "alignment/tokens_differing": 0.0,
}
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
    bounds="mismatched contract, fails if tmpe > 1.1, k3 > 0.01",
    bounds_crossed=2,
    overhead_ms_per_step=Overhead(median=31.4, mean=48.2),
    seconds={"warm_start": 45.0, "rollout": 30.0, "total": 90.0},
)


HOSTILE = "\x1b[2J\x1b]0;mine\x07\u202e https://me:secret@host"


def test_names_and_texts_of_others_are_shown_escaped() -> None:
    out = Terminal()
    console = Console(out, 80)
    console.header(HOSTILE, {"MLflow": HOSTILE})
    console.note(HOSTILE)
    console.step(METRICS, 1.0, {HOSTILE: 1.0})
    hostile = SUMMARY.model_copy(update={"run": HOSTILE, "bounds": HOSTILE, "seconds": {HOSTILE: 1.0, "total": 2.0}})
    console.summary(hostile, Path("\x1b[2J.png"), HOSTILE, HOSTILE)
    said = out.getvalue()
    assert not set("\x07\u202e") & set(said)
    assert "\x1b[2J" not in said
    assert "secret" not in said
    assert said.count("\\x1b[2J") >= 7


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rich reads to decide on colour and width."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def steps_printed(count: int, file: io.StringIO, total: int) -> list[str]:
    console = Console(file, total)
    for step in range(1, count + 1):
        heldout = {} if step % 5 else {"reward/heldout_accuracy": step / 100}
        metrics = {key: value for key, value in METRICS.items() if key != "reward/heldout_accuracy"}
        console.step(metrics | heldout | {"step": step}, 2.0, {"rollout": 1.1, "train": 0.5})
    return file.getvalue().splitlines()


def test_a_step_shows_what_was_measured_and_a_dash_for_most_of_the_rest() -> None:
    file = io.StringIO()
    console = Console(file, 80)
    console.step(METRICS, 1.234, {"rollout": 0.2, "train": 0.617})
    console.step({"step": 3}, 1.0, {})
    measured, empty = (line.split() for line in file.getvalue().splitlines()[2::2])
    # 79 steps of 1.234 s are left, then 77 of the mean of 1.234 and 1.0 s.
    assert measured == ["1/80", "0.512", "0.430", "5.1", "1", "exactly", "0", "1.23", "1:37", "train", "50%"]
    assert empty == ["3/80", "-", "(0.430)", "-", "-", "-", "1.00", "1:26", "-"]


def test_steps_without_a_signal_are_marked() -> None:
    file = io.StringIO()
    console = Console(file, 80)
    for step, share in enumerate((0.0, 0.25, 0.0), start=1):
        console.step(METRICS | {"step": step, "reward/groups_with_signal": share}, 1.0, {"rollout": 0.5})
    legend, header, *lines = file.getvalue().splitlines()[1:]
    assert legend.startswith("!: the scores of every group were equal")
    assert header.endswith("slowest task")
    assert [line.endswith(" ! rollout 50%") for line in lines] == [True, False, True]


def test_a_diagnosis_is_printed_whole_below_the_panel() -> None:
    file, sentence = io.StringIO(), f"Collapsed: after step 7 {'the reward fell ' * 12}[bold]."
    diagnosed = SUMMARY.model_copy(update={"diagnosis": sentence})
    Console(file, 80).summary(diagnosed, Path("/runs/tiny-1"), "mlflow ui", "http://page", learning="collapsed")
    assert sentence in file.getvalue().splitlines()


def test_a_wide_terminal_shows_tokens_a_second_and_no_line_is_wider_than_it(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    console = Console(out, 80)
    console.step(METRICS | {"core/tokens_per_second": 4000.0}, 1.234, {"a_step_with_quite_a_long_name" * 3: 0.2})
    console.sample("What is\n2 + 3?", "5 " * 200, 1.0)
    header, step, sample = out.getvalue().splitlines()[1:]
    assert "tokens/s" in header
    assert "4,000" in step
    shown = re.sub(r"\x1b\[[0-9;]*m", "", sample)
    assert "What is 2 + 3? -> …" in shown
    assert shown.endswith("reward 1")
    assert max(map(len, (header, step, shown))) <= 100


def test_a_long_problem_leaves_room_for_the_end_of_its_answer() -> None:
    file = io.StringIO()
    Console(file, 80).sample("Megan has read 32 books. " * 20, "So we add them. " * 20 + "#### 41", 1.0)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("  wrote  Megan has read 32 books. ")
    assert "… -> …" in line
    assert line.endswith(" them. #### 41  reward 1")
    assert len(line) == 80


@pytest.mark.parametrize(("steps", "shown"), [(1, [1]), (10, [1, 10]), (25, [1, 10, 20, 25])])
def test_completions_are_shown_early_and_late(steps, shown):
    assert [step for step in range(1, steps + 1) if shows_sample(step, steps)] == shown


def test_the_last_held_out_accuracy_is_repeated_in_brackets_and_dim() -> None:
    plain = steps_printed(7, io.StringIO(), 80)[5:]
    assert plain[2] == "held-out in brackets: of an earlier step, as this one was not evaluated"
    assert [plain[place].split()[2] for place in (0, 1, 3, 4)] == ["-", "0.050", "(0.050)", "(0.050)"]
    coloured = steps_printed(7, Terminal(), 80)[5:]
    assert [("\x1b[2m" in coloured[place]) for place in (0, 1, 3, 4)] == [False, False, True, True]


def test_the_age_of_tokens_is_shown_where_a_run_generates_ahead() -> None:
    file = io.StringIO()
    console = Console(file, 80)
    console.step(METRICS | {"rollout/staleness_mean": 1.25}, 1.0, {"train": 0.5})
    *_, header, step = file.getvalue().splitlines()
    assert step.split()[header.split().index("age") + 1] == "1.25", "the error takes two words"
    assert "age" not in steps_printed(1, io.StringIO(), 80)[1]


@pytest.mark.parametrize("total", [9, 80, 1000, 10_000_000])
@pytest.mark.parametrize("ahead", [{}, {"rollout/staleness_mean": 12.25}])
def test_step_lines_never_wrap(total: int, ahead: dict[str, float]) -> None:
    file = io.StringIO()
    long_name = "a_step_with_quite_a_long_name_" * 2
    Console(file, total).step(METRICS | ahead | {"step": total}, 1234.5, {long_name: 1000.0})
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith(f"{total}/{total} ")


def everything(file: io.StringIO) -> str:
    console = Console(file, 80)
    console.header("tiny-1", {"runs": "/a/" + "long/" * 30 + "[bold]path", "MLflow": "sqlite:////x"})
    console.styles([StyleAccuracy("step by step", 0.93, 0.9), StyleAccuracy("bare answer", 0.05, 0.1)])
    console.step(METRICS, 1.0, {"rollout": 1.0})
    console.summary(SUMMARY, Path("/runs/tiny-1/curves.png"), "mlflow ui " + "x" * 120, "http://127.0.0.1:5000/#/r")
    return file.getvalue()


def test_a_log_file_has_no_control_characters_and_the_same_words_as_a_terminal() -> None:
    plain = everything(io.StringIO())
    assert all(character == "\n" or character.isprintable() for character in plain)
    assert "\x1b[" in everything(Terminal())


def test_the_summary_shows_what_changed_and_where_the_time_went() -> None:
    file = io.StringIO()
    spent = SUMMARY.seconds | {"prompts": 0.8}
    summary = SUMMARY.model_copy(update={"seconds": spent})
    Console(file, 80).summary(summary, Path("/runs/tiny-1"), "mlflow ui", "http://page", learning="learned")
    text = file.getvalue()
    assert text.splitlines()[1].split()[1:7] == ["result", "learned", "held-out", "0.420", "->", "1.000"]
    assert "prompts " not in text.partition("90.0 s")[2], "it took less than 1 % of the time"
    for words in (
        "0.550 -> 0.970",
        "0.420 -> 1.000",
        "1.012100",
        "2,312 differ",
        "the 568",
        "6.2 % of all",
        "crossed 2 times",
        "mismatched contract, fails if",
        "31 ms",
        "mean 48 ms",
        "90.0 s",
        "/runs/tiny-1/curves.png",
        "http://page",
    ):
        assert words in text
    assert [line.split()[1:5] for line in text.splitlines() if "rollout" in line] == [["rollout", "30.0", "s", "33%"]]


@pytest.mark.parametrize(
    ("crossed", "shown"), [(None, "-"), (0, "kept"), (1, "crossed 1 time "), (2, "crossed 2 times")]
)
def test_the_summary_counts_the_crossings_of_bounds(crossed: int | None, shown: str) -> None:
    file = io.StringIO()
    Console(file, 80).summary(SUMMARY.model_copy(update={"bounds_crossed": crossed}), Path("r"), "mlflow ui", "page")
    (line,) = (line for line in file.getvalue().splitlines() if " bounds " in line)
    assert line.partition(" bounds ")[2].strip().startswith(shown)


def test_the_distance_of_fp8_from_bf16_has_the_paired_difference_and_its_prompts() -> None:
    ends = {"difference": -0.03125, "difference_low": -0.125, "difference_high": 0.0625}
    gap = PrecisionGap(nats=0.00798, accuracy=0.5, bf16_accuracy=0.53125, **ends, prompts=32)
    # A run of an earlier version has no KL.
    for found, distance in ((gap, "0.00798"), (gap.model_copy(update={"kl": 0.0345}), "0.0345")):
        file, summary = io.StringIO(), SUMMARY.model_copy(update={"precision_gap": found})
        Console(file, 80).summary(summary, Path("r"), "mlflow ui", "http://page")
        words = " ".join(file.getvalue().replace("│", " ").split())
        assert f"FP8 from BF16 {distance} nats a token at step 0; held-out -0.031 [-0.125, +0.062] on 32" in words


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "1 exactly"), (1.009255, "1.009255"), (1.0000005, "1.000001"), (1.0 + 2**-40, "1+9e-13"), (math.nan, "nan")],
)
def test_exact_equality_is_told_from_a_tiny_error(value: float, shown: str) -> None:
    assert format_tmpe(value) == shown
