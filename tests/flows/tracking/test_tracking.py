import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

from flows.tracking.store import Outage, default_tracking_uri, store_errors
from flows.tracking.tracker import TRAINING, Tracker
from fp8core.errors import UserError

METRICS = {"reward/mean": 0.5, "train/loss": 0.1 + 0.2, "alignment/token_mult_prob_error": 1.0}


def metric_rows(runs: Path, run_id: str) -> list[tuple[str, int, float, int]]:
    with sqlite3.connect(runs / "mlflow.db") as connection:
        query = "select key, step, value, timestamp from metrics where run_uuid = ? order by step, key"
        return connection.execute(query, (run_id,)).fetchall()


def artifact_text(tracker: Tracker, file: str, tmp_path: Path) -> str:
    return Path(tracker.client.download_artifacts(tracker.run_id, file, str(tmp_path))).read_text(encoding="utf-8")


def test_the_same_step_logged_again_leaves_the_same_rows(runs: Path, tracker: Tracker) -> None:
    tracker.log_step(3, METRICS, timestamp_ms=1_700_000_000_123)
    once = metric_rows(runs, tracker.run_id)
    # A process that was killed after the store's commit and before the answer does exactly this.
    replace(tracker).log_step(3, METRICS, timestamp_ms=1_700_000_000_123)
    assert metric_rows(runs, tracker.run_id) == once
    assert once == sorted((key, 3, value, 1_700_000_000_123) for key, value in METRICS.items())


def test_a_step_of_which_a_part_is_in_the_store_is_completed(runs: Path, tracker: Tracker) -> None:
    tracker.log_step(1, {"train/loss": METRICS["train/loss"]}, timestamp_ms=7)
    tracker.log_step(1, METRICS, timestamp_ms=7)
    assert [row[0] for row in metric_rows(runs, tracker.run_id)] == sorted(METRICS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_before_anything_is_written(
    runs: Path, tracker: Tracker, bad: float
) -> None:
    with pytest.raises(UserError, match=r"step 4: metric train/loss is -?(nan|inf)"):
        tracker.log_step(4, METRICS | {"train/loss": bad}, timestamp_ms=7)
    assert metric_rows(runs, tracker.run_id) == []


def test_more_metrics_than_a_batch_holds_are_all_there(runs: Path, tracker: Tracker) -> None:
    for _ in range(2):
        tracker.log_step(1, METRICS | {f"kv/{layer}": 1.0 for layer in range(1500)}, timestamp_ms=7)
    assert len(metric_rows(runs, tracker.run_id)) == 1503


def test_the_run_that_a_killed_process_created_is_taken(open_tracker: Callable[..., Tracker]) -> None:
    created = open_tracker("training-1")
    assert created.client.get_run(created.run_id).data.tags[TRAINING] == "training-1"
    assert open_tracker("training-1") == created
    assert open_tracker("training-2").run_id != created.run_id


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "custom_model_development"),
        ("genai_development_inferred", "custom_model_development"),
        ("genai_development", "genai_development"),
    ],
)
def test_an_experiment_opens_in_the_pages_for_training_unless_others_were_chosen(
    open_tracker: Callable[..., Tracker], before: str | None, after: str
) -> None:
    name = f"pages-{before}"
    if before is not None:
        client = open_tracker().client
        client.create_experiment(name, tags={"mlflow.experimentKind": before})
    tracker = open_tracker(experiment=name)
    assert tracker.client.get_experiment(tracker.experiment_id).tags["mlflow.experimentKind"] == after


def test_an_experiments_note_leads_to_its_runs_with_their_headline_metrics(
    open_tracker: Callable[..., Tracker],
) -> None:
    """The columns that MLflow's page reads from the link's tag are metrics that runs have; a user's note stays."""
    tracker = open_tracker(experiment="noted")
    tags = tracker.client.get_experiment(tracker.experiment_id).tags
    (name,) = re.findall(r"viewStateShareKey=([\w-]+)", tags["mlflow.note.content"])
    assert f"#/experiments/{tracker.experiment_id}/runs?" in tags["mlflow.note.content"]
    columns = json.loads(tags[f"mlflow.sharedViewState.{name}"])["selectedColumns"]
    assert {f"metrics.`{each}`" for each in ("core/reward", "core/heldout", "core/error_minus_1", "core/k3")} < {
        *columns
    }
    tracker.client.set_experiment_tag(tracker.experiment_id, "mlflow.note.content", "mine")
    open_tracker(experiment="noted")
    assert tracker.client.get_experiment(tracker.experiment_id).tags["mlflow.note.content"] == "mine"


