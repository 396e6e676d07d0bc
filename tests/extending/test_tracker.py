"""The tracker of docs/extending.md shows a training beside another tracker."""

import csv
import io

from flows.tracking.session import open_session
from fp8core.config.load import load_config
from fp8core.report.console import Console


def test_the_tracker_of_the_page_has_every_step_once(example, loop_run, small):
    folder = example("A tracker")
    places = {"tracking.services": ["csv_tracker:TRACKER", "tensorboard"], "tracking.system_metrics": False}
    assert load_config(str(folder / "tracked.yaml")).tracking.services == ("mlflow", "csv_tracker:TRACKER")
    run = loop_run("tracked", str(folder / "tracked.yaml"), **small, **places, steps=2)
    config = load_config(str(folder / "tracked.yaml"), {**small, **places, "steps": 2, "runs": str(run.folder.parent)})
    for _ in range(2):
        with open_session(config, run.folder.name, Console(io.StringIO(), 2), {}) as session:
            session.follow_ledger()
    files = sorted((run.folder / "csv").iterdir())
    assert [file.name for file in files] == ["00000.csv", "00001.csv", "00002.csv"]
    assert float(dict(csv.reader(files[2].open()))["core/1_reward"]) >= 0
