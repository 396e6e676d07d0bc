"""What is alive for as long as a run lasts is hidden from the garbage collector, and shown to it when the run ends."""

import gc
import weakref

from tasks import start


def test_a_run_freezes_what_it_is_made_of_until_it_ends(run_copy):
    assert gc.get_freeze_count() == 0
    with run_copy.opened() as run:
        start.warm_start(run)
        start.bring_to_life(run)
        assert gc.get_freeze_count() > 10 * len(gc.get_objects(generation=2)), "a full collection sees what is new"
        trainer = weakref.ref(run.ready_trainer())
        run.ready_trainer().itself = run.ready_trainer()
    del run
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert trainer() is None, "weights in a cycle go with the run"
