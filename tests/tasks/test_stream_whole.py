"""Runs whose engines end what they have begun before they take new weights."""

import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.run.checks.settings import graph_of
from fp8core.run.execute import StepError
from fp8core.run.loop import begin
from fp8core.run.verify import verify
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.run_view import RunView
from tasks import stream

DIGITS = Path(__file__).parents[1] / "parts" / "digits_environment.py"
SETTINGS = {
    "pipeline.mode": "asynchronous",
    "pipeline.in_flight_weight_updates": False,
    "pipeline.ahead_tokens": 6,
    "pipeline.max_staleness": 2,
    "pipeline.max_inflight_prompts": 5,
    "pipeline.verified_share": 1.0,
    "checkpoint.every": 2,
    # Kills below count tokens, as this rule draws them.
    "precision.scale_rule": "pow2",
}


@pytest.fixture(scope="module", params=["wait", "drop"])
def whole(loop_run, request):
    """Such a run; for reading only."""
    return loop_run(f"whole-{request.param}", **SETTINGS | {"pipeline.drop_or_wait": request.param})


def test_each_completion_is_of_one_version(whole):
    ages, waiting = set(), 0
    for step in range(1, 5):
        artifacts = whole.ledger.artifacts(step)
        for row in whole.store.get_table(artifacts["rollouts"]).to_pylist():
            (version,) = set(row["versions"])
            ages.add(step - 1 - version)
        left, after = (whole.store.get_table(artifacts[name]).to_pylist() for name in ("left", "next_stream"))
        assert not any(row["tokens"] for row in after if not row["finish"])
        entered = {(row["batch"], row["group"]) for row in after if not row["finish"]}
        waiting += len(entered)
        metrics = whole.store.get_json(artifacts["metrics"])
        assert metrics["rollout/prompts_in_flight"] == len(entered)
        assert metrics["alignment/tokens_differing"] == 0
        begun = {(row["batch"], row["group"], row["sample"]): len(row["tokens"]) for row in left}
        longest = max(
            (len(row["tokens"]) - begun.get((row["batch"], row["group"], row["sample"]), 0) for row in after), default=0
        )
        assert metrics["rollout/decode_steps_beside_update"] >= longest
        assert whole.store.get_json(artifacts["schedule"])["chunks"] in ([6], [])
    assert {0, 1} <= ages <= {0, 1, 2}
    assert waiting, "prompts that enter when the last chunk has ended"


@pytest.mark.parametrize("task", ["rollout", "ahead", "train", "sync"])
def test_a_run_that_was_cut_ends_with_the_same_bytes(whole, copy_of, task):
    run = copy_of(whole)
    run.cut_after(3, task)
    run.resume()
    assert run.records == whole.records


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_kill_beside_the_update_changes_nothing(whole, copy_of, monkeypatch, call):
    """In a chunk, or while what has begun is written to its end."""
    run, calls, generate = copy_of(whole), Counter(), EmbeddedEngine.generate
    run.cut_after(3, "calibrate")

    def killed(engine, wanted, sampling):
        calls["all"] += sampling.temperature > 0
        for finished in generate(engine, wanted, sampling):
            yield finished
            if sampling.temperature and calls["all"] == call:
                raise RuntimeError("killed")

    monkeypatch.setattr(EmbeddedEngine, "_max_batch", 8, raising=False)
    monkeypatch.setattr(EmbeddedEngine, "generate", killed)
    with pytest.raises(StepError, match="killed"):
        run.resume()
    calls.clear()
    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    run.resume()
    assert run.records == whole.records


@pytest.fixture(params=["alone", "environment"])
def clocked(loop_run, request, tmp_path):
    """A run of which the clock decides how many chunks there are beside an update."""
    clock = {"pipeline.ahead_tokens": None, "pipeline.chunk_tokens": 2, "pipeline.max_inflight_prompts": 3}
    environment = {
        "environment": {"name": f"{shutil.copy(DIGITS, tmp_path)}:Digits", "max_turns": 12, "turn_tokens": 3},
        **{"rollout.max_new_tokens": 28, "rollout.group_size": 4, "rollout.prompts_per_step": 2},
        "pipeline.max_inflight_prompts": 1,
    }
    return loop_run("clocked", **SETTINGS | clock | (environment if request.param == "environment" else {}))


