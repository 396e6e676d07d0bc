"""The report of one or more trainings as one HTML page, from their folders alone."""

from collections.abc import Iterable, Sequence

from fp8core.report.bounds import Bounds, configured_bounds
from fp8core.report.charts import Chart
from fp8core.report.page import Section, Table, render_page
from fp8core.report.run_charts import (
    ALIGNMENT,
    KV_CURVES,
    LEARNING,
    WORST_TOKEN,
    curve_chart,
    difference_by_position,
    difference_histogram,
    histories,
    logprob_scatter,
    pipeline_graph,
    scale_heatmap,
    time_shares,
    time_stack,
)
from fp8core.report.run_data import RunData
from fp8core.report.run_tables import difference_table, numbers_table, provenance_table, settings_table
from fp8core.report.svg import chart_svg
from fp8core.report.svg_panels import graph_svg, heatmap_svg, stack_svg


def report_html(runs: Sequence[RunData]) -> str:
    """The page, with the bounds that the runs are configured to stop at."""
    title = ", ".join(run.label for run in runs)
    states = "; ".join(f"{run.label}: {run.status}" for run in runs)
    gaps = sum(len(run.missing) for run in runs)
    note = f" {gaps} notes on what is missing are at the end." if gaps else ""
    return render_page(title, f"fp8-grpo report. {states}.{note}", run_sections(runs, configured_bounds(runs)))


def run_sections(runs: Sequence[RunData], bounds: Bounds) -> list[Section]:
    """Every section of the page, whatever is missing."""
    lines = histories(runs)
    samples = [(run.label, run.tokens) for run in runs]
    scales = [scale_heatmap(run.label, run.history) for run in runs]
    scaled = [heatmap_svg(heatmap) for heatmap in scales if heatmap.x]
    tokens = (difference_histogram(samples), logprob_scatter(samples), difference_by_position(samples))
    shares = Table(
        "Mean seconds of a step, and share of all task time",
        ["task", *(run.label for run in runs)],
        time_shares(runs),
    )
    return [
        Section("numbers", "Numbers", tables=[numbers_table(runs)]),
        Section("learning", "Learning", figures=_svgs(curve_chart(curve, lines) for curve in LEARNING)),
        Section(
            "alignment",
            "Alignment of rollout and training",
            figures=_svgs(
                curve_chart(curve, lines, bounds.get(curve.metric, ())) for curve in (*ALIGNMENT, WORST_TOKEN)
            ),
        ),
        Section("tokens", "Mismatch by token", figures=_svgs(tokens)),
        Section(
            "scales",
            "Scales of the KV cache",
            [] if scaled else ["No run has scales: its KV cache is not in FP8."],
            [*_svgs(curve_chart(curve, lines) for curve in KV_CURVES), *scaled],
        ),
        Section("time", "Time", figures=[stack_svg(time_stack(run)) for run in runs], tables=[shares]),
        Section("graph", "Iteration", figures=[graph_svg(pipeline_graph(run)) for run in runs]),
        _configuration(runs),
        Section("provenance", "Provenance", tables=[provenance_table(run) for run in runs]),
        _missing(runs),
    ]


def key_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The few charts that a picture shows."""
    bounds = configured_bounds(runs)
    chosen = (*LEARNING[:4], *ALIGNMENT[:2])
    return [curve_chart(curve, histories(runs), bounds.get(curve.metric, ())) for curve in chosen]


def _svgs(charts: Iterable[Chart]) -> list[str]:
    return [chart_svg(chart) for chart in charts]


def _missing(runs: Sequence[RunData]) -> Section:
    rows = [(run.label, line) for run in runs for line in run.missing]
    if not rows:
        return Section("missing", "Missing", ["Nothing: all that the ledgers name could be read."])
    return Section("missing", "Missing", tables=[Table("What could not be read", ["run", "what"], rows)])


def _configuration(runs: Sequence[RunData]) -> Section:
    tables = [settings_table(run) for run in runs]
    if len(runs) > 1:
        tables.insert(0, difference_table(runs))
    return Section("configuration", "Configuration", tables=tables)
