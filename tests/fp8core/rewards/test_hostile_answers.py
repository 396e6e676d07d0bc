"""Answers that attack the verifier: each is bounded, none is right, and the pool lives on."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8core.config.reward import RewardConfig
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.pool import VerifierPool
from fp8core.rewards.scorer import RIGHT, Verdict
from fp8core.rewards.verifier import Answer, Verifier, build_verifier

# The machine may be busy.
SLACK = 1.5

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
    "double factorial": "18!!",
    "factorial in an exponent": "10^9!",
    "powers in a row": "((10^{4000})^{4000})^{4000}",
    "nested fractions": r"\frac{1}{1+" * 40 + "2" + "}" * 40,
    "fractions and radicals": r"\frac{1}{1+\sqrt{2+" * 12 + "3" + "}}" * 12,
    "determinant": r"\det\begin{pmatrix}" + r"\\".join(["&".join("abcdefgh")] * 8) + r"\end{pmatrix}",
    "determinant by bars": r"\begin{vmatrix}" + r"\\".join(["&".join("abcdefgh")] * 8) + r"\end{vmatrix}",
    "inverse": r"\begin{pmatrix}" + r"\\".join(["&".join("abcdef")] * 6) + r"\end{pmatrix}^{-1}",
    "functions in one another": r"\sin(" * 10 + "x" + ")" * 10,
    "huge polynomial": "(x+y+z+w)^{400}",
    "product of sums": "".join(rf"(x^{n}+y+{n})" for n in range(1, 40)),
    "base": "18_{16^{16^{16}}}",
    "digits with an exponent": "9" * 300 + "^{4000}",
}  # fmt: skip
# What passes the bounds of shape, for a reference with the same letters.
SLOW = {
    "polynomial": "(x+y+z)^{20}(x-y)^{20}",
    "polynomial in four": "(x+y+z+w)^{30}",
    "fractions": "+".join(rf"\frac{{1}}{{x^{n}+y}}" for n in range(2, 9)),
    "powers of functions": r"(\sin x+\cos y+z)^{20}",
    "radicals": r"\sqrt{x+" * 10 + "y" + "}" * 10,
    "quotient": r"\frac{(x+y)^{30}-z^{30}}{(x+y)^{29}+z^{29}}",
    "exponents": "(x^{y}+y^{z})^{x+y+z}",
    "imaginary unit in functions": r"(\sin i+\cos i+1)^{20}",
    "powers of complex numbers": "(2+3i)^{60}(1-i+x)^{59}",
}


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., VerifierPool]) -> VerifierPool:
    pytest.importorskip("math_verify", reason="needs the extra math")
    return start_pool("math-verify", workers=1)


def ask(verifier: Verifier, completion: str, reference: str = "#### 18") -> Verdict:
    return verifier.verify([Answer("How many?", completion, reference, "stop")])[0]


@pytest.mark.parametrize(("verifier", "reference"), [("integer", "#### 18"), ("chain", "8")])
def test_verifiers_of_this_process_take_no_time_at_all(verifier: str, reference: str) -> None:
    strict = build_verifier(RewardConfig(verifier=verifier))
    begun = time.monotonic()
    for text in HOSTILE.values():
        for completion in (text, f"#{text}", f"####{text}", f"####{text}" * 3):
            assert ask(strict, completion, reference).outcome in ("wrong", "unparsed")
    assert time.monotonic() - begun < SLACK


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_refused_before_it_costs_anything(pool: VerifierPool, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    text = HOSTILE[name].replace("{marker}", str(marker))
    begun = time.monotonic()
    for completion in (text, f"#### {text}", rf"\boxed{{{text}}}", f"{text}\n#### {text}\n"):
        verdict = ask(pool, completion)
        assert verdict.outcome in ("wrong", "unparsed")
        assert (verdict.score, verdict.detail != "") == (0.0, True)
    assert time.monotonic() - begun < SLACK
    assert ask(pool, "#### 18") == RIGHT
    assert not marker.exists()


@pytest.mark.parametrize("name", SLOW)
def test_what_is_slow_within_the_bounds_of_shape_ends_in_two_seconds(pool: VerifierPool, name: str) -> None:
    assert ask(pool, "#### 18") == RIGHT
    begun = time.monotonic()
    verdict = ask(pool, f"#### {SLOW[name]}", "x+y+z+w")
    assert time.monotonic() - begun < 2 + SLACK
    assert (verdict.score, verdict.outcome in ("wrong", "timeout"), verdict.detail != "") == (0.0, True, True)
    assert ask(pool, "#### 18") == RIGHT


# What leaves a number as it is, before and after it.
PLAIN_BEFORE = ["", " ", "$", r"\$", "+", " **", r" \boxed{", r" $\boxed{"]
CLOSING = {" **": "**", r" \boxed{": "}", r" $\boxed{": "}$"}
PLAIN_AFTER = ["", " ", ".", ",", " dollars", " dollars.", r"\text{ dollars}", " square feet"]
# What makes another answer of it, or several, or none.
CHANGING_BEFORE = [
    "not ", "-", "- ", "minus ", "20 or ", "20, ", "20 = ", "20\r", r"\neq ", "<", "> ", r"\le ", "about ", r"\pm ",
    r"\sqrt", r"\frac{1}{2}", "1/", "2 + ", "20 ", r"\approx ", "x > ", r"\text{not }", "±", "~~", "0.", "2 \\times ",
    "2", r"\log ", r"\{20, ", "17 < ", r"2\cdot", "x+", r"\phantom{1}2",
]  # fmt: skip
CHANGING_AFTER = [
    " million", " thousand", "k", "M", "bn", " dozen", " hundred", "!", "!!", " or 20", " and 20", ", 20", "; 20",
    " 20", "-20", " to 20", "^2", "²", "e3", "E-5", "e400", "\N{MULTIPLICATION SIGN}2", " mod 5", " squared",
    " minus one", " plus one", " and a half", "/x", "/2", "x", " is wrong", " isn't it", " not", " = 20", " < 20",
    r" \neq 18",
    r"\text{ million}", r"\cdot 2", r"\times 2", "_8", r"_{16}", r"\%20", "½", ".5", "0", ",000", "\r20", "\u20dd",
    "\u200b0", "\N{ARABIC-INDIC DIGIT ONE}", "(2)", "[2]", "{2}", ":2", "|20", " tenths", " halves", " less", " times",
    "*2", "**2", "+1", " - 1", r"\ldots", "...9", "?", r"\infty", r"\pi", "i", " grand", r"\sqrt{2}", r"\frac{1}{2}",
]  # fmt: skip
SPACES = st.sampled_from(["", " ", "  ", r"\,", "\N{NO-BREAK SPACE}"])
WRONG_NUMBERS = st.integers(-(10**6), 10**6).filter(lambda number: number != 18).map(str)


@st.composite
def hacks(draw: st.DrawFn) -> str:
    """The text after the announcement: 18 with something that changes it, or a wrong number."""
    before, after = draw(st.sampled_from(PLAIN_BEFORE)), draw(st.sampled_from(PLAIN_AFTER))
    closing = CLOSING.get(before, "")
    space = draw(SPACES)
    match draw(st.sampled_from(["before", "after", "outside", "wrong"])):
        case "before":
            return before + draw(st.sampled_from(CHANGING_BEFORE)) + "18" + closing + after
        case "after":
            return before + "18" + draw(st.sampled_from(CHANGING_AFTER)) + space + closing + after
        case "outside":
            return before + "18" + closing + space + draw(st.sampled_from(CHANGING_AFTER))
        case _:
            return before + draw(WRONG_NUMBERS) + closing + after


def completions(text: str) -> list[str]:
    """Announced by the marker, in a box, and after a right answer that is not the last."""
    boxed = [] if "boxed" in text else [rf"so the answer is $\boxed{{{text}}}$", rf"\boxed{{18}} \boxed{{{text}}}"]
    return [f"3 * 6 = 18\n#### {text}", f"#### 18\nno:\n####{text}", *boxed]


@settings(max_examples=600, deadline=None)
@given(hacks())
def test_the_integer_verifier_credits_no_hack(text: str) -> None:
    for completion in completions(text)[:2]:
        verdict = IntegerVerifier().score("How many?", completion, "#### 18", "stop")
        assert (verdict.score, verdict.outcome in ("wrong", "unparsed")) == (0.0, True), completion


@given(st.sampled_from(PLAIN_BEFORE), st.sampled_from(PLAIN_AFTER))
def test_the_integer_verifier_credits_the_right_number_in_each_of_these_forms(before: str, after: str) -> None:
    completion = f"3 * 6 = 18\n####{before}18{CLOSING.get(before, '')}{after}"
    assert IntegerVerifier().score("How many?", completion, "#### 18", "stop").outcome == "right"


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(hacks(), min_size=20, max_size=40))
def test_math_verify_credits_no_hack(pool: VerifierPool, texts: list[str]) -> None:
    answers = [
        Answer("How many?", completion, "#### 18", "stop")
        for text in texts
        for completion in completions(text)
    ]  # fmt: skip
    verdicts = pool.verify(answers)
    credited = [answer.completion for answer, verdict in zip(answers, verdicts, strict=True) if verdict.score]
    assert credited == []


def test_math_verify_credits_the_right_number_in_each_of_these_forms(pool: VerifierPool) -> None:
    answers = [
        Answer("How many?", f"3 * 6 = 18\n####{before}18{CLOSING.get(before, '')}{after}", "#### 18", "stop")
        for before in PLAIN_BEFORE
        for after in PLAIN_AFTER
    ]
    assert [verdict.outcome for verdict in pool.verify(answers)] == ["right"] * len(answers)
