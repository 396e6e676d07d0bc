"""SIGKILL at every boundary of a run: between any two lines of the ledger or shards, and inside what lies between."""

import pytest


@pytest.mark.parametrize("first", ["after", pytest.param("before", marks=pytest.mark.slow)])
def test_a_kill_at_every_boundary(new_training, whole, tmp_path, first):
    """Each life gets one further: the start of the process and one thing more are durable when it dies.

    It dies right after that, or right before the next (whose artifacts are stored), in turn.
    """
    training, died = new_training("run", runs=tmp_path), []
    ways = [{"after": 2}, {"before": 3}] if first == "after" else [{"before": 3}, {"after": 2}]
    while (life := training.live(**ways[len(died) % 2])).killed:
        died += life.said("died")
        assert len(died) <= len(whole.lives[0].said("durable")), "the run gets nowhere"
    training.must_equal(whole)
    training.must_have_committed_once(whole)
    _, *boundaries = whole.lives[0].said("durable")
    expected = [
        f"after {done}" if "after" in ways[i % 2] else f"before {next_one}"
        for i, (done, next_one) in enumerate(zip(boundaries, [*boundaries[1:], None], strict=True))
    ]
    assert died == [place for place in expected if place != "before None"]
    assert len(died) >= 70


def test_of_a_step_that_was_cut_only_unfinished_groups_are_generated(new_training, whole):
    training = new_training("cut in the rollout")
    place = whole.lives[0].said("durable").index("3 group 1") + 1
    assert training.live(after=place).said("died") == ["after 3 group 1"]
    life = training.live()
    assert life.asked == {(3, 2), (3, 3), *((step, group) for step in (4, 5) for group in range(4))}
    training.must_equal(whole)


# What a life has done when it dies, and the audit event that says so; in the order in which a run comes by.
INSIDE = {
    "the lock is not taken": ("open", r"/lock$"),
    "run.json is written, not renamed": ("os.rename", r"/run\.json"),
    "the shared warm start has no name yet": ("os.rename", r"/warm_starts/\w+\.json"),
    "an artifact is written, not renamed": ("os.rename", r"/artifacts/", 3),
    "the second shard is written, not renamed": ("os.rename", r"/shards/00001/.*parquet$", 2),
    "the manifest is stored, its copy for people is not": ("os.rename", r"/manifests/00001\.json$"),
    "a shard of a committed step is gone": ("os.remove", r"/shards/00001/", 2),
    "another one is gone, too, by the next life's sweep": ("os.remove", r"/shards/00001/", 2),
    "a checkpoint has no trainer.json": ("open", r"/checkpoints/\.00002.*/trainer\.json$"),
    "a checkpoint has no policy": ("open", r"/generation_config\.json$"),
    "a checkpoint is written, not renamed": ("os.rename", r"/checkpoints/00002$"),
    "an old checkpoint has lost its name": ("shutil.rmtree", r"/checkpoints/\.00002\.partial$", 1, "5 checkpoint"),
    "the sweep has removed a part of it": ("os.remove", r"^\w+\.safetensors$", 2),
}


def test_kills_in_the_middle_of_a_write(new_training, whole, instant, tmp_path):
    training = new_training("run", runs=tmp_path)
    for done, place in INSIDE.items():
        assert training.live(audit=instant(*place)).killed, f"no life came by: {done}"
    assert [path.name for path in (training.folder / "checkpoints").glob(".*")] == [".00002.partial"]
    training.live()
    training.must_equal(whole)
    training.must_have_committed_once(whole)
