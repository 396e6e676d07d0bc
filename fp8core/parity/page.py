"""The report of a parity run: its verdict, curves of the variants, and what changed since it last passed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from fp8core.config.parity import ParityConfig
from fp8core.errors import printable_lines
from fp8core.parity.measure import RATIO, STRESS, VARIANTS, WEIGHT, Measured
from fp8core.parity.verdict import ParityResult, changes
from fp8core.report.chart import Bound, Chart, collapsed, counted, short
from fp8core.report.pages import Section, charted, render_page
from fp8core.report.run_data import RunData
from fp8core.report.run_verdict import answer
from fp8core.report.summary import MISSING
from fp8core.report.tables import Table
from fp8core.report.training_charts import ALIGNMENT, LEARNING, WORST_TOKEN, Curve, curve_chart
from fp8core.store.metrics import ESS, K3, STEP, TMPE, History

WEIGHTS = (
    Curve("Mean weight of the mismatch", "mean exp(d) of the step", WEIGHT, bounds=(Bound("expected: 1", 1.0),)),
    Curve(
        "Mean weight of the updates",
        "mean of p / p at the start of the step",
        RATIO,
        bounds=(Bound("expected: 1", 1.0),),
        note="Above or below 1 by chance alone, while a step's tokens are new to each of its updates.",
    ),
)
Runs = Mapping[str, Sequence[RunData]]
"""The trainings of each variant, one a seed."""


def mean_history(runs: Sequence[RunData]) -> History:
    gathered: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in run.history:
            for metric, value in row.items():
                gathered[row[STEP]][metric].append(value)
    return [{name: fmean(values) for name, values in gathered[step].items()} for step in sorted(gathered)]


def parity_html(
    result: ParityResult, measured: Sequence[Measured], runs: Runs, before: ParityResult | None, config: ParityConfig
) -> str:
    compared, everything = _lines(_compared(runs)), _lines(runs)
    seeds = "Mean over the seeds of each variant."
    found = [
        f"{label}, mean over {counted(len(runs[label]), 'seed')}: {_answer(history, runs[label])}."
        for label, history in compared
    ]
    alignment = (curve_chart(curve, compared, _verdict_bounds(curve, config)) for curve in (*ALIGNMENT, WORST_TOKEN))
    weights = collapsed(curve_chart(curve, everything) for curve in WEIGHTS)
    sections = [
        charted("learning", "Learning", collapsed(curve_chart(curve, compared) for curve in LEARNING), [seeds]),
        charted("alignment", "Alignment of rollout and training", collapsed(alignment), [seeds]),
        charted("weights", "Raw importance weights", weights, [seeds]),
        Section("verdict", "Verdict", tables=[matrix_table(result), checks_table(result)]),
        Section("variants", "Variants", tables=[_variants_table(result), accuracy_table(result, measured)]),
        _regression(result, before),
    ]
    return render_page(f"parity {result.name}", "fp8-grpo parity.", [result.headline, *found], sections)


def parity_charts(runs: Runs, config: ParityConfig) -> list[Chart]:
    lines = _lines(_compared(runs))
    return [curve_chart(curve, lines, _verdict_bounds(curve, config)) for curve in (*LEARNING[:4], *ALIGNMENT[:2])]


def parity_markdown(result: ParityResult, measured: Sequence[Measured], before: ParityResult | None) -> str:
    parts = [f"**{result.name}**: {result.headline}", _markdown(matrix_table(result)), _markdown(checks_table(result))]
    parts.append(_markdown(accuracy_table(result, measured)))
    section = _regression(result, before)
    parts += [*section.text, *(_markdown(table) for table in section.tables)]
    return printable_lines("\n\n".join(parts)) + "\n"


def matrix_table(result: ParityResult) -> Table:
    found = {(check.name, check.variant): check.outcome for check in result.checks}
    # A check of the whole parity run, such as that of the preflight, has a column of its own.
    variants = dict.fromkeys([*result.variants, *(check.variant for check in result.checks)])
    rows = [
        (name, *(found.get((name, variant), MISSING) for variant in variants))
        for name in dict.fromkeys(check.name for check in result.checks)
    ]
    return Table("Verdict", ["check", *variants], rows)


def checks_table(result: ParityResult) -> Table:
    rows = [(c.outcome, c.variant, c.name, c.found, c.bound, c.reason) for c in result.checks]
    return Table("Checks", ["", "variant", "what", "found", "bound", "because"], rows)


def accuracy_table(result: ParityResult, measured: Sequence[Measured]) -> Table:
    of = {(one.variant, one.seed): one for one in measured}
    rows = [
        (variant, *(_accuracy(of.get((variant, seed))) for seed in result.seeds))
        for variant in result.variants
        if variant != STRESS
    ]
    columns = ["variant", *(f"seed {seed}" for seed in result.seeds)]
    return Table("Held-out accuracy, mean of the last evaluations", columns, rows)


def _verdict_bounds(curve: Curve, config: ParityConfig) -> list[Bound]:
    """The bounds of the verdict on a curve, in the units of its axis."""
    limits = {TMPE: config.error_mismatched, K3: config.k3, ESS: config.effective_sample_size}
    if curve.metric not in limits:
        return []
    value = curve.of({curve.metric: limits[curve.metric].limit})
    return [Bound(f"bound: {short(value)}", value)]


def _accuracy(one: Measured | None) -> str:
    return MISSING if one is None or one.accuracy is None else short(one.accuracy)


def _variants_table(result: ParityResult) -> Table:
    rows = [(name, VARIANTS[name].rollout, VARIANTS[name].training, VARIANTS[name].title) for name in result.variants]
    return Table("What was trained", ["variant", "rollout", "training", ""], rows)


def _regression(result: ParityResult, before: ParityResult | None) -> Section:
    if before is None:
        return Section("changes", "Since it last passed", ["No earlier run of this configuration passed."])
    found = changes_table(before, result)
    words = f"Compared with {before.name}, which ended {before.ended}."
    return Section(
        "changes", "Since it last passed", [words if found.rows else f"{words} Nothing changed."], (), [found]
    )


def changes_table(before: ParityResult, result: ParityResult) -> Table:
    rows = [(change.kind, change.what, change.before, change.now) for change in changes(before, result)]
    return Table("What changed", ["kind", "what", "before", "now"], rows)


def _answer(history: History, runs: Sequence[RunData]) -> str:
    """The answer of a variant: its learning is that of the mean, its two policies are compared in every run."""
    measured = [row for run in runs for row in run.history]
    left = max(run.left for run in runs)
    return answer(history, short, prompts=_prompts(runs), left=left, measured=measured).words


def _prompts(runs: Sequence[RunData]) -> int | None:
    """Held-out prompts of trainings that all have the same ones; None where no configuration can be read."""
    return next((run.view.config.evaluation.prompts for run in runs if run.view.config is not None), None)


def _compared(runs: Runs) -> Runs:
    return {name: some for name, some in runs.items() if name != STRESS}


def _lines(runs: Runs) -> list[tuple[str, History]]:
    return [(name, mean_history(some)) for name, some in runs.items() if some]


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    # A bar would end the cell.
    cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([f"{table.caption}:", "", *cells])