@pytest.fixture
def killed_when_all_had_ended(monkeypatch):
    """Continue a run, and kill it where the stream beside step 3's update has ended and is not stored."""

    class Killed(BaseException):
        pass

    def put_json(store, kind, content, put=ArtifactStore.put_json):
        if kind == "schedule":
            raise Killed
        return put(store, kind, content)

    def kill(run):
        with monkeypatch.context() as patched:
            patched.setattr(ArtifactStore, "put_json", put_json)
            with pytest.raises(Killed):
                run.resume()
        return list((run.folder / "shards" / "00003").glob("*.parquet"))

    return kill


def test_what_was_ended_before_a_kill_lets_no_other_prompt_enter(clocked, copy_of, killed_when_all_had_ended):
    """All of it is durable and nothing tells how many chunks there were; the update is over."""
    run, killed = clocked, copy_of(clocked)
    killed.cut_after(3, "train")
    assert killed_when_all_had_ended(killed)
    killed.resume()
    schedules = [killed.store.get_json(killed.ledger.artifacts(step)["schedule"])["chunks"] for step in range(1, 5)]
    assert schedules == [[2]] * 4
    assert killed.records == run.records


def test_what_was_ended_beside_a_long_update_is_kept(clocked, copy_of, killed_when_all_had_ended, monkeypatch):
    """Prompts had entered that a single chunk does not let in."""
    run = copy_of(clocked)
    run.cut_after(3, "train")
    with monkeypatch.context() as patched:
        patched.setattr(stream, "chunks_ahead", lambda *asked: [2] * 11)
        shards = killed_when_all_had_ended(run)

    def ended(rows):
        return {(row["batch"], row["group"], row["sample"]) for row in rows if row["finish"]}

    durable = ended(row for path in shards for row in pq.read_table(path).to_pylist())
    run.resume()
    artifacts = run.ledger.artifacts(3)
    after = run.store.get_table(artifacts["next_stream"]).to_pylist()
    assert durable <= ended(after)
    assert 1 < len(run.store.get_json(artifacts["schedule"])["chunks"]) <= 11
    assert not any(row["tokens"] for row in after if not row["finish"])
    assert [*verify(RunView.read(run.folder))] == []


def test_it_ends_nothing_where_another_task_has_failed(whole, copy_of, halted_ahead, monkeypatch):
    run = copy_of(whole)
    run.cut_after(3, "rollout")
    with run.opened() as opened:
        begin(opened)
        monkeypatch.setattr(stream, "chunks_ahead", lambda *asked: [1])
        halted_ahead(opened, 3)


def test_a_replay_is_equal_and_verify_finds_nothing(whole):
    verdicts = whole.replayed(range(1, 5))
    assert Counter(verdict.outcome for verdict in verdicts) == {"equal": 4}
    assert [*verify(RunView.read(whole.folder))] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline.mode": "one_step_off"}, r"pipeline\.in_flight_weight_updates=false: needs pipeline\.mode=async"),
        ({"pipeline.ahead_tokens": 0}, r"pipeline\.ahead_tokens=0: with pipeline\.in_flight_weight_updates=false"),
        ({"pipeline.max_staleness": 0}, r"pipeline\.in_flight_weight_updates=false: with pipeline\.max_staleness=0"),
        (
            {"pipeline.recompute_kv_cache_after_weight_update": False, "replay.level": "tolerant"},
            r"pipeline\.recompute_kv_cache_after_weight_update=false: .* no update finds a cache",
        ),
    ],
)
def test_what_nothing_in_flight_leaves_empty_is_refused(settings, message):
    shown = {"pipeline.mode": "asynchronous", "pipeline.in_flight_weight_updates": False} | settings
    with pytest.raises(UserError, match=message):
        graph_of(load_config("tiny", shown))
