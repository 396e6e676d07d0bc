"""What is alive for as long as a run lasts is hidden from the garbage collector, and shown to it when it may go."""

import gc
import weakref

from fp8core.run import checkpoint, start


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
