import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from fp8core.alignment.bounds import stored_bounds
from fp8core.report.chart import Bound
from fp8core.report.pages import Section, Table, key_charts, number_rows, render_page, report_html
from fp8core.report.run_data import read_run, read_runs
from fp8core.report.training_charts import configured_bounds, training_charts
from fp8core.store.metrics import TMPE

SECTIONS = [
    "learning", "alignment", "tokens", "completions", "scales", "time", "graph", "numbers", "configuration",
    "provenance", "missing",
]  # fmt: skip
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Sections, what an element would load, and whether tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action") and not (value or "").startswith(
                ("#", "data:")
            ):
                self.loads.append(value or "")
            if tag == "section" and name == "id":
                self.sections.append(value)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def charts_of(html: str) -> dict[str, str]:
    """SVG by title; each one is well-formed XML."""
    found = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    return {ElementTree.fromstring(svg).attrib["aria-label"]: svg for svg in found}


@pytest.fixture(scope="module")
def both(whole_run, mixed_run) -> str:
    return report_html(read_runs([whole_run.folder, mixed_run.folder]))


def test_the_page_has_every_section_and_loads_nothing(both: str) -> None:
    page = Page(both)
    assert page.sections == SECTIONS
    assert page.loads == []
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not re.search(r"@import|url\((?!#)", both)
    assert len(both) <= 500_000


def test_two_runs_lie_over_each_other(both: str) -> None:
    charts = charts_of(both)
    overlaid = [svg for title, svg in charts.items() if not title.endswith((": whole", ": mixed"))]
    assert len(overlaid) >= 10
    for svg in overlaid:
        assert ">whole</text>" in svg
        assert ">mixed</text>" in svg
        assert "not measured" not in svg
    for title in ("Scales of Q, K and V", "Time by task", "One iteration"):
        assert f"{title}: whole" in charts
        assert f"{title}: mixed" in charts


def test_the_page_says_what_the_runs_came_to_and_how_they_differ(both: str, whole_run) -> None:
    assert "1 exactly" in both
    assert "<td>precision.training.linear</td><td>yes</td><td>&#34;fp8_block&#34;</td><td>&#34;bf16&#34;</td>" in both
    assert whole_run.ledger.step(4).weights_digest[:12] in both
    assert "torch " in both
    assert "finished, 4 steps" in both
    assert all(f"<td>{name}</td>" in both for name in ("warm_start", "precision_gap", "outside of committed tasks"))
    assert re.search(r"<td>time of all processes</td><td>[\d.]+ s, 1 process</td>", both)
    # Neither is of a whole step, as MLflow's are.
    assert "<td>median seconds of tasks a step</td>" in both
    assert "<td>tokens generated per second of rollout</td>" in both
    gap = whole_run.store.get_json(whole_run.ledger.artifacts(0)["precision_gap"])
    ends = "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**gap["difference"])
    assert f"<td>{ends} on {gap['prompts']} prompts</td>" in both.replace("&#43;", "+")


def test_means_of_the_alignment_are_over_tokens(whole_run) -> None:
    names = "token_mult_prob_error", "k3_kl", "tokens"
    steps = [(2.0, 1.0, 10.0), (1.0, 0.0, 990.0)]
    history = [
        {"step": step, **{f"alignment/{name}": value for name, value in zip(names, values, strict=True)}}
        for step, values in enumerate(steps, 1)
    ]
    rows = dict(number_rows([replace(read_run(whole_run.folder, "run"), history=history)]))
    assert rows["token multiplicative probability error, mean"] == "1.010000"
    assert rows["k3 divergence, mean (nats)"] == "0.01"


