import io
import json
import logging
import sqlite3
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from mlflow import MlflowClient
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

from fp8core.errors import UserError
from tasks.tracking import (
    SAMPLE_COLUMNS,
    Sample,
    Tracker,
    create_sqlite_store,
    default_tracking_uri,
    quiet_store_logs,
    resolve_tracking_uri,
    ui_command,
)

METRICS = {"reward/mean": 0.5, "train/loss": 0.1 + 0.2, "alignment/token_mult_prob_error": 1.0}


class FreshStore(NamedTuple):
    runs: Path
    printed: str


@pytest.fixture(scope="session")
def fresh_store(tmp_path_factory: pytest.TempPathFactory) -> FreshStore:
    runs = tmp_path_factory.mktemp("runs")
    # What a kill in the middle of the schema's migrations leaves.
    (runs / "mlflow.db.new").write_bytes(b"torn")
    printed = io.StringIO()
    quiet_store_logs()
    with redirect_stdout(printed), redirect_stderr(printed):
        Tracker.open(default_tracking_uri(runs), "exp", "first", runs, None)
    return FreshStore(runs, printed.getvalue())


@pytest.fixture
def runs(fresh_store: FreshStore) -> Path:
    return fresh_store.runs


@pytest.fixture
def tracker(runs: Path) -> Tracker:
    return open_run(runs)


def open_run(runs: Path, resume: str | None = None) -> Tracker:
    return Tracker.open(default_tracking_uri(runs), "exp", "tiny", runs, resume)


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
    open_run(runs, tracker.run_id).log_step(3, METRICS, timestamp_ms=1_700_000_000_123)
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


def test_more_metrics_than_a_batch_holds_put_the_reward_last(
    runs: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[str]] = []
    log_batch = tracker.client.log_batch

    def recorded(run_id: str, metrics: list) -> None:
        batches.append([metric.key for metric in metrics])
        log_batch(run_id, metrics=metrics)

    monkeypatch.setattr(tracker.client, "log_batch", recorded)
    tracker.log_step(1, METRICS | {f"kv/{layer}": 1.0 for layer in range(1500)}, timestamp_ms=7)
    assert [len(batch) for batch in batches] == [1000, 503]
    assert batches[-1][-1] == "reward/mean"
    assert len(metric_rows(runs, tracker.run_id)) == 1503


def test_a_killed_run_is_continued_and_knows_its_steps(runs: Path, tracker: Tracker) -> None:
    assert (tracker.logged_steps(), tracker.last_logged_step()) == (set(), None)
    for step in (1, 2, 5):
        tracker.log_step(step, METRICS, timestamp_ms=step)
    tracker.log_step(9, {"warm_start/loss": 2.0}, timestamp_ms=9)
    tracker.finish("KILLED")
    assert tracker.client.get_run(tracker.run_id).info.status == "KILLED"
    continued = open_run(runs, tracker.run_id)
    assert continued == Tracker(continued.client, tracker.uri, tracker.experiment_id, tracker.run_id)
    assert continued.client.get_run(tracker.run_id).info.status == "RUNNING"
    assert (continued.logged_steps(), continued.last_logged_step()) == ({1, 2, 5}, 5)


@pytest.mark.parametrize("outcome", ["FINISHED", "FAILED", "KILLED"])
def test_a_run_ends_with_its_outcome(tracker: Tracker, outcome: str) -> None:
    tracker.finish(outcome)
    assert tracker.client.get_run(tracker.run_id).info.status == outcome


def test_parameters_are_json_cut_at_the_limit_and_written_once(runs: Path, tracker: Tracker) -> None:
    config = {f"extra.{index}": index for index in range(120)}
    config |= {"steps": 80, "model": None, "tracking.experiment": "exp", "exact": True, "pipeline.steps": ["x" * 7000]}
    tracker.log_params(config)
    params = tracker.client.get_run(tracker.run_id).data.params
    assert len(params) == len(config)
    assert (params["model"], params["exact"], params["tracking.experiment"]) == ("null", "true", "exp")
    assert len(params["pipeline.steps"]) == MAX_PARAM_VAL_LENGTH
    assert params["pipeline.steps"].endswith("x…")

    continued = open_run(runs, tracker.run_id)
    continued.log_params(config | {"steps": 120, "new": 1})
    data = continued.client.get_run(tracker.run_id).data
    assert data.params == params | {"new": "1"}
    assert data.tags["steps"] == "120"
    assert "model" not in data.tags


def test_sample_tables_are_replaced_and_listed_for_the_preview(tracker: Tracker, tmp_path: Path) -> None:
    right = Sample("2+3=", "5,#5", "5", 1.0, "right")
    wrong = Sample('1"<b>é', "#", "1", 0.0, "unparsed")
    tracker.log_samples(10, [right])
    tracker.log_samples(10, [right, wrong])
    tracker.log_samples(20, [wrong])
    table = json.loads(artifact_text(tracker, "samples/step_000010.json", tmp_path))
    assert table == {"columns": list(SAMPLE_COLUMNS), "data": [[10, *right], [10, *wrong]]}
    tag = json.loads(tracker.client.get_run(tracker.run_id).data.tags[MLFLOW_LOGGED_ARTIFACTS])
    assert tag == [{"path": f"samples/step_0000{step}.json", "type": "table"} for step in (10, 20)]

    # MLflow's own method writes the same file and tag: the format that its UI previews.
    rows = dict(zip(SAMPLE_COLUMNS, zip((10, *right), (10, *wrong), strict=True), strict=True))
    tracker.client.log_table(tracker.run_id, {column: list(values) for column, values in rows.items()}, "own.json")
    assert json.loads(artifact_text(tracker, "own.json", tmp_path)) == table
    own_tag = json.loads(tracker.client.get_run(tracker.run_id).data.tags[MLFLOW_LOGGED_ARTIFACTS])
    assert own_tag == [*tag, {"path": "own.json", "type": "table"}]


