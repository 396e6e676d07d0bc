"""math-verify in its processes: what it reads, and thirty answers that were written to hurt."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8core.data.jsonl import read_jsonl
from fp8core.rewards.pool import VerifierPool
from fp8core.rewards.verdict import RIGHT, Verdict
from fp8core.rewards.verifier import Answer

pytest.importorskip("math_verify", reason="needs the extra math")

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
TIMEOUT_SECONDS, CPU_SECONDS = 10.0, 1.0
SLACK = 4.0


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., VerifierPool]) -> VerifierPool:
    return start_pool("math-verify", workers=1, timeout_seconds=TIMEOUT_SECONDS, cpu_seconds=CPU_SECONDS)


def ask(pool: VerifierPool, completion: str, reference: str = "#### 18", finish: str = "stop") -> Verdict:
    return pool.verify([Answer("How many?", completion, reference, finish)])[0]


@pytest.mark.parametrize(
    ("completion", "reference", "outcome"),
    [
        ("so 18", "#### 18", "right"),
        (r"\boxed{18}", "#### 18", "right"),
        ("3 * 6 = 18\n#### 18", "#### 18", "right"),
        ("3 * 7 = 21\n#### 18\nand 5 more words", "#### 18", "right"),
        ("#### 1,234", "#### 1,234", "right"),
        (r"### Step 1" "\n#### Step 2\n" r"so $\boxed{1234}$", "#### 1,234", "right"),
        (r"$\frac{2}{4}$", r"\frac{1}{2}", "right"),
        ("0.5", r"\frac{1}{2}", "right"),
        (r"\boxed{(x+1)^2}", r"x^2+2x+1", "right"),
        (r"it is $\{3, 1\}$", r"so it is \boxed{\{1,3\}}.", "right"),
        ("17 or 18", "#### 18", "right"),
        ("18 or 17", "#### 18", "wrong"),
        (r"\boxed{17}", "#### 18", "wrong"),
        (r"$\frac{1}{3}$", r"\frac{1}{2}", "wrong"),
        ("nothing at all", "#### 18", "unparsed"),
        ("", "#### 18", "unparsed"),
    ],
)
def test_verdicts(pool: VerifierPool, completion: str, reference: str, outcome: str) -> None:
    verdict = ask(pool, completion, reference)
    assert verdict.outcome == outcome
    assert verdict.score == (outcome == "right")
    assert (verdict.detail == "") == (outcome == "right")


def test_a_completion_that_was_cut_off_has_no_answer(pool: VerifierPool) -> None:
    assert ask(pool, "so 18", finish="length") == Verdict(0.0, "unparsed", "cut off before the end of sequence")


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
    problems = read_jsonl(GSM8K / "test.jsonl.gz", "question", "answer")
    verdicts = pool.verify([Answer(p.question, p.reference, p.reference, "stop") for p in problems])
    assert [verdict.outcome for verdict in verdicts] == ["right"] * 1319


HOSTILE = {
    "power tower": "9**9**9**9",
    "power tower in LaTeX": r"the answer is $9^{9^{9^{9}}}$",
    "boxed power tower": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "power of a power": "(10**10)**(10**10)",
    "factorial": "$(10^9)!$",
    "factorials": "$((10!)!)!$",
    "huge sum": r"$\sum_{i=1}^{10^{12}} \frac{1}{i^i}$",
    "integral": r"$\int_0^1 \sin(\sin(\sin(\sin(x^x)))) dx$",
    "limit": r"$\lim_{x \to 0} \frac{\sin(x)^{x^x}}{x!}$",
    "roots": "$" + r"\sqrt{" * 300 + "2" + "}" * 300 + "$",
    "binomials": r"$\binom{10^9}{5\cdot 10^8}$",
    "matrix": r"\boxed{\begin{pmatrix}" + r"1 & 2 \\" * 2000 + r"\end{pmatrix}}",
    "100 kB of digits": "9" * 100_000,
    "100 kB of text": "x" * 100_000,
    "100 kB of sums": "1+" * 50_000 + "1",
    "100 kB of boxes": r"\boxed{" * 14_000 + "18",
    "100 kB of dollars": "$" * 100_000,
    "100 kB of fractions": r"\frac{1}{" * 10_000 + "2",
    "100 kB of answers": "The final answer is 1, 2, 3 and " * 3_200,
    "deep brackets": "(" * 5_000 + "18" + ")" * 5_000,
    "deep braces": "$" + "{" * 3_000 + "18" + "}" * 3_000 + "$",
    "deep signs": "-" * 20_000 + "18",
    "Unicode digits": "١٨ and １８ and ¹⁸",
    "half a surrogate pair": "\ud800 answer \udfff",
    "null bytes": "1\x008\x00" * 1_000,
    "control characters": "\x1b[31m1\x1b[0m\u202e8\u0000",
    "code": "__import__('os').system('touch {marker}')",
    "code in a box": r"\boxed{__import__('os').system('touch {marker}')}",
    "code in brackets": "(1).__class__.__base__.__subclasses__()",
    "not a number": r"\boxed{NaN}",
    "infinity over infinity": r"$\frac{\infty}{\infty}$",
    "division by zero": "1/0",
    "two answers": r"\boxed{17} and \boxed{19}",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_bounded_and_the_pool_lives(pool: VerifierPool, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    assert ask(pool, "18") == RIGHT
    begun = time.monotonic()
    verdict = ask(pool, HOSTILE[name].replace("{marker}", str(marker)))
    assert time.monotonic() - begun < TIMEOUT_SECONDS + SLACK
    assert (verdict.score, verdict.outcome != "right", verdict.detail != "") == (0.0, True, True)
    assert ask(pool, "18") == RIGHT
    assert not marker.exists()
