"""A run with a learning-rate schedule, extended: its past stays, and the end of the schedule with it."""

import pytest

from fp8core.errors import UserError
from fp8core.store.run_directory import read_description

SCHEDULE = {"training.warmup_steps": 1, "training.learning_rate_schedule.kind": "linear"}


def rates(run):
    return [
        run.store.get_json(run.ledger.artifacts(step)["train_report"])["learning_rate"]
        for step in sorted(run.ledger.steps())[1:]
    ]


def test_an_extended_run_is_the_one_that_was_to_be_so_long(loop_run):
    extended = loop_run("extended", **SCHEDULE, steps=3)
    with pytest.raises(UserError, match=r"over_steps: 3 -> 5; begin another one"):
        loop_run("extended", **SCHEDULE, steps=5, runs=str(extended.folder.parent))
    assert read_description(extended.folder).config["training"]["learning_rate_schedule"]["over_steps"] == 3
    extended.resume(steps=5)
    longer = loop_run("longer", **SCHEDULE, steps=5, **{"training.learning_rate_schedule.over_steps": 3})
    passes = loop_run("passes", **SCHEDULE, steps=3, **{"training.epochs": 2})
    assert rates(passes) == pytest.approx([1e-4 * (1 - 0.9 * place / 6) for place in (1, 3, 5)])
    assert rates(extended) == rates(longer) == pytest.approx([1e-4, 0.7e-4, 0.4e-4, 1e-5, 1e-5])
    assert extended.records[-1]["weights_digest"] == longer.records[-1]["weights_digest"]
