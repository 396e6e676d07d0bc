import threading
import time

import pyarrow as pa
import pytest

from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.shards import RolloutShards
from fp8core.store.stopwatch import stored_seconds, storing


@storing()
def _outer():
    with storing():
        time.sleep(0.02)
    time.sleep(0.02)


def test_nested_blocks_count_once_and_nothing_else_counts():
    before = stored_seconds()
    _outer()
    _outer()
    between = stored_seconds() - before
    time.sleep(0.02)
    assert 0.08 <= between == stored_seconds() - before


def test_other_threads_do_not_count():
    before = stored_seconds()
    thread = threading.Thread(target=_outer)
    thread.start()
    thread.join()
    assert stored_seconds() == before


def test_what_a_store_does_counts_also_when_it_fails(tmp_path):
    store, readings = ArtifactStore(tmp_path), [stored_seconds()]
    ref = store.put_table("rollouts", pa.table({"tokens": list(range(20_000))}))
    readings.append(stored_seconds())
    store.get_table(ref)
    readings.append(stored_seconds())
    store.path(ref).unlink()
    with pytest.raises(ArtifactError):
        store.get_table(ref)
    readings.append(stored_seconds())
    RolloutShards(tmp_path / "shards").append(pa.table({"tokens": [1]}))
    readings.append(stored_seconds())
    assert readings == sorted(set(readings))