def test_a_run_that_ended_is_resumed(tracker: Tracker) -> None:
    tracker.finish("FAILED", "disk full", 5_000)
    run = tracker.client.get_run(tracker.run_id)
    assert (run.info.status, run.info.end_time, run.data.tags["error"]) == ("FAILED", 5_000, "disk full")
    for _ in range(2):
        tracker.resume()
        run = tracker.client.get_run(tracker.run_id)
        assert (run.info.status, "error" in run.data.tags) == ("RUNNING", False)


@pytest.mark.parametrize("outcome", ["FINISHED", "FAILED", "KILLED"])
def test_a_run_ends_with_its_outcome(tracker: Tracker, outcome: str) -> None:
    tracker.finish(outcome, None, 5_000)
    info = tracker.client.get_run(tracker.run_id).info
    assert (info.status, info.end_time) == (outcome, 5_000)


def test_parameters_are_json_cut_at_the_limit_and_written_once(tracker: Tracker) -> None:
    config = {f"extra.{index}": index for index in range(120)}
    config |= {"steps": 80, "model": None, "tracking.experiment": "exp", "exact": True, "pipeline.steps": ["x" * 7000]}
    tracker.log_params(config)
    params = tracker.client.get_run(tracker.run_id).data.params
    assert len(params) == len(config)
    assert (params["model"], params["exact"], params["tracking.experiment"]) == ("null", "true", "exp")
    assert len(params["pipeline.steps"]) == MAX_PARAM_VAL_LENGTH
    assert params["pipeline.steps"].endswith("x…")

    tracker.log_params(config | {"steps": 120, "new": 1})
    data = tracker.client.get_run(tracker.run_id).data
    assert data.params == params | {"new": "1"}
    assert data.tags["steps"] == "120"
    assert "model" not in data.tags


def test_tables_are_replaced_and_listed_for_the_preview(tracker: Tracker, tmp_path: Path) -> None:
    columns, right, wrong = ("step", "prompt", "reward"), (10, "2+3=", 1.0), (10, '1"<b>é', 0.0)
    tracker.log_tables({"samples/10.json": (columns, [right])})
    tracker.log_tables({"samples/10.json": (columns, [right, wrong]), "artifacts/10.json": (columns, [])})
    table = json.loads(artifact_text(tracker, "samples/10.json", tmp_path))
    assert table == {"columns": list(columns), "data": [list(right), list(wrong)]}
    tag = json.loads(tracker.client.get_run(tracker.run_id).data.tags[MLFLOW_LOGGED_ARTIFACTS])
    assert tag == [{"path": f"{folder}/10.json", "type": "table"} for folder in ("samples", "artifacts")]

    # MLflow's own method writes the same file and tag: the format that its UI previews.
    rows = dict(zip(columns, zip(right, wrong, strict=True), strict=True))
    tracker.client.log_table(tracker.run_id, {column: list(values) for column, values in rows.items()}, "own.json")
    assert json.loads(artifact_text(tracker, "own.json", tmp_path)) == table
    own_tag = json.loads(tracker.client.get_run(tracker.run_id).data.tags[MLFLOW_LOGGED_ARTIFACTS])
    assert own_tag == [*tag, {"path": "own.json", "type": "table"}]


def test_the_list_of_tables_keeps_the_newest_that_fit_a_tag(tracker: Tracker) -> None:
    listed = [{"path": f"samples/step_{step:06d}.json", "type": "table"} for step in range(145)]
    tracker.set_tags({MLFLOW_LOGGED_ARTIFACTS: json.dumps(listed)})
    tracker.log_tables({"samples/step_000145.json": (("step",), [])})
    tag = tracker.client.get_run(tracker.run_id).data.tags[MLFLOW_LOGGED_ARTIFACTS]
    paths = [entry["path"] for entry in json.loads(tag)]
    assert paths[-1] == "samples/step_000145.json"
    assert paths[0] == "samples/step_000001.json"
    assert len(paths) == 145


