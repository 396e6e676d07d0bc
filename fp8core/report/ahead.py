"""Charts of runs that generate ahead: staleness, what an update hides, and by the age of a token its lag."""

import math
from collections.abc import Sequence

from fp8core.report.charts import Chart, Curve, Series, curve_chart
from fp8core.report.summary import LAG_ESS, OUTSIDE_CLIP, STALENESS, STEP, TOKENS, History

_HIDDEN = "rollout/tokens_beside_update"
AHEAD = (
    Curve("Staleness of tokens", "versions, mean of the step", STALENESS, include=(0.0, 1.0)),
    Curve(
        "Generation beside the update",
        "tokens of the step's own",
        _HIDDEN,
        lambda row: row[_HIDDEN] / (row.get(TOKENS) or math.nan),
        include=(0.0, 1.0),
        note="Tokens that were written beside the update, over those that it learned from. 1: nothing waits.",
    ),
)
BY_AGE = (
    Curve(
        "Effective sample size by age",
        "ESS / tokens",
        LAG_ESS,
        include=(0.0, 1.0),
        note="Of the policy before the update against that which wrote a token; weights truncated at 2. 1: they are "
        "equal.",
    ),
    Curve(
        "Clip fraction by age",
        "share of tokens",
        OUTSIDE_CLIP,
        include=(0.0,),
        note="Tokens whose ratio of these two policies is beyond loss.clip_low or loss.clip_high.",
    ),
)
"""The metric of each has a suffix for the age."""


def ahead_charts(runs: Sequence[tuple[str, History]]) -> list[Chart]:
    """Staleness, what an update hides, and by age sample size and clip; none where no run generates ahead."""
    ahead = [(label, history) for label, history in runs if any(STALENESS in row for row in history)]
    if not ahead:
        return []
    return [*(curve_chart(curve, runs) for curve in AHEAD), *(_by_age(curve, ahead) for curve in BY_AGE)]


def _by_age(curve: Curve, runs: Sequence[tuple[str, History]]) -> Chart:
    """A line for each age of each run."""
    series, prefix = list[Series](), f"{curve.metric}_age_"
    for label, history in runs:
        for name in sorted({name for row in history for name in row if name.startswith(prefix)}, key=_first_age):
            rows = [row for row in history if name in row]
            age = f"age {name.removeprefix(prefix).replace('_', ' to ')}"
            shown = age if len(runs) == 1 else f"{label}, {age}"
            series.append(Series(shown, [row[STEP] for row in rows], [row[name] for row in rows], len(series)))
    return Chart(curve.title, "step", curve.y_label, series, include=curve.include, note=curve.note)


def _first_age(name: str) -> int:
    return int(name.partition("_age_")[2].partition("_")[0])
