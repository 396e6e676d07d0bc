import re
from dataclasses import replace

import pytest

from fp8core.config.parity import ParityConfig
from fp8core.parity.measure import measure
from fp8core.parity.page import matrix_table, mean_history, parity_charts, parity_html, parity_markdown
from fp8core.parity.verdict import Check, ParityResult
from fp8core.report.run_data import read_run


@pytest.fixture
def night() -> ParityResult:
    return ParityResult(
        name="first",
        config="tiny",
        ended="2026-08-02T04:00:00+00:00",
        outcome="FAIL",
        headline="FAIL: bf16: memory slope 3 MiB a step",
        variants=("bf16", "fp8-end-to-end-kv", "stress"),
        seeds=(0, 1),
        code_version="c0de",
        git={},
        versions={"torch": "2.11"},
        hardware={},
        settings={},
        checks=(Check("bf16", "memory slope", "FAIL", "3 MiB a step", "<= 2 | 3", "a leak <b>", 3.0),),
    )


@pytest.fixture
def runs(whole_run):
    run = read_run(whole_run.folder, "whole")
    other = replace(run, history=[{**row, "reward/mean": row.get("reward/mean", 0.0) + 1} for row in run.history])
    return {"bf16": [run], "fp8-end-to-end-kv": [run, other], "stress": []}


def test_a_line_is_the_mean_over_seeds(runs):
    history = mean_history(runs["fp8-end-to-end-kv"])
    first = runs["bf16"][0].history
    assert [row["step"] for row in history] == [row["step"] for row in first]
    assert history[2]["reward/mean"] == pytest.approx(first[2]["reward/mean"] + 0.5)


def test_variants_are_drawn_over_one_another_with_the_bounds_of_the_verdict(runs):
    charts = parity_charts(runs, ParityConfig())
    assert [[one.label for one in chart.series] for chart in charts] == [["bf16", "fp8-end-to-end-kv"]] * len(charts)
    assert [bound.y for bound in charts[4].bounds] == pytest.approx([0.1])


def test_the_page_says_verdict_reasons_and_changes(runs, night):
    measured = [measure(runs["bf16"][0], "bf16", 0, 1)]
    before = night.model_copy(update={"name": "zeroth", "versions": {"torch": "2.10"}})
    page = parity_html(night, measured, runs, before, ParityConfig())
    for words in (night.headline, "a leak &lt;b&gt;", "Compared with zeroth", "2.10", "seed 1"):
        assert words in page
    assert "No earlier run" in parity_html(night, measured, runs, None, ParityConfig())
    same = parity_html(night, measured, runs, night, ParityConfig())
    assert "Nothing changed." in same


def test_an_answer_counts_the_seeds_tokens_and_steps_of_all_trainings(runs, night) -> None:
    (run,) = runs["bf16"]
    assert run.view.config is not None
    begun = replace(run.view, config=run.view.config.model_copy(update={"steps": 80}))
    first, second = (
        [
            {
                "step": step,
                "reward/mean": 0.5 + 0.1 * (step % 2),
                "alignment/token_mult_prob_error": error,
                "alignment/tokens_differing": 5.0,
                "alignment/tokens": 50.0,
            }
            for step in range(1, 21)
        ]
        for error in (1.0, 1.2)
    )
    whole, cut = (replace(run, history=first), replace(run, history=second, view=begun))
    page = parity_html(night, [], {"bf16": [whole], "fp8-end-to-end-kv": [whole, cut]}, None, ParityConfig())
    one, two = re.findall(r'<p class="answer">([^<]*mean over[^<]*)</p>', page)
    assert one.startswith("bf16, mean over 1 seed: Not learned")
    assert two.startswith("fp8-end-to-end-kv, mean over 2 seeds: Too short to tell")
    assert two.endswith("differ on 10 % of 2,000 tokens, error a token 1.100000 in the mean, 1.200000 at most.")


def test_the_markdown_has_every_table(runs, night):
    text = parity_markdown(night, [measure(runs["bf16"][0], "bf16", 0, 1)], None)
    assert text.startswith("**first**: FAIL: bf16: memory slope 3 MiB a step\n")
    assert "| FAIL | bf16 | memory slope | 3 MiB a step | <= 2 \\| 3 | a leak <b> |" in text
    # A check of the whole parity run has a column of its own.
    checks = (*night.checks, Check("", "speed", "PASS", "", "", ""))
    table = matrix_table(night.model_copy(update={"checks": checks}))
    assert table.columns == ["check", "bf16", "fp8-end-to-end-kv", "stress", ""]
    assert [*table.rows] == [("memory slope", "FAIL", "-", "-", "-"), ("speed", "-", "-", "-", "PASS")]