def test_texts_and_pictures_are_replaced(runs: Path, tracker: Tracker, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    for content in (b"old", b"new"):
        picture.write_bytes(content)
        tracker.log_file(picture, "pictures")
        tracker.log_text(content.decode(), "graph.txt")
        tracker.log_dict({"is": content.decode()}, "config.yaml")
    assert artifact_text(tracker, "pictures/curves.png", tmp_path) == "new"
    assert artifact_text(tracker, "graph.txt", tmp_path) == "new"
    assert artifact_text(tracker, "config.yaml", tmp_path).strip() == "is: new"
    assert (runs / "mlartifacts" / tracker.run_id / "artifacts" / "graph.txt").is_file()


def test_what_cannot_be_opened_is_one_line_that_names_it(runs: Path, tracker: Tracker, tmp_path: Path) -> None:
    uri = default_tracking_uri(runs)
    with pytest.raises(UserError, match=r"tracking\.uri sqlite:.*missing-run"), store_errors(uri):
        replace(tracker, run_id="missing-run").resume()
    tracker.client.delete_run(tracker.run_id)
    with pytest.raises(UserError, match=f"MLflow run {tracker.run_id} is deleted"):
        tracker.resume()
    tracker.client.delete_experiment(tracker.client.create_experiment("gone"))
    with pytest.raises(UserError, match=r"tracking\.experiment gone is deleted"):
        Tracker.open(uri, "gone", "tiny", runs, "training")
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to have a header")
    with pytest.raises(UserError, match=r"tracking\.uri sqlite:.*not a database"):
        Tracker.open(default_tracking_uri(tmp_path), "exp", "tiny", tmp_path, "training")
    with pytest.raises(UserError, match=r"tracking\.uri http://127\.0\.0\.1:9"):
        Tracker.open("http://127.0.0.1:9", "exp", "tiny", runs, "training")
    with pytest.raises(UserError, match="name a file"):
        Tracker.open("sqlite://", "exp", "tiny", runs, "training")
    (tmp_path / "a_file").touch()
    with pytest.raises(UserError, match="a_file: File exists"):
        Tracker.open(default_tracking_uri(tmp_path / "a_file"), "exp", "tiny", runs, "training")


def test_a_read_only_database_is_named_with_the_cause(runs: Path, tracker: Tracker) -> None:
    """SQLAlchemy begins with a line about its flush, and MLflow repeats it."""
    uri = f"sqlite:///file:{runs / 'mlflow.db'}?mode=ro&uri=true"
    with (
        pytest.raises(Outage, match=r"^tracking\.uri sqlite:.*: attempt to write a readonly database$"),
        store_errors(uri),
    ):
        MlflowClient(tracking_uri=uri).create_run(tracker.experiment_id)


def test_the_page_is_that_of_the_run(tracker: Tracker) -> None:
    path = f"/#/experiments/{tracker.experiment_id}/runs/{tracker.run_id}/model-metrics?workflowType=machine_learning"
    assert tracker.page == f"http://127.0.0.1:5000{path}"
    assert replace(tracker, uri="http://tracking:8080/").page == f"http://tracking:8080{path}"


def test_texts_of_others_reach_mlflow_escaped_and_without_passwords(tracker: Tracker, tmp_path: Path) -> None:
    hostile = "\x1b]0;mine\x07 \u202e https://me:secret@host"
    tracker.log_params({"data.source": hostile})
    tracker.set_tags({"name": hostile})
    tracker.finish("FAILED", hostile, 1)
    tracker.log_text(f"{hostile}\nmore\n", "graph.txt")
    tracker.log_tables({"samples/1.json": (("prompt",), [(f"{hostile}\nmore",)])})
    data = tracker.client.get_run(tracker.run_id).data
    (cells,) = json.loads(artifact_text(tracker, "samples/1.json", tmp_path))["data"]
    shown = [data.params["data.source"], data.tags["name"], data.tags["error"], *cells]
    shown.append(artifact_text(tracker, "graph.txt", tmp_path))
    for text in shown:
        assert text.startswith("\\x1b]0;mine\\x07 \\u202e https://me:***@host")
    assert cells[0].endswith("\nmore")
