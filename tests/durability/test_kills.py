"""SIGKILL at ten points of a run, in the middle of writes, and a second process on one run."""

import io
import json
import socket
import time

import pytest

from fp8core.report.console import Console
from fp8core.run.replay import RunSnapshot, replay
from fp8core.store.artifacts import ArtifactStore

# Spread over the points of a step: a task, its line in the ledger, a shard, a manifest, a checkpoint.
KILLS = [
    {"after": "0 warm_start"},
    {"before": "0 step"},
    {"after": "1 group 1"},
    {"before": "1 rollout"},
    {"after": "2 logprobs"},
    {"before": "2 train"},
    {"before": "2 step"},
    {"before": "2 checkpoint"},
    {"after": "3 calibrate"},
    {"after": "4 step"},
]


def test_a_run_that_is_killed_at_ten_points_equals_one_that_was_not(new_training, whole, tmp_path):
    training = new_training("run", runs=tmp_path)
    for point in KILLS:
        ((when, what),) = point.items()
        assert training.live(**point).said("died") == [f"{when} {what}"]
    assert training.live().finished
    training.must_equal(whole)
    training.must_have_committed_once(whole)


def test_a_run_with_drafts_that_is_killed_equals_one_without(new_training, whole, tmp_path):
    training = new_training("run", runs=tmp_path, **{"rollout.speculation.source": "suffix"})
    for point in ({"after": "1 group 1"}, {"after": "3 group 0"}):
        assert training.live(**point).killed
    assert training.live().finished
    training.must_equal(whole)


def other_settings(kind, checkpoint, folder):
    """Muon, or a checkpoint with two sources, one of which has a system prompt and a verifier of its own."""
    if kind == "muon":
        return {"training.optimiser.name": "muon"}
    rows = [{"question": f"{n} apples and {n}?", "answer": f"#### {2 * n}"} for n in range(99)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    apples = {"name": "apples", "source": str(folder / "rows.jsonl"), "system": "Be brief.", "verifier": "integer"}
    return {"data": [apples, {"name": "chain"}], "model": str(checkpoint), "architecture": None, "warm_start": None}


@pytest.mark.parametrize("kind", ["muon", "sources"])
def test_other_updates_are_equal_after_kills(new_training, small_checkpoint, tmp_path, kind):
    """The second is redone from the first checkpoint, and the fourth has its momentum from the redone third."""
    settings = {**other_settings(kind, small_checkpoint, tmp_path), "checkpoint.every": 2}
    expected, training = (new_training("one", runs=tmp_path / name, **settings) for name in ("whole", "killed"))
    assert expected.live().finished
    for point in ({"after": "1 group 1"}, {"before": "2 train"}, {"after": "3 train"}, {"after": "4 step"}):
        assert training.live(**point).killed
    assert training.live().finished
    training.must_equal(expected)
    if kind == "sources":
        prompts = ArtifactStore(training.folder).get_table(training.ledger.artifacts(3)["prompts"])
        assert {*prompts["source"].to_pylist()} == {"apples", "chain"}
        for row in prompts.to_pylist():
            assert ("<|im_start|>system\nBe brief.<|im_end|>" in row["text"]) == (row["source"] == "apples")
        verdicts = replay(RunSnapshot.read(training.folder), range(3, 4), Console(io.StringIO(), 3))
        assert [verdict.outcome for verdict in verdicts] == ["equal"]


def test_of_a_step_that_was_cut_only_unfinished_groups_are_generated(new_training, whole):
    training = new_training("cut in the rollout")
    assert training.live(after="3 group 1").killed
    life = training.live()
    assert life.asked == {(3, 2), (3, 3), *((step, group) for step in (4, 5) for group in range(4))}
    training.must_equal(whole)


# What a life has done when it dies, and the audit event that says so; in the order in which a run comes by.
INSIDE = {
    "run.json is written, not renamed": ("os.rename", r"/run\.json"),
    "the second shard is written, not renamed": ("os.rename", r"/shards/00001/.*parquet$", 2),
    "the manifest is stored, its copy for people is not": ("os.rename", r"/manifests/00001\.json$"),
    "a shard of a committed step is gone": ("os.remove", r"/shards/00001/", 2),
    "a checkpoint has no policy": ("open", r"/generation_config\.json$"),
    "a checkpoint is written, not renamed": ("os.rename", r"/checkpoints/00002$"),
    "an old checkpoint has lost its name": ("shutil.rmtree", r"/checkpoints/\.00002\.partial$", 1, "5 checkpoint"),
}


def test_kills_in_the_middle_of_a_write(new_training, whole, instant, tmp_path):
    training = new_training("run", runs=tmp_path)
    for done, place in INSIDE.items():
        assert training.live(audit=instant(*place)).killed, f"no life came by: {done}"
    training.live()
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
    error = new_training("held").live().error
    assert f"{holding.folder} is in use by process {holding.pid} on {socket.gethostname()}" in error
    assert (holding.folder / "ledger.jsonl").read_bytes() == before
    holding.kill()
    assert holding.end().killed
    assert holding.live().finished
    holding.must_equal(whole)
    holding.must_have_committed_once(whole)
