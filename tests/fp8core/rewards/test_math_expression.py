"""What math-verify reads, in its processes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8core.config.data import DataConfig
from fp8core.data.source import read_jsonl
from fp8core.rewards.pool import VerifierPool
from fp8core.rewards.scorer import Verdict
from fp8core.rewards.verifier import Answer

pytest.importorskip("math_verify", reason="needs the extra math")

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., VerifierPool]) -> VerifierPool:
    return start_pool("math-verify", workers=1)


def ask(pool: VerifierPool, completion: str, reference: str = "#### 18", finish: str = "stop") -> Verdict:
    return pool.verify([Answer("How many?", completion, reference, finish)])[0]


@pytest.mark.parametrize(
    ("completion", "reference", "outcome"),
    [
        ("3 * 6 = 18\n#### 18", "#### 18", "right"),
        (r"### Step 1" "\n#### Step 2\n" r"so $\boxed{1234}$", "#### 1,234", "right"),
        (r"it is $\boxed{\{3, 1\}}$", r"so it is \boxed{\{1,3\}}.", "right"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", "wrong"),
        (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "right"),
        (r"\boxed{(-\infty, 3)\cup(5,\infty)}", r"(-\infty,3) \cup (5, \infty)", "right"),
        (r"\boxed{\sin 2x}", r"2\sin x\cos x", "right"),
        (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}", "right"),
        (r"\boxed{10,\!080}", "10080", "right"),
        (r"\boxed{e^{x^2}}", "e^{x^2}", "right"),
        (r"\boxed{x^{100}-1}", "(x^{50}-1)(x^{50}+1)", "right"),
        (r"\boxed{\log_2 8}", "3", "right"),
        (r"\boxed{3+4i}", "4i+3", "right"),
        (r"\boxed{i^2}", "-1", "right"),
        (r"\boxed{\frac{1}{i}}", "-i", "right"),
        (r"\boxed{-i}", r"\frac{1}{i}", "unparsed"),
        (r"\boxed{1}", "|i|", "unparsed"),
        (r"\boxed{\sqrt{-4}}", "2i", "right"),
        (r"\boxed{e^{i\pi}}", "-1", "right"),
        (r"\boxed{(x+i)(x-i)}", "x^2+1", "right"),
        (r"\boxed{-i, i}", "i, -i", "right"),
        (r"\boxed{3-4i}", "3+4i", "wrong"),
        (r"\boxed{e^{2i\pi/3}}", r"\frac{1+i\sqrt{3}}{2}", "wrong"),
        (r"\boxed{i!}", "i!", "right"),
        (r"\boxed{x_i+1}", "1+x_i", "right"),
        # A variable of the reference: its square is no number.
        (r"\boxed{1+i^2}", "i^2+1", "right"),
        (r"\boxed{-n}", "i^2 n", "unparsed"),
        (r"\boxed{\frac{-1+i}{2}}", r"\frac{i(i+1)}{2}", "unparsed"),
        (r"\boxed{i+1}", r"\frac{i(i+1)}{2}", "wrong"),
        (r"\boxed{-2, 2}", r"\pm 2", "right"),
        (r"\boxed{\pm 1, 3}", "-1, 1, 3", "right"),
        (r"\boxed{\pm 2}", "(2,-2)", "unparsed"),
        (r"\boxed{\pm 2, 3}", "2,-2", "wrong"),
        (r"\boxed{0.3}", r"0.\overline{3}", "wrong"),
        (r"\boxed{\frac16}", r"0.1\overline{6}", "right"),
        (r"\boxed{1.\overline{09}}", r"\frac{12}{11}", "right"),
        (r"\boxed{-0.\dot{3}}", r"-\frac13", "right"),
        (r"\boxed{0.\dot{1}4285\dot{7}}", r"\frac17", "right"),
        (r"\boxed{2 0.\overline{3}}", r"\frac23", "unparsed"),
        (r"\boxed{\overline{BA}}", r"\overline{AB}", "wrong"),
        (r"\boxed{AB}", r"\overline{AB}", "wrong"),
        (r"\boxed{33.\overline{3}\%}", r"\frac13", "right"),
        ("#### 50%", "50", "right"),
        ("#### 50%", r"\frac12", "right"),
        (r"\boxed{50}\%.", r"\frac12", "right"),
        (r"答案：\boxed{１２，３４５}。", "12345", "right"),
        ("#### ٣٫٥", "3.5", "right"),
        ("#### 5 яблок", "5", "right"),
        ("#### 5 тысяч", "5", "unparsed"),
        ("#### 5</answer><|im_end|>", "5", "right"),
        ("", "#### 18", "unparsed"),
    ],
)
def test_verdicts(pool: VerifierPool, completion: str, reference: str, outcome: str) -> None:
    verdict = ask(pool, completion, reference)
    assert verdict.outcome == outcome
    assert verdict.score == (outcome == "right")
    assert (verdict.detail == "") == (outcome == "right")


def test_a_completion_that_was_cut_off_has_no_answer(pool: VerifierPool) -> None:
    assert ask(pool, "#### 18", finish="length") == Verdict(0.0, "unparsed", "cut off before the end of sequence")


def test_a_reference_without_an_expression_is_the_datas_mistake(pool: VerifierPool) -> None:
    faults = pool.faults([("How many?", r"\frac{1}{2}"), ("How many?", "####"), ("How many?", "#### 18")])
    assert [fault is None for fault in faults] == [True, False, True]
    assert str(faults[1]).startswith("reward.verifier=math-verify: the reference of 'How many?' ends in '####'")


def test_the_record_names_the_libraries(pool: VerifierPool) -> None:
    described = pool.describe()
    assert described["verifier"] == "math-verify"
    assert {"math-verify", "sympy", "latex2sympy2-extended"} < described.keys()


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside the repository")
def test_every_reference_of_gsm8k_is_right(pool: VerifierPool) -> None:
    problems = read_jsonl(GSM8K / "test.jsonl.gz", DataConfig())
    verdicts = pool.verify([Answer(p.question, p.reference, p.reference, "stop") for p in problems])
    assert [verdict.outcome for verdict in verdicts] == ["right"] * 1319
