from dataclasses import replace

import pytest

from fp8core.config.parity import ParityConfig
from fp8core.parity.measure import measure
from fp8core.parity.page import mean_history, parity_html, parity_markdown
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


def test_page_and_markdown_have_the_verdict_its_reasons_and_every_table(runs, night):
    measured = [measure(runs["bf16"][0], "bf16", 0, 1)]
    page = parity_html(night, measured, runs, ParityConfig())
    for words in (night.headline, "a leak &lt;b&gt;", "seed 1"):
        assert words in page
    text = parity_markdown(night, measured)
    assert text.startswith("**first**: FAIL: bf16: memory slope 3 MiB a step\n")
    assert "| FAIL | bf16 | memory slope | 3 MiB a step | <= 2 \\| 3 | a leak <b> |" in text
    assert "| memory slope | FAIL | - | - |" in text
