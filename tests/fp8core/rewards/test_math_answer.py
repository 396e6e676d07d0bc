"""Verdicts by math-verify; docs/reference/verifiers.md has a table of them, each row of which is a test as well."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8core.rewards.final_answer import Unreadable, final_answer
from fp8core.rewards.scorer import RIGHT, Verdict
from fp8core.rewards.verifier import ScoreRequest, VerifierPool

# Each alone, after the marker and in a box.
HOSTILE = {
    "power tower": "9^{9^{9^{9}}}",
    "huge sum": r"\sum_{i=1}^{10^{12}} \frac{1}{i^i}",
    "roots": r"\sqrt{" * 60 + "2" + "}" * 60,
    "100 kB of boxes": r"\boxed{" * 14_000 + "18",
    "code": "__import__('os').system('touch {marker}')",
    "determinant": r"\begin{vmatrix}" + r"\\".join(["&".join("abcdefgh")] * 8) + r"\end{vmatrix}",
}


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., VerifierPool]) -> VerifierPool:
    return start_pool("math-verify", workers=1)


def ask(pool: VerifierPool, completion: str, reference: str = "#### 18", finish: str = "stop") -> Verdict:
    return pool.verify([ScoreRequest("How many?", completion, reference, finish)])[0]


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
        (r"\boxed{3+4i}", "4i+3", "right"),
        (r"\boxed{\text{east}}", "East", "right"),
        ("#### ٣٥", "35", "right"),
        ("#### 5</answer><|im_end|>", "5", "right"),
        ("", "#### 18", "unparsed"),
    ],
)
def test_verdicts(pool: VerifierPool, completion: str, reference: str, outcome: str) -> None:
    verdict = ask(pool, completion, reference)
    assert verdict.outcome == outcome
    assert verdict.score == (outcome == "right")
    assert (verdict.detail == "") == (outcome == "right")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_bounded_gets_no_credit_and_runs_no_code(
    pool: VerifierPool, tmp_path: Path, name: str
) -> None:
    text = HOSTILE[name].replace("{marker}", str(tmp_path / "marker"))
    begun = time.monotonic()
    for completion in (f"#### {text}", rf"\boxed{{{text}}}"):
        verdict = ask(pool, completion)
        assert (verdict.score, verdict.detail != "") == (0.0, True)
        assert verdict.outcome != "right"
    assert time.monotonic() - begun < 10, "two seconds each"
    assert ask(pool, "#### 18") == RIGHT
    assert not (tmp_path / "marker").exists()


def test_a_reference_without_an_expression_is_the_datas_mistake(pool: VerifierPool) -> None:
    faults = pool.faults([("How many?", r"\frac{1}{2}"), ("How many?", "####"), ("How many?", "#### 18")])
    assert [fault is None for fault in faults] == [True, False, True]
    assert str(faults[1]).startswith("reward.verifier=math-verify: the reference of 'How many?' ends in '####'")


@pytest.mark.parametrize("noise", ["$", "\\", "{", r"\boxed{", "-", "<a>"])
def test_a_long_text_costs_no_more_than_a_short_one(noise: str) -> None:
    begun = time.monotonic()
    for text in (noise * 100_000 + r"\boxed{18}", r"\boxed{18}" + noise * 100_000, r"\boxed{" + noise * 100_000):
        with contextlib.suppress(Unreadable):
            assert final_answer(text) == "18"
    assert time.monotonic() - begun < 2
