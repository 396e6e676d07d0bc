import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8core.config.data import DataConfig
from fp8core.data.source import read_file
from fp8core.errors import UserError
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.scorer import Verdict

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
VERIFIER = IntegerVerifier()
MEGABYTE = 1_000_000


def verdict(answer: str, expected: int = 18, finish: str = "stop") -> Verdict:
    return VERIFIER.score("How many?", f"First 3 * 6 = 18.\n####{answer}", f"3 * 6 = 18\n#### {expected}", finish)


def test_a_verdict_says_what_was_read() -> None:
    assert verdict(" $12,345.00", 12345) == Verdict(1.0, "right", "")
    assert verdict(" 19") == Verdict(0.0, "wrong", "answer 19")
    assert verdict(" 72.50") == Verdict(0.0, "wrong", "72.5 is no integer")
    assert verdict(" 18 eggs") == Verdict(0.0, "unparsed", "not one number alone: '18 eggs'")
    assert verdict("\n18") == Verdict(0.0, "unparsed", "no number")
    assert verdict(" " + "9" * 41) == Verdict(0.0, "unparsed", "more than 40 digits")
    assert VERIFIER.score("q", "The answer is 18.", "#### 18", "stop") == Verdict(0.0, "unparsed", "no ####")


def test_a_cut_off_answer_counts_only_when_its_line_had_ended() -> None:
    assert verdict(" 18", finish="length") == Verdict(0.0, "unparsed", "cut off within the answer")
    assert verdict(" 18\nThen", finish="length").outcome == "right"


@pytest.mark.parametrize("noise", ["9", "1,", "#", "#### 1 ", "\n", "-", "²", "### #", r"\boxed{", "(", "<a>", " "])
def test_a_megabyte_is_refused_in_linear_time(noise: str) -> None:
    start = time.process_time()
    answer = VERIFIER.score("q", "#### " + noise * (MEGABYTE // len(noise)), "#### 18", "stop")
    # A search that is not linear takes minutes.
    assert time.process_time() - start < 1
    assert answer.outcome != "right"
    assert len(answer.detail) < 100


@given(st.integers(-(10**39), 10**39), st.booleans(), st.sampled_from(["", ".0", ".", "%", "</answer>"]))
def test_every_integer_is_read_as_itself(value: int, grouped: bool, suffix: str) -> None:
    text = f" {value:,}{suffix}" if grouped else f" {value}{suffix}"
    digits = sum(map(str.isdigit, text)) - (suffix == ".0")
    assert verdict(text, value).outcome == ("unparsed" if digits > 40 else "right")


@given(st.text(alphabet="0123456789+-−.,$%#eE \\{}\n²", max_size=40), st.sampled_from(["stop", "length"]))
def test_no_completion_is_an_error(text: str, finish: str) -> None:
    answer = VERIFIER.score("q", text, "#### 18", finish)
    assert answer.outcome in ("right", "wrong", "unparsed")
    assert answer.score == (answer.outcome == "right")


@pytest.mark.parametrize("reference", ["", "eighteen", "18 or 20", "so it is\n18", "####", "#### 7.5", "#### 1,23"])
def test_a_malformed_reference_is_the_datas_mistake(reference: str) -> None:
    with pytest.raises(UserError, match=r"the reference of 'How many\?' ends in") as caught:
        VERIFIER.score("How many?", "#### 18", reference, "stop")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside the repository")
@pytest.mark.parametrize(("name", "rows"), [("train.jsonl.gz", 7473), ("test.jsonl.gz", 1319)])
def test_every_reference_of_gsm8k_is_right(name: str, rows: int) -> None:
    problems = read_file(GSM8K / name, DataConfig())
    verdicts = [VERIFIER.score(p.question, p.answer, p.answer, "stop") for p in problems]
    assert [verdict.outcome for verdict in verdicts] == ["right"] * rows
