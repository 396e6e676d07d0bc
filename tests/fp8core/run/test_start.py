"""What is alive for as long as a run lasts is hidden from the garbage collector, and shown to it when it may go."""

import gc
import weakref

import pytest

from fp8core.run import checkpoint, start
from fp8core.store.diff import first_difference
from fp8core.store.ledger import START
from fp8core.store.manifest import StepRecord
from fp8core.store.start_tasks import START_TASKS


def in_a_cycle(run):
    """The trainer, weakly: only the collector can free it."""
    run.trainer.itself = run.trainer
    return weakref.ref(run.trainer)


def test_a_run_freezes_what_it_is_made_of_until_it_ends(run_copy):
    assert gc.get_freeze_count() == 0
    with run_copy.opened() as run:
        start.warm_start(run)
        start.build_workers(run)
        assert gc.get_freeze_count() > 10 * len(gc.get_objects(generation=2)), "a full collection sees what is new"
        trainer = in_a_cycle(run)
    del run
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert trainer() is None


def test_a_trainer_is_gone_before_another_takes_its_place(run_copy, monkeypatch):
    found, build = [], checkpoint.initial_trainer

    def watched(*arguments):
        found.append(trainer())
        return build(*arguments)

    monkeypatch.setattr(checkpoint, "initial_trainer", watched)
    with run_copy.opened() as run:
        start.warm_start(run)
        start.build_workers(run)
        trainer = in_a_cycle(run)
        checkpoint.load_state(run, 0)
        assert found == [None]
        assert run.ready_trainer().version == 0
        assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("score", [-1.0, 3.5])
def test_a_score_may_be_any_number_and_a_style_has_a_share_of_right_answers(loop_run, tmp_path, score):
    verifier = tmp_path / "scored.py"
    verifier.write_text(f"def score(prompt, completion, reference, finish):\n    return {score}\n")
    run = loop_run("scored", **{"reward.verifier": f"{verifier}:score"}, steps=1)
    styles = run.store.get_json(run.ledger.tasks(0)["evaluate"].outputs["evaluation"])["styles"]
    assert {style["accuracy"] for style in styles} <= {0.0, float(score > 1)}


def test_the_table_of_step_0_has_its_tasks_in_their_order(loop_run):
    run = loop_run("ahead", **{"pipeline.mode": "one_step_off", "steps": 1})
    found = run.ledger.tasks(START)
    assert [*found] == [*START_TASKS]
    for task, entry in found.items():
        assert entry.outputs, task
        assert {name: ref.kind for name, ref in entry.outputs.items()}.items() <= START_TASKS[task].outputs.items()
    # In this order two runs are compared: what the other tasks make follows from the stream.
    ours, theirs = (StepRecord.model_validate(record) for record in (run.records[0], run.records[0]))
    for task, name in (("precision_gap", "precision_gap"), ("stream", "stream")):
        changed = theirs.outputs[task][name].model_copy(update={"digest": "0" * 64})
        theirs = theirs.model_copy(update={"outputs": {**theirs.outputs, task: {name: changed}}})
    difference = first_difference(ours, theirs, order=[])
    assert difference is not None
    assert difference.path == "outputs.stream.stream"
