"""Answers that were written to hurt: each is bounded, none is right, and the pool lives on."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8core.config.run import RewardConfig
from fp8core.rewards.pool import VerifierPool
from fp8core.rewards.verdict import RIGHT, Verdict
from fp8core.rewards.verifier import Answer, Verifier, build_verifier

TIMEOUT_SECONDS, CPU_SECONDS = 10.0, 1.0
# The machine may be busy.
SLACK = 4.0

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


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., VerifierPool]) -> VerifierPool:
    pytest.importorskip("math_verify", reason="needs the extra math")
    return start_pool("math-verify", workers=1, timeout_seconds=TIMEOUT_SECONDS, cpu_seconds=CPU_SECONDS)


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
