"""Speed of the verifiers in answers a second, and the cost of an answer that hangs.

    python -m benchmarks.verifier_speed

Writes benchmarks/results/verifier_speed.json and prints the table of docs/results/service.md. It takes a minute on two
cores; `math-verify` needs the extra `math`.

- Answers are different texts of some 700 characters in the manner of GSM8K and MATH, 8 to a prompt, half of them right.
  For `integer` and for a function of the user's own, they end in an integer after `####`. For `math-verify` they end in
  a boxed integer, fraction or decimal, and separately in a polynomial, which is factored and simplified. Counted is
  `Verifier.verify` on all of them, without the start of the processes; the median of three.
- Hanging: 8 expressions among 2,000 answers that sympy does not finish, with the limits of the configuration. Refused:
  8 power towers, which are too large in shape for the library to see.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import RESULTS, Row, provenance, table, write_rows
from fp8core.config.reward import RewardConfig
from fp8core.rewards.verifier import Answer, Verifier, build_verifier

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
    rows: list[Row] = [
        {"kind": "verifier_speed", "verifier": name, "answers_a_second": found, "bound": BOUNDS.get(name)}
        for name, found in speeds.items()
    ]
    hostile = {
        "none": hanging([], "18"),
        "refused": hanging([f"{n}^{{9^{{9^{{9}}}}}}" for n in range(2, 10)], "18"),
        "hanging": hanging([f"(x+y+z)^{{{n}}}(x-y)^{{20}}" for n in range(20, 28)], "x+y+z"),
    }
    rows += [{"kind": "hostile_answers", "case": case, **found} for case, found in hostile.items()]
    rows = [{**row, "workers": WORKERS, **provenance()} for row in rows]
    write_rows(RESULTS / "verifier_speed.json", rows)
    print(*speed_tables(rows), sep="\n\n")


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


def hanging(texts: list[str], reference: str) -> dict[str, Any]:
    """Cost of such answers among answers that are read in a millisecond."""
    answers = [*(Answer("How many?", f"#### {text}", reference, "stop") for text in texts), *numbers(2_000)]
    verifier = build_verifier(RewardConfig(verifier="math-verify", workers=WORKERS))
    try:
        began = time.perf_counter()
        verdicts = verifier.verify(answers)
        took = time.perf_counter() - began
    finally:
        verifier.close()
    timeouts = sum(verdict.outcome == "timeout" for verdict in verdicts)
    return {"answers": len(answers), "hostile": len(texts), "timeouts": timeouts, "seconds": took}


def speed_tables(rows: Sequence[Row]) -> list[str]:
    """The tables of docs/results/service.md."""
    speeds, hostile = ([r for r in rows if r["kind"] == kind] for kind in ("verifier_speed", "hostile_answers"))
    kinds = {"none": "no hostile answer", "refused": "8 power towers", "hanging": "8 polynomials"}
    return [
        table(
            ["verifier", "answers a second", "bound"],
            [
                [r["verifier"], f"{r['answers_a_second']:,.0f}", "" if r["bound"] is None else f"{r['bound']:,.0f}"]
                for r in speeds
            ],
        ),
        table(
            ["among 2,000 answers", "timeouts", "seconds"],
            [[kinds[row["case"]], str(row["timeouts"]), f"{row['seconds']:.1f}"] for row in hostile],
        ),
    ]


if __name__ == "__main__":
    main()
