"""SIGKILL at every boundary of a run, inside of writes and at random instants; and a second process on one run."""

import random
import socket
import time

import pytest


@pytest.fixture(scope="module")
def short(new_training):
    """An uninterrupted run of a plain step, one with a checkpoint, and the last one, whose checkpoint removes that."""
    training = new_training("short", steps=3)
    assert training.live().finished
    return training


@pytest.mark.parametrize("first", ["after", pytest.param("before", marks=pytest.mark.slow)])
def test_a_kill_at_every_boundary(new_training, short, tmp_path, first):
    """Each life gets one further: the start of the process and one thing more are durable when it dies.

    It dies right after that, or right before the next (whose artifacts are stored), in turn.
    """
    training, died = new_training("run", runs=tmp_path, steps=3), []
    ways = [{"after": 2}, {"before": 3}] if first == "after" else [{"before": 3}, {"after": 2}]
    while (life := training.live(**ways[len(died) % 2])).killed:
        died += life.said("died")
        assert len(died) <= len(short.lives[0].said("durable")), "the run gets nowhere"
    training.must_equal(short)
    training.must_have_committed_once(short)
    _, *boundaries = short.lives[0].said("durable")
    expected = [
        f"after {done}" if "after" in ways[i % 2] else f"before {next_one}"
        for i, (done, next_one) in enumerate(zip(boundaries, [*boundaries[1:], None], strict=True))
    ]
    assert died == [place for place in expected if place != "before None"]
    assert len(died) >= 45


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


# Steps between checkpoints, and the longest life as a share of the work of an uninterrupted run. A life redoes none,
# one or all of the steps before it gets further.
LIVES = {1: 0.45, 2: 0.45, 100: 0.9}


@pytest.fixture(scope="module")
def whole_of(new_training):
    """Uninterrupted runs by the steps between their checkpoints."""
    wholes = {}

    def of(every):
        if every not in wholes:
            wholes[every] = new_training(f"whole {every}", **{"checkpoint.every": every})
            assert wholes[every].live().finished
        return wholes[every]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("every", LIVES)
def test_a_run_killed_at_random_instants_equals_one_that_was_not(new_training, whole_of, tmp_path, every):
    whole, instants = whole_of(every), random.Random(f"0/{every}")
    training = new_training("run", runs=tmp_path, **{"checkpoint.every": every})
    longest = LIVES[every] * whole.lives[0].seconds
    while training.live(seconds=instants.uniform(0, longest)).killed:
        assert len(training.lives) < 50, "the run gets nowhere"
    training.must_equal(whole)
    training.must_have_committed_once(whole)


LIMIT_SECONDS = 60


class Hold:
    """Stays where it is once a thing has become durable."""

    def __init__(self, what):
        self._what = what

    def before(self, what):
        pass

    def after(self, what):
        self.note(durable=what)
        if what == self._what:
            time.sleep(LIMIT_SECONDS)


@pytest.fixture
def holding(new_training):
    """A run whose process has stopped in the middle of a step, alive."""
    training = new_training("held")
    training.begin(watch=Hold("2 rollout"))
    deadline = time.monotonic() + LIMIT_SECONDS
    while {"durable": "2 rollout"} not in training.notes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield training
    if not training.lives:
        training.kill()
        training.end()


def test_the_second_is_refused_at_once_and_a_kill_frees_the_run(new_training, whole, holding):
    before = (holding.folder / "ledger.jsonl").read_bytes()
    second = new_training("held")
    began = time.monotonic()
    error = second.live().error
    assert f"{holding.folder} is in use by process {holding.pid} on {socket.gethostname()}" in error
    assert time.monotonic() - began < 5
    assert (holding.folder / "ledger.jsonl").read_bytes() == before
    holding.kill()
    assert holding.end().killed
    assert holding.live().finished
    holding.must_equal(whole)
    holding.must_have_committed_once(whole)
