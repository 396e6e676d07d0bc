"""How many answers a second the verifiers check, and what an answer that hangs costs.

    python benchmarks/verifier_speed.py

Writes benchmarks/results/verifier_speed.json and prints the table of docs/verifiers.md. It takes a minute on two cores;
`math-verify` needs the extra `math`.

- Answers are different texts of some 700 characters in the manner of GSM8K and MATH, 8 to a prompt, half of them right:
  an integer after `####` for `integer` and for a function of the user's own; a boxed integer, fraction or decimal for
  `math-verify`, and separately a polynomial, which is factored and simplified. Counted is `Verifier.verify` on all of
  them, without the start of the processes; the median of three.
- Hanging: 8 power towers among 2,000 answers, with 1 s of processor time each.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from fp8core.config.run import RewardConfig
from fp8core.rewards.verifier import Answer, Verifier, build_verifier
from fp8core.store.versions import git_state, hardware, library_versions

RESULTS = Path(__file__).parent / "results" / "verifier_speed.json"
BOUNDS = {"integer": 2000.0, "math-verify": 200.0}
WORKERS, REPEATS, GROUP = 2, 3, 8
FUNCTION = """
def score(prompt, completion, reference, finish):
    return completion.rpartition("####")[2].strip() == reference.rpartition("####")[2].strip()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verifier.py"
        file.write_text(FUNCTION)
        speeds = {
            "integer": speed(RewardConfig(verifier="integer"), list(integers(20_000))),
            "function": speed(RewardConfig(verifier=f"{file}:score", workers=WORKERS), list(integers(20_000))),
            "math-verify": speed(RewardConfig(verifier="math-verify", workers=WORKERS), list(numbers(2_000))),
            "math-verify, polynomials": speed(
                RewardConfig(verifier="math-verify", workers=WORKERS), list(polynomials(400))
            ),
        }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git_state(Path(__file__).parent),
        "versions": library_versions(),
        "hardware": hardware(),
        "workers": WORKERS,
        "bounds": BOUNDS,
        "answers_a_second": speeds,
        "hanging": hanging(),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


def integers(count: int) -> Iterator[Answer]:
    """Solutions that end in `#### n`, every second one wrong by 1."""
    for index in range(count):
        n = index // GROUP
        yield Answer("How many?", f"{working(index)}\n#### {n + index % 2}", f"#### {n}", "stop")


def numbers(count: int) -> Iterator[Answer]:
    """Solutions that end in a boxed number, every second one wrong by 1."""
    for index in range(count):
        n = index // GROUP + 2
        said = n + index % 2
        boxed, reference = (
            (f"{said}", f"{n}"),
            (rf"\frac{{{2 * said}}}{{6}}", rf"\frac{{{n}}}{{3}}"),
            (f"{said / 4}", rf"\frac{{{n}}}{{4}}"),
        )[n % 3]
        yield Answer("How many?", boxed_solution(index, boxed), reference, "stop")


def polynomials(count: int) -> Iterator[Answer]:
    """Solutions that end in a boxed polynomial, every second one wrong by 1."""
    for index in range(count):
        n = index // GROUP + 2
        said = f"(x+{n + index % 2})^2"
        yield Answer("Which one?", boxed_solution(index, said), f"x^2+{2 * n}x+{n * n}", "stop")


def boxed_solution(index: int, boxed: str) -> str:
    """A text that ends in the answer."""
    return rf"{working(index)} The answer is $\boxed{{{boxed}}}$."


def working(index: int) -> str:
    """Some 700 characters that differ from index to index."""
    return " ".join(f"Weng earns {index + hour}/60 = ${hour / 5:.2f} in minute {hour}." for hour in range(1, 16))


def speed(config: RewardConfig, answers: list[Answer]) -> float:
    """Answers checked in a second."""
    verifier = build_verifier(config)
    try:
        return len(answers) / median(seconds(verifier, answers) for _ in range(REPEATS))
    finally:
        verifier.close()


def seconds(verifier: Verifier, answers: list[Answer]) -> float:
    """Of one call; half of the answers are right."""
    began = time.perf_counter()
    verdicts = verifier.verify(answers)
    took = time.perf_counter() - began
    assert [verdict.outcome for verdict in verdicts] == ["right", "wrong"] * (len(answers) // 2)
    return took


def hanging() -> dict[str, Any]:
    """Power towers among answers that are read in a millisecond."""
    towers = [Answer("How many?", f"{n}**9**9**9**9", "#### 18", "stop") for n in range(2, 10)]
    answers = [*towers, *numbers(2_000)]
    verifier = build_verifier(RewardConfig(verifier="math-verify", workers=WORKERS, cpu_seconds=1.0))
    try:
        began = time.perf_counter()
        verdicts = verifier.verify(answers)
        took = time.perf_counter() - began
    finally:
        verifier.close()
    timeouts = sum(verdict.outcome == "timeout" for verdict in verdicts)
    return {"answers": len(answers), "timeouts": timeouts, "cpu_seconds": 1.0, "seconds": took}


def table(result: dict[str, Any]) -> str:
    """The table of the documentation."""
    lines = ["| verifier | answers a second | bound |", "| --- | --- | --- |"]
    for name, value in result["answers_a_second"].items():
        bound = f"{BOUNDS[name]:,.0f}" if name in BOUNDS else ""
        lines.append(f"| {name} | {value:,.0f} | {bound} |")
    hung = result["hanging"]
    lines += ["", f"{hung['answers']} answers, {hung['timeouts']} of which hang: {hung['seconds']:.1f} s"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
