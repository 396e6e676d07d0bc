"""The report of a parity run: its verdict, and curves of the variants."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from fp8core.config.parity import ParityConfig
from fp8core.errors import printable_lines
from fp8core.parity.measure import RATIO, STRESS, VARIANTS, WEIGHT, Measured
from fp8core.parity.verdict import ParityResult
from fp8core.report.chart import MISSING, Bound, collapsed, short
from fp8core.report.pages import Section, charted, render_page
from fp8core.report.run_data import RunData
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


def parity_html(result: ParityResult, measured: Sequence[Measured], runs: Runs, config: ParityConfig) -> str:
    everything = [(name, mean_history(some)) for name, some in runs.items() if some]
    compared = [(name, history) for name, history in everything if name != STRESS]
    seeds = "Mean over the seeds of each variant."
    alignment = (curve_chart(curve, compared, _verdict_bounds(curve, config)) for curve in (*ALIGNMENT, WORST_TOKEN))
    weights = collapsed(curve_chart(curve, everything) for curve in WEIGHTS)
    sections = [
        charted("learning", "Learning", collapsed(curve_chart(curve, compared) for curve in LEARNING), [seeds]),
        charted("alignment", "Alignment of rollout and training", collapsed(alignment), [seeds]),
        charted("weights", "Raw importance weights", weights, [seeds]),
        Section("verdict", "Verdict", tables=[matrix_table(result), checks_table(result)]),
        Section("variants", "Variants", tables=[_variants_table(result), accuracy_table(result, measured)]),
    ]
    return render_page(f"parity {result.name}", "fp8-grpo parity.", [result.headline], sections)


def parity_markdown(result: ParityResult, measured: Sequence[Measured]) -> str:
    tables = (matrix_table(result), checks_table(result), accuracy_table(result, measured))
    return printable_lines("\n\n".join([f"**{result.name}**: {result.headline}", *map(_markdown, tables)])) + "\n"


def matrix_table(result: ParityResult) -> Table:
    found = {(check.name, check.variant): check.outcome for check in result.checks}
    rows = [
        (name, *(found.get((name, variant), MISSING) for variant in result.variants))
        for name in dict.fromkeys(check.name for check in result.checks)
    ]
    return Table("Verdict", ["check", *result.variants], rows)


def checks_table(result: ParityResult) -> Table:
    rows = [(c.outcome, c.variant, c.name, c.found, c.bound, c.reason) for c in result.checks]
    return Table("Checks", ["", "variant", "what", "found", "bound", "because"], rows)


def accuracy_table(result: ParityResult, measured: Sequence[Measured]) -> Table:
    of = {(one.variant, one.seed): one.accuracy for one in measured if one.accuracy is not None}
    rows = [
        (variant, *(short(of[variant, seed]) if (variant, seed) in of else MISSING for seed in result.seeds))
        for variant in result.variants
        if variant != STRESS
    ]
    columns = ["variant", *(f"seed {seed}" for seed in result.seeds)]
    return Table("Held-out accuracy, mean of the last evaluations", columns, rows)


def _verdict_bounds(curve: Curve, config: ParityConfig) -> list[Bound]:
    limits = {TMPE: config.error_mismatched, K3: config.k3, ESS: config.effective_sample_size}
    if curve.metric not in limits:
        return []
    value = curve.of({curve.metric: limits[curve.metric].limit})
    return [Bound(f"bound: {short(value)}", value)]


def _variants_table(result: ParityResult) -> Table:
    rows = [(name, VARIANTS[name].rollout, VARIANTS[name].training) for name in result.variants]
    return Table("What was trained", ["variant", "rollout", "training"], rows)


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    # A bar would end the cell.
    cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([f"{table.caption}:", "", *cells])
