"""The metric of docs/extending.md is seen everywhere, though one module alone declares it."""

import json
from statistics import pstdev

import pytest

TRAIN = """
import io, json, sys
from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.report.pages import report_html
from fp8core.report.run_data import read_run
from fp8core.run.execute import step_metrics
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from flows.tracking.backlog import shown_metrics

config, said = load_config("tiny", json.loads(sys.argv[1])), io.StringIO()
with (
    open_directory(config, "run") as directory,
    open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
):
    train(run)
    rollouts = directory.store.get_table(directory.ledger.artifacts(1)["rollouts"])["tokens"].to_pylist()
    measured = step_metrics(run, 1)
    Console(said, config.steps).step({**measured, "step": 1}, 1.0, {})
print(json.dumps([list(map(len, rollouts)), measured, shown_metrics(measured), said.getvalue().splitlines()[-2:]]))
print(report_html([read_run(directory.path, "run")]))
"""


def test_the_metric_of_the_page_is_in_metrics_trackers_console_and_report(changed_package, small, tmp_path):
    run = changed_package("A metric")
    settings = {**small, "steps": 2, "runs": str(tmp_path / "runs")}
    output, _, page = run("-c", TRAIN, json.dumps(settings)).partition("\n")
    lengths, measured, shown, (header, line) = json.loads(output)
    spread = measured["rollout/length_std"]
    assert spread == pytest.approx(pstdev(lengths))
    assert shown["core/length_std"] == spread
    assert dict(zip(header.split(), line.replace("1 exactly", "1").split(), strict=False))["spread"] == f"{spread:.4g}"
    assert "Spread of the length" in page
    assert "spread of the length, largest (tokens)" in page