def test_bounds_that_a_run_stops_at_replace_the_usual_ones(whole_run, mixed_run, run_copy) -> None:
    path = run_copy.folder / "run.json"
    described = json.loads(path.read_text())
    described["config"]["alignment"] = {"stop": {"error": 1.25, "k3": None, "effective_sample_size": 0.9}}
    path.write_text(json.dumps(described))
    # What is zero everywhere has no chart.
    own = replace(read_run(run_copy.folder, "own"), history=read_run(mixed_run.folder, "mixed").history)
    alone, beside = [own], [read_run(whole_run.folder, "whole"), own]
    charts = charts_of(report_html(alone))
    error = charts["Token multiplicative probability error - 1"]
    # In the units of the axis, which the limit of the error is not in.
    assert ">stop: 0.25<" in error
    assert "NeMo RL" not in error
    assert ">stop: 0.1<" in charts["Effective sample size that is lost"]
    assert ">NeMo RL: 0.001<" in charts["Divergence of training from rollout policy (k3)"]
    assert ">stop of own: 0.25<" in report_html(beside)
    assert configured_bounds(alone)[TMPE] == [Bound("stop: 0.25", 0.25)]
    in_its_folder = training_charts("own", own.history, stored_bounds(own.view.config))[-1]
    assert list(in_its_folder.bounds) == [Bound("stop: 0.25", 0.25)]


@pytest.mark.parametrize("damage", ["no step", "one step", "no ledger", "no artifacts", "unreadable configuration"])
def test_a_damaged_run_has_a_whole_page(run_copy, damage: str) -> None:
    folder = run_copy.folder
    match damage:
        case "no step":
            (folder / "ledger.jsonl").write_text("")
        case "one step":
            run_copy.cut_after(1, "record")
        case "no ledger":
            (folder / "ledger.jsonl").unlink()
        case "no artifacts":
            for path in (folder / "artifacts").glob("??/*"):
                path.unlink()
        case "unreadable configuration":
            run = (folder / "run.json").read_text()
            (folder / "run.json").write_text(run.replace('"fp8_block"', '"fp4_of_tomorrow"'))
    run = read_run(folder, "damaged")
    html = report_html([run])
    assert Page(html).sections == SECTIONS
    charts_of(html)
    assert run.missing
    assert "at the end" in html
    assert (" 1 note on" in html) == (len(run.missing) == 1)


def test_what_tables_hold_is_escaped() -> None:
    html = render_page(
        "<i>", "&", ["<em>"], [Section("a", "<b>", ["<p>"], ["<svg/>"], [Table("<u>", ["<x>"], [["<script>"]])])]
    )
    assert not Page(html).tags & {"i", "b", "x", "u", "em", "script"}
    assert "<svg/>" in html


def test_every_chart_has_its_values_as_one_group_of_keys(both: str) -> None:
    groups = re.findall(r'<div class="values"[^>]*>(.*?)</div>', both, re.DOTALL)
    names = [{*re.findall(r'type="radio" name="([^"]+)"', group)} for group in groups]
    assert len(charts_of(both)) == len(groups) + both.count('aria-label="Log-probs of tokens under both policies"')
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == len(groups)


def test_a_page_can_be_dark(both: str) -> None:
    assert "prefers-color-scheme: dark" in both
    for title, drawn in charts_of(both).items():
        # Cells of a heat map and the bar of their scale have colours of their own.
        inks = re.findall(r"""(?:fill|stroke)(?:: |=")(#[0-9a-f]{6})""", drawn)
        assert inks == [], f"{title}: an ink that stays as it is on dark paper"


def test_key_charts_hold_every_run(whole_run, mixed_run) -> None:
    charts = key_charts(read_runs([whole_run.folder, mixed_run.folder]))
    assert [chart.title for chart in charts][:2] == ["Reward", "Held-out accuracy"]
    assert all([series.label for series in chart.series] == ["whole", "mixed"] for chart in charts)


def test_texts_of_others_turn_and_hide_nothing_on_the_page() -> None:
    hostile = "\x1b[2J\u202e<b> https://me:secret@host"
    table = Table(hostile, [hostile], [(hostile,)])
    section = Section("one", hostile, [hostile], [f"<svg>{hostile[:5]}</svg>"], [table])
    page = render_page(hostile, hostile, [hostile], [section])
    assert not set("\x1b\u202e") & set(page)
    assert "secret" not in page
    assert page.count("\\u202e&lt;b&gt; https://me:***@host") >= 5
    assert "<svg>\\x1b[2J\\u202e</svg>" in page
