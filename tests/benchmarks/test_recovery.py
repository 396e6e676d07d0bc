import pytest

from benchmarks import recovery
from fp8core.store.artifacts import ArtifactStore, RolloutShards


class Going:
    """A process that has not ended."""

    def poll(self):
        return None


@pytest.fixture
def watched(run_copy, tmp_path):
    return recovery.Watched(run_copy.folder, tmp_path / "log", Going(), 60.0)


def test_shards_stay_when_the_run_has_removed_them_and_doubles_are_counted(watched, run_copy):
    rollouts = ArtifactStore(run_copy.folder).get_table(run_copy.ledger.artifacts(4)["rollouts"])
    shards = RolloutShards(run_copy.folder / "shards" / "00004")
    for part in (rollouts.slice(0, 8), rollouts.slice(4, 8)):
        shards.append(part)
        assert watched.until(lambda: watched.shards(), "a shard")
    shards.clear()
    counts = watched.finished(4)
    assert sum(counts.values()) == 16
    assert sum(count - 1 for count in counts.values()) == 4
    assert counts.keys() < watched.rollouts(4)
    assert not counts.keys() & watched.rollouts(3)


def test_a_run_that_ended_is_an_error_with_what_it_wrote(watched, tmp_path, monkeypatch):
    (tmp_path / "log").write_text("no memory")
    monkeypatch.setattr(Going, "poll", lambda _: 1)
    with pytest.raises(RuntimeError, match=r"a step did not come: no memory"):
        watched.until(lambda: False, "a step")
