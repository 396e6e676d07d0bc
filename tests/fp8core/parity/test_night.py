from pathlib import Path

import pytest

from fp8core.parity.night import RECORD, Night, changes, last_passing, write_night
from fp8core.parity.verdict import Check


def night(name: str, **changed) -> Night:
    made = {
        "name": name,
        "config": "tiny",
        "ended": f"2026-08-{name}T04:00:00+00:00",
        "outcome": "PASS",
        "headline": "PASS",
        "variants": ("bf16",),
        "seeds": (0, 1),
        "code_version": "c0de",
        "git": {"commit": "abc", "dirty": False},
        "versions": {"torch": "2.11"},
        "hardware": {"cpu": "a"},
        "settings": {"training": {"learning_rate": 1e-4}},
        "checks": (Check("bf16", "memory slope", "PASS", "0.1 MiB a step", "<= 2 MiB a step", "leaks", 0.1),),
    }
    return Night.model_validate({**made, **changed})


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    for name, changed in {
        "01": {},
        "02": {},
        "03": {"outcome": "FAIL"},
        "04": {"outcome": "NOT ENOUGH DATA"},
        "05": {"config": "llama"},
        "06": {},
    }.items():
        (tmp_path / name).mkdir()
        write_night(night(name, **changed), tmp_path / name)
    return tmp_path


def test_the_last_night_that_passed_is_found(shelf):
    found = last_passing(shelf, "tiny", "06")
    assert found == night("02")
    assert last_passing(shelf, "qwen3", "06") is None
    assert last_passing(shelf / "gone", "tiny", "06") is None


def test_a_record_of_another_version_is_passed_over(shelf):
    (shelf / "02" / RECORD).write_text('{"name": "02"}')
    found = last_passing(shelf, "tiny", "06")
    assert found is not None
    assert found.name == "01"


def test_nothing_changed():
    assert changes(night("01"), night("02")) == []


def test_code_libraries_settings_outcomes_and_metrics_are_told_apart():
    check = Check("bf16", "memory slope", "FAIL", "3 MiB a step", "<= 2 MiB a step", "leaks", 3.0)
    now = night(
        "02",
        code_version="fee1",
        git={"commit": "abc", "dirty": True},
        versions={"torch": "2.12", "numpy": "2"},
        settings={"training": {"learning_rate": 1e-3}},
        checks=(check,),
    )
    found = [(one.kind, one.what, one.before, one.now) for one in changes(night("01"), now)]
    assert found == [
        ("code", "version", "c0de", "fee1"),
        ("code", "dirty", "false", "true"),
        ("library", "torch", "2.11", "2.12"),
        ("library", "numpy", "absent", "2"),
        ("setting", "training.learning_rate", "0.0001", "0.001"),
        ("outcome", "bf16: memory slope", "PASS", "FAIL"),
        ("metric", "bf16: memory slope", "0.1", "3"),
    ]
