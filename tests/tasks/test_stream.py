"""Runs that generate beside the update: what they learn from, and that a kill or a replay changes none of it."""

import io
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.run.execute import StepError, carried_artifacts, commit_step, run_step
from fp8core.run.loop import Execution, train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.run.verify import verify
from fp8core.store.run_view import RunView

SETTINGS = {
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 3,
    "pipeline.verified_share": 1.0,
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def ahead(loop_run):
    """A run whose updates land in flight, after three tokens; for reading only."""
    return loop_run("ahead", **SETTINGS)


class Beside(Execution):
    """`ahead` runs beside the other tasks of a step; its engine has written so many chunks when the update ends."""

    def __init__(self, chunks, monkeypatch):
        self._chunks, generate = dict(enumerate(chunks, start=1)), EmbeddedEngine.generate
        self._written = threading.Event()

        def paced(engine, groups, sampling):
            if threading.current_thread().name.startswith("ahead"):
                until = time.monotonic() + 120
                while not self._left and "train" not in self._ledger.tasks(self._step) and time.monotonic() < until:
                    self._written.set()
                    time.sleep(0.001)
                self._left = max(0, self._left - 1)
            return generate(engine, groups, sampling)

        monkeypatch.setattr(EmbeddedEngine, "generate", paced)

    def iterate(self, run, index):
        artifacts, results, tasks = (
            carried_artifacts(run, index),
            {},
            {planned.name: planned for planned in run.graph.steps},
        )
        self._ledger, self._step, self._left = run.directory.ledger, index, self._chunks[index]
        self._written.clear()

        def call(name):
            ports = {port: artifacts[artifact] for port, artifact in tasks[name].inputs.items()}
            return run_step(run, index, tasks[name], ports)

        def ended(name, result):
            results[name] = result
            artifacts.update(result.entry.outputs)

        ended("rollout", call("rollout"))
        with ThreadPoolExecutor(1, "ahead") as pool:
            beside = pool.submit(call, "ahead")
            for name in [name for name in tasks if name not in ("rollout", "ahead")]:
                if name == "sync":
                    ended("ahead", beside.result())
                assert name != "train" or self._written.wait(120)
                ended(name, call(name))
        commit_step(run, index)
        return results


@pytest.fixture(scope="module")
def train_unpaused(small):
    """Train a run that generates until each update has ended, updates of different speeds."""

    def call(runs):
        settings = SETTINGS | {"pipeline.ahead_tokens": None, "pipeline.chunk_tokens": 2}
        config = load_config("tiny", {**small, "steps": 4, "runs": str(runs), **settings})
        with (
            open_directory(config, "unpaused") as directory,
            open_run(config, graph_of(config), directory, Console(io.StringIO(), 4)) as run,
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            train(run, Beside([0, 1, 2, 0], monkeypatch))

    return call


@pytest.fixture(scope="module")
def unpaused(train_unpaused, whole_run, tmp_path_factory):
    """Such a run; for reading only."""
    runs = tmp_path_factory.mktemp("loop")
    train_unpaused(runs)
    return type(whole_run)(runs / "unpaused")


def schedules(run):
    return [run.store.get_json(run.ledger.artifacts(step)["schedule"])["chunks"] for step in range(1, 5)]


def test_generation_goes_on_until_the_update_has_ended(unpaused):
    assert schedules(unpaused) == [[2], [2, 2], [2, 2, 2], [2]]
    for step in range(1, 5):
        metrics = unpaused.store.get_json(unpaused.ledger.artifacts(step)["metrics"])
        assert metrics["alignment/tokens_differing"] == 0
        assert metrics["rollout/staleness_max"] <= 1


def test_a_replay_follows_the_recorded_schedule(unpaused):
    """One task after the other, which alone would write one chunk."""
    verdicts = unpaused.replayed(range(2, 5))
    assert Counter(verdict.outcome for verdict in verdicts) == {"equal": 3}, verdicts
    assert [*verify(RunView.read(unpaused.folder))] == []


def digests(run, kind):
    return [ref.digest for step in range(1, 5) for ref in run.ledger.artifacts(step).values() if ref.kind == kind]


STREAM_ARTIFACTS = {"stream", "left", "behaviour", "next_stream", "schedule"}


def assert_synchronous(run, whole):
    """Equal records, apart from what only a run that generates ahead has, and its settings.

    The settings are in `config_digest`, and `predecessor` has those of the record before. The rollout makes the prompts
    itself. Metrics are more, those of the synchronous run are equal.
    """
    assert len(run.records) == len(whole.records)
    for ours, theirs in zip(run.records, whole.records, strict=True):
        for name in theirs.keys() - {"config_digest", "predecessor", "inputs", "outputs"}:
            assert ours[name] == theirs[name], name
        made, expected = (
            {a: c for task in record["outputs"].values() for a, c in task.items()} for record in (ours, theirs)
        )
        assert made.keys() - expected.keys() <= STREAM_ARTIFACTS
        assert {artifact for artifact in expected if made[artifact] != expected[artifact]} <= {"metrics"}
        for task, read in theirs["inputs"].items():
            expected = {port: content for port, content in read.items() if (task, port) != ("rollout", "prompts")}
            assert not expected or expected.items() <= ours["inputs"][task].items(), task
        if step := ours["step"]:
            found, known = (each.store.get_json(each.ledger.artifacts(step)["metrics"]) for each in (run, whole))
            assert {name: found[name] for name in known} == known
    states = [{entry.step: entry.digest for entry in each.ledger.checkpoints()} for each in (run, whole)]
    assert states[0] == states[1]


@pytest.mark.parametrize("settings", [{"mode": "one_step_off"}, {"mode": "asynchronous", "ahead_tokens": 3}])
def test_without_staleness_it_is_the_synchronous_run(loop_run, whole_run, settings):
    run = loop_run("fresh", pipeline=settings | {"max_staleness": 0, "verified_share": 1.0})
    assert_synchronous(run, whole_run)


def test_every_token_has_the_log_prob_of_the_version_that_wrote_it(ahead):
    ages, spans = set(), set()
    for step in range(1, 5):
        artifacts = ahead.ledger.artifacts(step)
        rollouts, behaviour = (ahead.store.get_table(artifacts[name]) for name in ("rollouts", "behaviour"))
        assert behaviour["logprobs"].equals(rollouts["logprobs"])
        versions = rollouts["versions"].to_pylist()
        ages |= {step - 1 - version for row in versions for version in row}
        spans |= {len(set(row)) for row in versions}
        assert ahead.store.get_json(artifacts["metrics"])["alignment/tokens_differing"] == 0
    assert ages == {0, 1}
    assert spans == {1, 2}, "updates land in flight"


@pytest.mark.parametrize("task", ["rollout", "train"])
def test_a_run_that_was_cut_ends_with_the_same_bytes(ahead, tmp_path, task):
    """After each task of a step: what is still to be generated is written by the policy that it began with."""
    run = ahead.copy(tmp_path)
    run.cut_after(3, task)
    run.resume()
    assert run.records == ahead.records


def test_chunks_change_nothing_when_a_process_is_killed(ahead, loop_run, tmp_path, monkeypatch):
    """Killed at the third token beside an update."""
    whole = loop_run("chunked", **SETTINGS, **{"pipeline.chunk_tokens": 1})
    for kind in ("rollouts", "policy", "behaviour"):
        assert digests(whole, kind) == digests(ahead, kind), kind
    run = whole.copy(tmp_path)
    run.cut_after(3, "calibrate")
    generate, calls = EmbeddedEngine.generate, Counter()

    def killed(engine, wanted, sampling):
        calls["all"] += sampling.temperature > 0
        if calls["all"] == 3:
            raise RuntimeError("killed")
        return generate(engine, wanted, sampling)

    monkeypatch.setattr(EmbeddedEngine, "generate", killed)
    with pytest.raises(StepError, match="killed"):
        run.resume()
    run.resume()
    assert run.records == whole.records


def test_checkpoints_stay_that_a_resumed_run_scores_old_tokens_from(loop_run):
    """Tokens of step 9 may be of policy 4: without the checkpoint of step 3 every update would be made again."""
    deep = {"pipeline.max_staleness": 4, "checkpoint.every": 1, "checkpoint.keep": 1}
    run = loop_run("deep", **SETTINGS | deep, steps=8)
    assert sorted(int(path.name) for path in (run.folder / "checkpoints").iterdir()) == [3, 4, 5, 6, 7, 8]
