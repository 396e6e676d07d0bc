"""The one tracker there is, on a real store."""

import json
import sqlite3
from pathlib import Path

from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.tracker import Table


def metric_rows(runs: Path, run_id: str) -> list[tuple[str, int, float, int]]:
    with sqlite3.connect(runs / "mlflow.db") as connection:
        query = "select key, step, value, timestamp from metrics where run_uuid = ? order by step, key"
        return connection.execute(query, (run_id,)).fetchall()


def artifact_text(tracker: MlflowTracker, file: str, tmp_path: Path) -> str:
    return Path(tracker.client.download_artifacts(tracker.run_id, file, str(tmp_path))).read_text(encoding="utf-8")


def test_a_step_that_is_logged_again_leaves_the_same_rows(runs: Path, tracker: MlflowTracker) -> None:
    few = {"reward/mean": 0.5, "train/loss": 0.1 + 0.2}
    many = few | {f"kv/{layer}": 1.0 for layer in range(1500)}
    tracker.log_step(1, few, 1_700_000_000_123, {})
    for _ in range(2):
        tracker.log_step(1, many, 1_700_000_000_123, {"chain_tip": "1:a"})
    rows = metric_rows(runs, tracker.run_id)
    assert rows == sorted((key, 1, value, 1_700_000_000_123) for key, value in many.items())
    assert tracker.client.get_run(tracker.run_id).data.tags["chain_tip"] == "1:a"


def test_parameters_are_json_and_one_that_changed_is_a_tag(tracker: MlflowTracker) -> None:
    config = {f"extra.{index}": index for index in range(120)}
    config |= {"steps": 80, "model": None, "exact": True, "pipeline.steps": ["x" * 7000]}
    tracker.start(config)
    params = tracker.client.get_run(tracker.run_id).data.params
    assert len(params) == len(config)
    assert (params["model"], params["exact"], len(params["pipeline.steps"])) == ("null", "true", 6000)
    tracker.start(config | {"steps": 120, "new": 1})
    data = tracker.client.get_run(tracker.run_id).data
    assert data.params == params | {"new": "1"}
    assert data.tags["steps"] == "120"
    assert "model" not in data.tags


def test_artifacts_are_replaced_and_tables_listed_for_the_preview(tracker: MlflowTracker, tmp_path: Path) -> None:
    columns, right, wrong = ("step", "prompt", "reward"), (10, "2+3=", 1.0), (10, '1"<b>é', 0.0)
    picture = tmp_path / "curves.png"
    for content, rows in (("old", [right]), ("new", [right, wrong])):
        picture.write_text(content)
        tracker.log_artifact("pictures/curves.png", picture)
        tracker.log_artifact("graph.txt", content)
        tracker.log_artifact("samples/10.json", Table(columns, rows))
    assert artifact_text(tracker, "pictures/curves.png", tmp_path / "pictures") == "new"
    assert artifact_text(tracker, "graph.txt", tmp_path) == "new"
    table = json.loads(artifact_text(tracker, "samples/10.json", tmp_path))
    assert table == {"columns": list(columns), "data": [list(right), list(wrong)]}
    # MLflow's own method writes the same file and tag: the format that its UI previews.
    named = dict(zip(columns, zip(right, wrong, strict=True), strict=True))
    tracker.client.log_table(tracker.run_id, {column: list(values) for column, values in named.items()}, "own.json")
    assert json.loads(artifact_text(tracker, "own.json", tmp_path)) == table
    tag = json.loads(tracker.client.get_run(tracker.run_id).data.tags["mlflow.loggedArtifacts"])
    assert tag == [{"path": path, "type": "table"} for path in ("samples/10.json", "own.json")]


def test_texts_of_others_are_escaped_and_without_passwords(tracker: MlflowTracker, tmp_path: Path) -> None:
    hostile = "\x1b]0;mine\x07 \u202e https://me:secret@host"
    tracker.start({"data.source": hostile})
    tracker.set_tags({"name": hostile})
    tracker.end("FAILED", hostile, 5_000)
    tracker.log_artifact("graph.txt", hostile)
    tracker.log_artifact("samples/1.json", Table(("prompt",), [(hostile,)]))
    run = tracker.client.get_run(tracker.run_id)
    ((cell,),) = json.loads(artifact_text(tracker, "samples/1.json", tmp_path))["data"]
    graph = artifact_text(tracker, "graph.txt", tmp_path)
    for text in (run.data.params["data.source"], run.data.tags["name"], run.data.tags["error"], cell, graph):
        assert text == "\\x1b]0;mine\\x07 \\u202e https://me:***@host"
    assert (run.info.status, run.info.end_time) == ("FAILED", 5_000)
