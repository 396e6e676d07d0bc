"""Reports as HTML pages that need no network: the parts of a page, and the report of one or more trainings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fp8core.alignment.bounds import stored_bounds
from fp8core.errors import printable_lines
from fp8core.report.chart import COLOURS, Chart, collapsed, counted, short
from fp8core.report.completions import LEGEND, Examples
from fp8core.report.figures import Figure, chart_figure, iteration_figure, scale_figures, time_figures
from fp8core.report.run_data import RunData
from fp8core.report.run_verdict import head
from fp8core.report.tables import Table, difference_table, numbers_table, settings_table, steps_table, time_table
from fp8core.report.training_charts import (
    ALIGNMENT,
    KV_CURVES,
    LEARNING,
    SIGNALS,
    WORST_TOKEN,
    ahead_charts,
    bound_lines,
    curve_chart,
    token_charts,
)
from fp8core.store.metrics import STALENESS

_EXAMPLE_RUNS = 2


@dataclass(frozen=True)
class Section:
    """A heading with words, figures, completions by run, and tables; `anchor` is its name in links."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    heldout: Mapping[str, Examples] = field(default_factory=dict)
    examples: Mapping[str, Examples] = field(default_factory=dict)


def render_page(title: str, subtitle: str, answers: Sequence[str], sections: Sequence[Section]) -> str:
    """The page as HTML text, the answers on top; all text is escaped."""
    environment = Environment(
        loader=PackageLoader("fp8core.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html.jinja")
    plotly = Markup(get_plotlyjs())
    page = {"title": title, "subtitle": subtitle, "answers": answers, "sections": sections}
    return template.render(page, script=plotly, colours=COLOURS, legend=LEGEND, short=short)


def _printable(value: Any) -> Any:
    """Names and texts of others may hold characters that turn or hide what follows."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def report_html(runs: Sequence[RunData]) -> str:
    title = ", ".join(run.label for run in runs)
    states = "; ".join(f"{run.label}: {run.status}" for run in runs)
    gaps = sum(len(run.missing) for run in runs)
    note = f" {counted(gaps, 'note')} on what is missing, at the end." if gaps else ""
    answers = [words if len(runs) == 1 else f"{run.label}: {words}" for run in runs for words in head(run)]
    return render_page(title, f"fp8-grpo report. {states}.{note}", answers, _sections(runs))


def _sections(runs: Sequence[RunData]) -> list[Section]:
    lines = [(run.label, run.history) for run in runs]
    bounds = bound_lines([(run.label, stored_bounds(run.view.config)) for run in runs])
    alignment = (curve_chart(curve, lines, bounds.get(curve.metric, ())) for curve in (*ALIGNMENT, WORST_TOKEN))
    ahead = ahead_charts(lines)
    scales = scale_figures(runs)
    scaled, constant = collapsed(curve_chart(curve, lines) for curve in KV_CURVES if scales)
    missing = [(run.label, line) for run in runs for line in run.missing]
    provenance = [Table(run.label, ["", ""], run.provenance.lines(run.view)) for run in runs]
    settings = [*([difference_table(runs)] if len(runs) > 1 else []), *map(settings_table, runs)]
    return [
        charted("learning", "Learning", collapsed(curve_chart(curve, lines) for curve in (*LEARNING, *SIGNALS))),
        charted("alignment", "Alignment of rollout and training", collapsed(alignment)),
        *([charted("ahead", "Generation ahead", collapsed(ahead))] if ahead else []),
        charted("tokens", "Mismatch by token", token_charts([(run.label, run.tokens) for run in runs])),
        _completions(runs),
        Section(
            "scales",
            "Scales of the KV cache",
            constant if scales else ["No run has scales: its KV cache is not in FP8."],
            [*map(chart_figure, scaled), *scales],
        ),
        Section("time", "Time", figures=time_figures(runs), tables=[time_table(runs)]),
        Section("graph", "Iteration", figures=[iteration_figure(run) for run in runs]),
        Section("numbers", "Numbers", tables=[numbers_table(runs), *map(steps_table, runs)]),
        Section("configuration", "Configuration", tables=settings),
        Section("provenance", "Provenance", tables=provenance),
        Section(
            "missing",
            "Missing",
            [] if missing else ["Nothing: all that the ledgers name could be read."],
            tables=[Table("What could not be read", ["run", "what"], missing)] if missing else [],
        ),
    ]


def charted(anchor: str, title: str, charts: tuple[list[Chart], list[str]], words: Sequence[str] = ()) -> Section:
    drawn, told = charts
    return Section(anchor, title, [*words, *told], [*map(chart_figure, drawn)])


def _completions(runs: Sequence[RunData]) -> Section:
    shown = runs[:_EXAMPLE_RUNS]
    heldout = {run.label: run.heldout for run in shown if run.heldout is not None}
    examples = {run.label: run.examples for run in shown if run.examples is not None}
    words = [] if heldout or examples else ["No step has completions that can be read."]
    if any(STALENESS in row for run in shown for row in run.history):
        words.append("Where a run generates ahead, the mismatch of a token includes its age.")
    return Section("completions", "Completions", words, heldout=heldout, examples=examples)
