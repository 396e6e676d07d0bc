import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fp8core.alignment.bounds import stored_bounds
from fp8core.report.chart import Bound, bound_lines
from fp8core.report.pages import Section, Table, render_page, report_html
from fp8core.report.run_data import read_run
from fp8core.rl.alignment_metrics import TMPE

SECTIONS = [
    "learning", "alignment", "completions", "numbers", "configuration",
]  # fmt: skip
HOSTILE = "\x1b[2J\u202e<script>1</script> https://me:secret@host"


class Page(HTMLParser):
    """Sections, what an element would load, the figures by title, and how often each tag occurs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.loads: list[str] = []
        self.figures: dict[str, dict] = {}
        self.tags: list[str] = []
        self._json = False
        self.feed(html)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset") and value[:1] != "#"]
        if tag == "section":
            self.sections.append(named["id"])
        if tag == "div" and "aria-label" in named:
            self._title = named["aria-label"]
        self._json = named.get("type") == "application/json"

    def handle_data(self, data) -> None:
        if self._json and data.strip():
            self.figures[self._title] = json.loads(data)

    def labels(self, title: str) -> list[str]:
        return [note["text"] for note in self.figures[title]["layout"].get("annotations", [])]


@pytest.fixture(scope="module")
def both(whole_run, mixed_run) -> str:
    return report_html([read_run(whole_run.folder, "whole"), read_run(mixed_run.folder, "mixed")])


def test_the_page_has_every_section_and_figure_and_loads_nothing(both: str) -> None:
    page = Page(both)
    assert page.sections == SECTIONS
    assert page.loads == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & {*page.tags}
    # The figures, plotly once, and the lines that draw them.
    assert page.tags.count("script") == len(page.figures) + 2
    assert len(page.figures) >= 10
    assert "Scale of keys" in both
    for figure in page.figures.values():
        assert [trace["name"] for trace in figure["data"]][:2] == ["whole", "mixed"]
    assert len(both) <= 6_000_000


def test_the_page_says_what_the_runs_came_to_and_how_they_differ(both: str, whole_run) -> None:
    assert "1 exactly" in both
    assert "<td>precision.training.linear</td><td>yes</td><td>&#34;fp8_block&#34;</td><td>&#34;bf16&#34;</td>" in both
    assert whole_run.ledger.step(4).weights_digest[:12] in both
    assert "torch " in both
    assert "finished, 4 steps" in both
    assert all(f"{name}</td>" in both for name in ("warm_start", "precision_gap", "outside of committed tasks"))
    assert re.search(r"<td>time of all processes</td><td>[\d.]+ s, 1 process</td>", both)
    gap = whole_run.store.get_json(whole_run.ledger.artifacts(0)["precision_gap"])
    ends = "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**gap["difference"])
    assert f"<td>{ends} on {gap['prompts']} prompts</td>" in both.replace("&#43;", "+")


def test_bounds_that_a_run_stops_at_replace_the_usual_ones(mixed_run, run_copy) -> None:
    path = run_copy.folder / "run.json"
    described = json.loads(path.read_text())
    described["config"]["alignment"] = {"stop": {"error": 1.25, "k3": None, "effective_sample_size": 0.9}}
    path.write_text(json.dumps(described))
    # What is zero everywhere has no chart.
    mixed = read_run(mixed_run.folder, "mixed")
    own = replace(read_run(run_copy.folder, "own"), history=mixed.history)
    page = Page(report_html([own]))
    # In the units of the axis, which the limit of the error is not in.
    assert page.labels("Token multiplicative probability error - 1") == ["stop: 0.25"]
    assert page.labels("Effective sample size that is lost") == ["stop: 0.1"]
    assert page.labels("Divergence of training from rollout policy (k3)") == ["NeMo RL: 0.001"]
    beside = bound_lines([(run.label, stored_bounds(run.view.config)) for run in (mixed, own)])
    assert Bound("stop of own: 0.25", 0.25) in beside[TMPE.name]


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
    assert Page(html).sections[-3:] == [*SECTIONS[-2:], "missing"]
    assert run.missing
    assert (" 1 note on what is missing" in html) == (len(run.missing) == 1)


def test_texts_of_others_are_escaped_and_turn_and_hide_nothing(whole_run) -> None:
    table = Table(HOSTILE, [HOSTILE], [(HOSTILE,)])
    page = render_page(HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], [Section("one", HOSTILE, [HOSTILE], [], [table])])
    assert Page(page).tags.count("script") == 2
    assert page.count("\\u202e&lt;script&gt;1&lt;/script&gt; https://me:***@host") >= 5
    named = report_html([replace(read_run(whole_run.folder, "run"), label=HOSTILE)])
    for text in (page, named):
        # plotly's own script has control characters.
        ours = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
        assert not set("\x1b\u202e") & set(ours)
        assert "secret" not in ours
    shown = Page(named)
    assert shown.tags.count("script") == len(shown.figures) + 2


def test_a_collapsed_run_says_so_above_the_charts_and_marks_the_step_in_each(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    assert '<p class="answer alarm">' not in report_html([run])
    healthy = {"reward/mean": 0.7, "reward/outcome_right": 0.7, "rollout/entropy": 0.25, "rollout/length_mean": 8.0}
    broken = {"reward/mean": 0.0, "reward/outcome_right": 0.0, "rollout/entropy": 2.0, "rollout/length_mean": 9.0}
    history = [{"step": step, **(healthy if step <= 10 else broken)} for step in range(1, 21)]
    page = report_html([replace(run, history=history)])
    top = page.partition("<section")[0]
    changes = "the share of right answers fell from 0.7 to 0, entropy rose from 0.25 to 2"
    assert f'<p class="answer alarm">Collapsed after step 10: {changes}.' in top
    figures = Page(page).figures
    assert {"Reward", "Entropy of the policy"} <= {*figures}
    assert all(figure["layout"]["shapes"][-1]["x0"] == 10 for figure in figures.values())
