"""A training in TensorBoard, read back by its own reader."""

from collections.abc import Callable
from pathlib import Path

import pytest
from published_copy import Copy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flows.tracking.record import ServiceRecord, read_record
from flows.tracking.tracker import Table, Training, find_tracker
from fp8core.config.load import load_config


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def steps(events: EventAccumulator, name: str) -> list[int]:
    return [event.step for event in events.Scalars(name)]


def text(events: EventAccumulator, tag: str) -> str:
    """The newest of a tag."""
    return str(events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode())


def test_metrics_configuration_and_completions_are_there_once(copy_of_trained: Callable[..., Copy]) -> None:
    copy = copy_of_trained("sqlite:///", services=("tensorboard",))
    for _ in range(2):
        assert copy.publish() == ""
    events = read_events(copy.folder)
    assert steps(events, "core/1_reward") == [1, 2, 3]
    assert steps(events, "core/2_heldout") == [0, 2, 3]
    assert "steps: 3\n" in text(events, "config.yaml")
    assert text(events, "completions").startswith("| prompt | completion | reward |")
    assert "| bounds | kept |" in text(events, "tags")
    record = read_record(copy.folder).services["tensorboard"]
    assert (record.published, record.told) == (3, True)
    for file in (copy.folder / "tensorboard").iterdir():
        file.unlink()
    copy.publish()
    assert steps(read_events(copy.folder), "core/1_reward") == [1, 2, 3]


def test_a_step_that_was_logged_and_not_noted_counts_once(tmp_path: Path) -> None:
    training, entry = Training(load_config("tiny"), "tiny", "id", tmp_path), find_tracker("tensorboard")
    tracker = entry.open(training, None)
    tracker.start({"steps": 3, "model": None})
    for step in range(3):
        tracker.log_step(step, {"core/1_reward": step / 2}, 1_700_000_000_000 + step, {})
    known = ServiceRecord(uri=tracker.uri, run_id=tracker.run_id, published=1)
    again = entry.open(training, known)
    assert again.run_id == tracker.run_id
    again.start({"steps": 3, "model": None})
    again.log_step(2, {"core/1_reward": 1.0}, 1_700_000_000_002, {})
    again.log_artifact("completions.json", Table(("prompt", "reward"), [("a|b\nc\x1b", 1.0)]))
    again.end("FAILED", "broken", 5_000)
    events = read_events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("core/1_reward")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert events.Scalars("core/1_reward")[0].wall_time == pytest.approx(1_700_000_000)
    assert text(events, "completions").splitlines()[2] == "| a\\|b<br>c\\x1b | 1.0 |"
    assert text(events, "outcome") == "FAILED: broken"
