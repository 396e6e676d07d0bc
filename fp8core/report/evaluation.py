"""An evaluation for people: one table of estimates with their intervals, one of outcomes."""

from collections.abc import Sequence

from fp8core.evaluation.measure import Estimate
from fp8core.evaluation.result import EvaluationResult
from fp8core.report.columns import columns


def evaluation_text(result: EvaluationResult) -> str:
    """What was asked, then a line for each precision and for its difference from the first."""
    of = result.target if result.step is None else f"{result.target}, step {result.step}"
    drawn = "greedy" if result.temperature == 0 else f"{result.samples} at temperature {result.temperature:g}"
    first = next(iter(result.precisions))
    names = list(result.precisions[first].estimates)
    estimates = [
        ("precision", *names),
        *((name, *_cells(done.estimates, names, "")) for name, done in result.precisions.items()),
        *((f"{name} - {first}", *_cells(by, names, "+")) for name, by in result.differences.items()),
    ]
    outcomes = [
        ("precision", *result.precisions[first].outcomes, "tokens"),
        *(
            (name, *map(str, done.outcomes.values()), f"{done.length_mean:.1f}")
            for name, done in result.precisions.items()
        ),
    ]
    return "\n".join(
        [
            f"{of}: {result.prompts} prompts of {result.data}, {drawn}; {result.confidence:.0%} intervals",
            "",
            *columns(estimates),
            "",
            *columns(outcomes),
        ]
    )


def _cells(estimates: dict[str, Estimate], names: Sequence[str], sign: str) -> list[str]:
    return [
        f"{estimate.value:{sign}.4f} [{estimate.low:{sign}.4f}, {estimate.high:{sign}.4f}]"
        for estimate in (estimates[name] for name in names)
    ]
