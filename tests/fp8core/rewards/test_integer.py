import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8core.config.data import DataConfig
from fp8core.data.source import read_jsonl
from fp8core.errors import UserError
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.scorer import Verdict

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
VERIFIER = IntegerVerifier()
MEGABYTE = 1_000_000


def verdict(answer: str, expected: int = 18, finish: str = "stop") -> Verdict:
    return VERIFIER.score("How many?", f"First 3 * 6 = 18.\n####{answer}", f"3 * 6 = 18\n#### {expected}", finish)


@pytest.mark.parametrize(
    ("answer", "value"),
    [(" .0", 0), (" $12,345,678.00 dollars", 12345678), (r" \( \textbf{18} \)", 18), (" " + "9" * 40, int("9" * 40))],
)
def test_readable_answers(answer: str, value: int) -> None:
    assert verdict(answer, value) == Verdict(1.0, "right", "")
    assert verdict(answer, value - 1) == Verdict(0.0, "wrong", f"answer {value}")


@pytest.mark.parametrize(
    ("answer", "detail"),
    [(" 72.5", "72.5 is no integer"), (" -1,234.560 m", "-1234.56 is no integer"), (" .5", "0.5 is no integer")],
)
def test_wrong_answers_say_what_was_read(answer: str, detail: str) -> None:
    assert verdict(answer) == Verdict(0.0, "wrong", detail)


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("\n18", "no number"),
        (" minus 18", "text before the number, or commas that do not group thousands"),
        (" 1,23", "text before the number, or commas that do not group thousands"),
        (" 1 234", "several numbers"),
        (" $18 and 50 cents", "several numbers"),
        (" 18e0", "several numbers"),
        (" 18 millones", "text after the number that is no unit"),
        (" \u200b18", "the invisible character U+200B"),
        (" ١٨", "digits that are not ASCII"),
        (" " + "9" * 41, "more than 40 digits"),
        (" 18" + " " * 254, "more than 256 characters after ####"),
    ],
)
def test_unreadable_answers_say_why(answer: str, detail: str) -> None:
    assert verdict(answer) == Verdict(0.0, "unparsed", detail)


@pytest.mark.parametrize("completion", ["", "18", "### 18", "The answer is 18.", "#" * 3])
def test_without_the_marker_there_is_no_answer(completion: str) -> None:
    assert VERIFIER.score("q", completion, "#### 18", "stop") == Verdict(0.0, "unparsed", "no ####")


def test_a_cut_off_answer_counts_only_when_its_line_had_ended() -> None:
    assert verdict(" 18", finish="length") == Verdict(0.0, "unparsed", "cut off within the answer")
    assert verdict(" 18\nThen", finish="length").outcome == "right"


@pytest.mark.parametrize(
    "completion",
    [
        "9" * MEGABYTE,
        "#### " + "9" * MEGABYTE,
        "#### " + "1," * (MEGABYTE // 2),
        "#### " + "1,234," * (MEGABYTE // 6),
        "#### " + "9" * MEGABYTE + "\n",
        "#" * MEGABYTE,
        "#### 1 " * (MEGABYTE // 7),
        "#### " + "\n" * MEGABYTE,
        "#### " + "-" * MEGABYTE + "1",
        "#### " + "²" * MEGABYTE,
        "### #" * (MEGABYTE // 5),
        "#### " + r"\boxed{" * (MEGABYTE // 7) + "1",
    ],
    ids=lambda completion: completion[:12].encode("unicode_escape").decode(),
)
def test_a_megabyte_is_refused_in_linear_time(completion: str) -> None:
    start = time.process_time()
    answer = VERIFIER.score("q", completion, "#### 18", "stop")
    # A search that is not linear takes minutes.
    assert time.process_time() - start < 1
    assert answer.outcome != "right"
    assert len(answer.detail) < 100


@given(st.integers(-(10**39), 10**39), st.booleans(), st.sampled_from(["", ".0", ".", "%", " eggs"]))
def test_every_integer_is_read_as_itself(value: int, grouped: bool, suffix: str) -> None:
    text = f" {value:,}{suffix}" if grouped else f" {value}{suffix}"
    outcome = verdict(text, value).outcome
    assert outcome == ("unparsed" if sum(map(str.isdigit, text)) > 40 else "right")


@given(st.text(alphabet="0123456789+-−.,$%#eE \\{}\n²", max_size=40), st.sampled_from(["stop", "length"]))
def test_no_completion_is_an_error(text: str, finish: str) -> None:
    answer = VERIFIER.score("q", text, "#### 18", finish)
    assert answer.outcome in ("right", "wrong", "unparsed")
    assert answer.score == (answer.outcome == "right")


@pytest.mark.parametrize(
    "reference",
    ["", "eighteen", "18 or 20", "so it is\n18", "####", "#### eighteen", "#### 1 or 2", "#### 7.5", "#### 1,23"],
)
def test_a_malformed_reference_is_the_datas_mistake(reference: str) -> None:
    with pytest.raises(UserError, match=r"the reference of 'How many\?' ends in") as caught:
        VERIFIER.score("How many?", "#### 18", reference, "stop")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside the repository")
@pytest.mark.parametrize(("name", "rows"), [("train.jsonl.gz", 7473), ("test.jsonl.gz", 1319)])
def test_every_reference_of_gsm8k_is_right(name: str, rows: int) -> None:
    problems = read_jsonl(GSM8K / name, DataConfig())
    verdicts = [VERIFIER.score(p.question, p.reference, p.reference, "stop") for p in problems]
    assert [verdict.outcome for verdict in verdicts] == ["right"] * rows


def test_two_thousand_checks_a_second() -> None:
    completion = "Weng earns 12/60 = $0.2 per minute.\n" * 20 + "#### $1,234.00 dollars"
    start = time.process_time()
    for _ in range(1000):
        assert VERIFIER.score("q", completion, completion, "stop").outcome == "right"
    assert time.process_time() - start < 0.5
