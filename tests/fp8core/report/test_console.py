import io
import re

import pytest

from fp8core.report.chart import format_tmpe
from fp8core.report.console import Console

METRICS = {
    "step": 1,
    "reward/mean": 0.51234,
    "reward/heldout_accuracy": 0.4297,
    "rollout/length_mean": 5.12,
    "alignment/token_mult_prob_error": 1.0,
    "alignment/tokens_differing": 0.0,
}
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
    console.note(HOSTILE)
    console.step(METRICS, 1.0, {HOSTILE: 1.0})
    console.sample(HOSTILE, HOSTILE, 1.0)
    console.section(HOSTILE, [HOSTILE], {"MLflow": HOSTILE})
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
    assert empty.split() == ["3/80", "-", "-", "-", "-", "-", "1.00", "1:26", "!", "-"]


@pytest.mark.parametrize("total", [80, 10_000_000])
def test_lines_of_steps_and_samples_never_wrap(total: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = Terminal()
    console = Console(file, total)
    metrics = METRICS | {"step": total}
    console.step(metrics, 1234.5, {"a_step_with_quite_a_long_name_" * 3: 1000.0})
    console.sample("Megan has read 32 books. " * 20, "So we add them. " * 20 + "#### 41", 1.0)
    *lines, sample = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()
    assert max(map(len, (*lines, sample))) <= 80
    assert lines[-1].startswith(f"{total}/{total} ")
    assert sample.startswith("  reward 1  Megan has read 32 books. ")
    assert sample.endswith(" them. #### 41")


def test_a_log_file_has_no_control_characters_and_the_whole_result() -> None:
    file = io.StringIO()
    console = Console(file, 80)
    console.step(METRICS, 1.0, {"rollout": 1.0})
    paragraph = f"Collapsed: after step 7 {'the reward fell ' * 12}[bold]."
    console.section("tiny-1: done", [paragraph], {"curves": "/runs/tiny-1/curves.png", "then open": "http://page"})
    text = file.getvalue()
    assert all(character == "\n" or character.isprintable() for character in text)
    assert text.splitlines()[-4:-2] == ["tiny-1: done", paragraph]
    assert [line.split()[-1] for line in text.splitlines()[-2:]] == ["/runs/tiny-1/curves.png", "http://page"]


@pytest.mark.parametrize(
    ("value", "shown"), [(1.0, "1 exactly"), (1.009255, "1.009255"), (1.0000005, "1.000001"), (1.0 + 2**-40, "1+9e-13")]
)
def test_exact_equality_is_told_from_a_tiny_error(value: float, shown: str) -> None:
    assert format_tmpe(value) == shown
