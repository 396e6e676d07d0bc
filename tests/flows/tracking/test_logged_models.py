"""Checkpoints are found in MLflow by the metrics of their step, whatever was cut while they were entered."""

import io
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import LoggedModelStatus

from flows.tracking.metric_names import model_metrics
from flows.tracking.publish import (
    heldout_prompts,
    log_datasets,
    model_name,
    publish_checkpoint,
    training_prompts,
)
from flows.tracking.store import default_tracking_uri
from flows.tracking.tracker import Tracker
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.context import RunContext
from fp8core.run.open import open_directory, open_run


@dataclass
class Place:
    run: RunContext
    tracker: Tracker

    def publish(self) -> None:
        for entry in self.run.directory.ledger.checkpoints():
            publish_checkpoint(self.run, self.tracker, entry)

    def search(self, filter_string: str = "") -> list[Any]:
        return list(self.tracker.client.search_logged_models([self.tracker.experiment_id], filter_string))


@pytest.fixture
def place(copy_of_trained, runs) -> Iterator[Place]:
    uri = default_tracking_uri(runs)
    config, folder = copy_of_trained(uri)
    tracker = Tracker.open(uri, config.tracking.experiment, "tiny", runs, "training")
    with (
        open_directory(config, folder.name) as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), 3)) as run,
    ):
        yield Place(run, tracker)


def test_a_search_by_alignment_shows_the_model_and_its_data(place: Place) -> None:
    log_datasets(place.tracker, place.run.config, place.run.source)
    place.publish()
    assert place.search("metrics.`core/error_minus_1` > 0.01") == []
    found = place.search("metrics.`core/error_minus_1` < 0.01 AND metrics.`core/heldout` >= 0")
    assert sorted(model.name for model in found) == ["tiny-run-00002", "tiny-run-00003"]
    (last,) = place.search("metrics.`core/error_minus_1` < 0.01 AND params.step = '3'")
    entry = place.run.directory.ledger.checkpoints()[-1]
    assert (last.status, last.model_type, last.source_run_id) == ("READY", "policy", place.tracker.run_id)
    assert last.tags["weights_digest"] == entry.weights_digest
    assert last.tags["checkpoint"] == str(place.run.directory.path / "checkpoints" / "00003" / "policy")
    assert last.params["rollout.linear"] == "fp8_block"

    metrics = {metric.key: metric for metric in last.metrics}
    assert set(metrics) == {
        *(f"core/{name}" for name in ("error_minus_1", "heldout", "k3", "reward")),
        "detail/alignment/tokens_differing",
    }
    training = training_prompts(place.run.config, place.run.source)
    heldout = heldout_prompts(place.run.config, place.run.source)
    for key, dataset in {"core/k3": training, "core/reward": training, "core/heldout": heldout}.items():
        assert (metrics[key].dataset_name, metrics[key].dataset_digest) == (dataset.name, dataset.digest)
        assert metrics[key].step == 3
    logged = place.tracker.client.get_run(place.tracker.run_id).inputs.dataset_inputs
    assert {(each.dataset.name, each.dataset.digest) for each in logged} == {
        (each.name, each.digest) for each in (training, heldout)
    }
    assert place.search(f"metrics.`core/error_minus_1` < 0.01 AND source_run_id = '{place.tracker.run_id}'")


def test_accuracy_belongs_to_the_steps_that_measured_it() -> None:
    """Without an evaluation of its step a checkpoint has no accuracy, rather than that of another policy."""
    metrics = {"alignment/token_mult_prob_error": 1.5, "alignment/kl": 0.1, "reward/mean": 0.25, "train/loss": 3.0}
    assert model_metrics(metrics) == {"core/error_minus_1": 0.5, "core/reward": 0.25}
    assert model_metrics(metrics | {"reward/heldout_accuracy": 0.75})["core/heldout"] == 0.75


def content(place: Place) -> Any:
    models = [
        (
            model.name,
            str(model.status),
            model.tags,
            model.params,
            sorted((m.key, m.step, m.value) for m in model.metrics),
        )
        for model in place.search()
    ]
    outputs = place.tracker.client.get_run(place.tracker.run_id).outputs.model_outputs
    return sorted(models, key=str), sorted(output.step for output in outputs)


def test_what_a_kill_left_pending_is_completed(place: Place) -> None:
    client, entry = place.tracker.client, place.run.directory.ledger.checkpoints()[0]
    left = client.create_logged_model(
        place.tracker.experiment_id, model_name(place.run, entry.step), place.tracker.run_id
    )
    assert left.status == LoggedModelStatus.PENDING
    place.publish()
    models = place.search(f"source_run_id = '{place.tracker.run_id}'")
    assert sorted(model.name for model in models) == ["tiny-run-00002", "tiny-run-00003"]
    assert {str(model.status) for model in models} == {"READY"}
    assert left.model_id in {model.model_id for model in models}


def test_a_second_time_changes_nothing(place: Place) -> None:
    place.publish()
    once = content(place)
    assert once[1] == [2, 3]
    place.publish()
    assert content(place) == once


def test_metrics_of_which_the_store_has_a_part_are_completed(place: Place, runs: Path) -> None:
    """MLflow writes a batch's rows of the run first, those of the model in a transaction of their own."""
    place.publish()
    once = content(place)
    model = place.search("params.step = '2'")[0]
    with sqlite3.connect(runs / "mlflow.db") as connection:
        lost = "delete from logged_model_metrics where model_id = ? and metric_name in ('core/k3', 'core/reward')"
        assert connection.execute(lost, (model.model_id,)).rowcount == 2
    place.publish()
    assert content(place) == once


def test_a_character_that_mlflow_allows_in_no_models_name_is_no_obstacle(place: Place) -> None:
    place.run.directory.path = place.run.directory.path.with_name("v1.5:it's%")
    assert model_name(place.run, 20) == "v1-5-it-s--00020"
