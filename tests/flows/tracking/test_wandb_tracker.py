"""A training in W&B's offline mode, read back from what W&B wrote."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb
from offline_wandb import OfflineRun
from published_copy import KILLED, Copy

from flows.tracking.record import ServiceRecord, read_record
from flows.tracking.tracker import Outage, Training, find_tracker
from fp8core.config.load import load_config
from fp8core.errors import UserError


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))


@pytest.fixture
def copy(copy_of_trained: Callable[..., Copy]) -> Copy:
    return copy_of_trained("sqlite:///", services=("wandb",))


def test_metrics_configuration_tables_and_files_are_there(copy: Copy, offline: None) -> None:
    assert copy.publish() == ""
    run = OfflineRun(copy.folder)
    assert [row["step"] for row in run.steps()] == [0, 1, 2, 3]
    assert [row["step"] for row in run.steps() if "core/2_heldout" in row] == [0, 2, 3]
    assert (run.config()["steps"], run.config()["tracking"]["services"]) == (3, ["wandb"])
    words = {"alignment_contract: exact", "config: tiny", "precision: fp8_block+fp8", "bounds: kept"}
    assert words | {"diagnosis: none"} <= {*run.tags()}
    assert run.summary()["outcome"] == "FINISHED"
    assert run.exit_codes == [0]
    assert {"completions", "samples"} == run.tables().keys()
    assert run.tables()["completions"]["columns"][:3] == ["prompt", "completion", "reward"]
    steps = {f"manifests/{step:05d}.json" for step in range(4)}
    assert run.files() == steps | {"config.yaml", "graph.txt", "summary.json", "report.html", "pictures/curves.png"}
    assert {"tiny-run-00002": "model", "tiny-run-00003": "model"}.items() <= run.artifacts().items()
    record = read_record(copy.folder).services["wandb"]
    assert (run.ids, record.published, record.models, record.told) == ({record.run_id}, 3, 3, True)
    assert record.experiment_id == copy.config.tracking.experiment


def publish_and_die(copy: Copy) -> None:
    """The main function of a process that dies when its second step is noted."""
    from flows.tracking.record import RecordFile

    original = RecordFile.change_service

    def last_change(self: Any, service: str, **fields: Any) -> None:
        original(self, service, **fields)
        if fields.get("published") == 1:
            os._exit(KILLED)

    RecordFile.change_service = last_change
    copy.publish()


def test_a_killed_process_and_the_next_one_log_each_step_once_in_one_run(
    copy: Copy, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # Else W&B's process would be ours, and outlive the child.
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=publish_and_die, args=(copy,))
    child.start()
    child.join()
    assert child.exitcode == KILLED
    for _ in range(2):
        assert copy.publish() == ""
    run = OfflineRun(copy.folder)
    assert [row["step"] for row in run.steps()] == [0, 1, 2, 3]
    assert run.ids == {read_record(copy.folder).services["wandb"].run_id}


def test_a_server_that_is_away_refuses_a_new_run_and_is_asked_again_for_a_known_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb.teardown()  # It reads its variables once.
    online = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "a"}
    for name, value in online.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("flows.tracking.wandb_tracker._INIT_SECONDS", 1.0)
    training = Training(load_config("tiny"), "tiny", "id", tmp_path)
    with pytest.raises(UserError, match=r"^W&B: .* POST http://127\.0\.0\.1:9"):
        find_tracker("wandb").open(training, None)
    tracker = find_tracker("wandb").open(training, ServiceRecord(uri=online["WANDB_BASE_URL"], run_id="known"))
    for _ in range(2):
        with pytest.raises(Outage, match=r"^W&B: .* POST http://127\.0\.0\.1:9"):
            tracker.start({})
    tracker.end("FINISHED", None, 5_000)
    wandb.teardown()


def test_without_a_key_a_run_does_not_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb.teardown()  # It reads its variables once.
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"^tracking\.services=wandb: no API key; run `wandb login`"):
        find_tracker("wandb").check(load_config("tiny"))
    wandb.teardown()