def test_the_list_of_tables_keeps_the_newest_that_fit_a_tag(tracker: Tracker) -> None:
    listed = [{"path": f"samples/step_{step:06d}.json", "type": "table"} for step in range(145)]
    tracker.set_tags({MLFLOW_LOGGED_ARTIFACTS: json.dumps(listed)})
    tracker.log_samples(145, [])
    tag = tracker.client.get_run(tracker.run_id).data.tags[MLFLOW_LOGGED_ARTIFACTS]
    paths = [entry["path"] for entry in json.loads(tag)]
    assert paths[-1] == "samples/step_000145.json"
    assert paths[0] == "samples/step_000001.json"
    assert len(paths) == 145


def test_texts_and_pictures_are_replaced(runs: Path, tracker: Tracker, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    for content in (b"old", b"new"):
        picture.write_bytes(content)
        tracker.log_figure_file(picture, "pictures")
        tracker.log_text(content.decode(), "graph.txt")
        tracker.log_dict({"is": content.decode()}, "config.yaml")
    assert artifact_text(tracker, "pictures/curves.png", tmp_path) == "new"
    assert artifact_text(tracker, "graph.txt", tmp_path) == "new"
    assert artifact_text(tracker, "config.yaml", tmp_path).strip() == "is: new"
    assert (runs / "mlartifacts" / tracker.run_id / "artifacts" / "graph.txt").is_file()


def test_what_cannot_be_opened_is_one_line_that_names_it(runs: Path, tracker: Tracker, tmp_path: Path) -> None:
    uri = default_tracking_uri(runs)
    with pytest.raises(UserError, match="missing-run"):
        open_run(runs, "missing-run")
    tracker.client.delete_run(tracker.run_id)
    with pytest.raises(UserError, match=f"MLflow run {tracker.run_id} is deleted"):
        open_run(runs, tracker.run_id)
    client = MlflowClient(tracking_uri=uri)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(UserError, match=r"tracking\.experiment gone is deleted"):
        Tracker.open(uri, "gone", "tiny", runs, None)
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to have a header")
    with pytest.raises(UserError, match=r"tracking\.uri sqlite:.*not a database"):
        Tracker.open(default_tracking_uri(tmp_path), "exp", "tiny", tmp_path, None)
    with pytest.raises(UserError, match=r"tracking\.uri http://127\.0\.0\.1:9"):
        Tracker.open("http://127.0.0.1:9", "exp", "tiny", runs, None)
    with pytest.raises(UserError, match="name a file"):
        Tracker.open("sqlite://", "exp", "tiny", runs, None)
    (tmp_path / "a_file").touch()
    with pytest.raises(UserError, match=r"tracking\.uri sqlite:"):
        open_run(tmp_path / "a_file")


def test_an_experiment_that_another_process_has_just_created_is_taken(
    runs: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = MlflowClient.get_experiment_by_name
    answers = iter([None])
    monkeypatch.setattr(
        MlflowClient, "get_experiment_by_name", lambda self, name: next(answers, found(self, name)), raising=True
    )
    assert open_run(runs).experiment_id == tracker.experiment_id


def test_a_store_is_made_without_noise_over_the_remains_of_a_kill(fresh_store: FreshStore) -> None:
    assert fresh_store.printed == ""
    assert not (fresh_store.runs / "mlflow.db.new").exists()
    assert logging.getLogger("mlflow.store.db.utils").getEffectiveLevel() == logging.WARNING


def test_a_store_that_exists_is_not_made_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(SqlAlchemyStore, "__init__", refuse)
    create_sqlite_store(runs / "mlflow.db")


@pytest.mark.slow
def test_processes_that_open_a_fresh_store_at_once_share_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tasks.tracking import *; runs = Path(sys.argv[1]);"
        "print(Tracker.open(default_tracking_uri(runs), 'exp', 'tiny', runs, None).experiment_id)"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(tmp_path)]
    children = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    experiments = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0] * 3
    assert len(set(experiments)) == 1
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        assert connection.execute("select count(*) from runs").fetchone() == (3,)


def test_the_store_is_the_configured_one_else_mlflows_else_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_tracking_uri(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert resolve_tracking_uri(None, tmp_path) == "http://tracking:5000"
    assert resolve_tracking_uri("sqlite:///x.db", tmp_path) == "sqlite:///x.db"
    for name in ("a%20b", "what?"):
        with pytest.raises(UserError, match="% or \\?"):
            default_tracking_uri(tmp_path / name)


def test_the_ui_command_is_one_that_a_shell_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside_python = Path(sys.executable).with_name("mlflow")
    uri = default_tracking_uri(tmp_path / "my runs")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ui_command(uri) == f"{beside_python} ui --backend-store-uri '{uri}'"
    monkeypatch.setenv("PATH", str(beside_python.parent))
    assert ui_command(uri) == f"mlflow ui --backend-store-uri '{uri}'"
    assert ui_command("http://tracking:5000") == f"{sys.executable} -m webbrowser http://tracking:5000"


def test_the_page_is_that_of_the_run(tracker: Tracker) -> None:
    path = f"/#/experiments/{tracker.experiment_id}/runs/{tracker.run_id}/model-metrics?workflowType=machine_learning"
    assert tracker.page == f"http://127.0.0.1:5000{path}"
    assert replace(tracker, uri="http://tracking:8080/").page == f"http://tracking:8080{path}"
