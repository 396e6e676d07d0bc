"""Episodes that are played beside the update, whole or over several policies: durable, and equal when replayed."""

import re
import shutil
import signal
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from episode_life import exit_code_of_life

from fp8core.config.load import load_config
from fp8core.config.steps import import_spec
from fp8core.errors import UserError
from fp8core.rollout.engine import sample_seed
from fp8core.run.execute import StepError, carried, run_step
from fp8core.run.loop import begin, train
from fp8core.run.verify import verify
from fp8core.store.run_view import RunView
from tasks import stream

DIGITS = (Path(__file__).parents[1] / "parts" / "digits_environment.py").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "digits.py"
    path.write_text(DIGITS)
    return path


@pytest.fixture(scope="module")
def settings(place):
    return {
        "environment": {"name": f"{place}:Digits", "max_turns": 12, "turn_tokens": 3},
        **{"rollout.max_new_tokens": 28, "rollout.group_size": 4, "rollout.prompts_per_step": 2, "steps": 3},
        "pipeline.verified_share": 1.0,
    }


MODES = {
    "one_step_off": {"pipeline.mode": "one_step_off"},
    # Some updates land within a turn, and some episodes are over beside them.
    "asynchronous": {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 12, "pipeline.chunk_tokens": 2},
}


@pytest.fixture(scope="module", params=["asynchronous", pytest.param("one_step_off", marks=pytest.mark.slow)])
def mode(request):
    return request.param


ASYNCHRONOUS = pytest.mark.parametrize("mode", ["asynchronous"], indirect=True)


@pytest.fixture(scope="module")
def ahead(loop_run, settings, mode):
    """For reading only."""
    return loop_run(f"ahead-{mode}", **settings, **MODES[mode])


def artifact(run, step, name):
    ref = run.ledger.artifacts(step)[name]
    return run.store.get_json(ref) if ref.kind == "metrics" else run.store.get_table(ref)


def test_the_log_prob_of_each_token_is_that_of_the_policy_that_wrote_it(ahead, mode):
    spans = []
    for step in range(1, 4):
        metrics, rollouts = artifact(ahead, step, "metrics"), artifact(ahead, step, "rollouts").to_pylist()
        assert metrics["alignment/tokens_differing"] == 0
        assert metrics["alignment/token_mult_prob_error"] == 1
        assert metrics["alignment/tokens_differing_turn_2_3"] == 0
        assert metrics["environment/turns"] > 2
        spans += [{*row["versions"]} for row in rollouts]
        assert {version for row in rollouts for version in row["versions"]} <= {max(0, step - 2), step - 1}
        if mode == "one_step_off":
            assert metrics["rollout/prompts_waiting"] == len({row["group"] for row in rollouts})
            assert {version for row in rollouts for version in row["versions"]} == {max(0, step - 2)}
        assert any(not all(row["written"]) for row in rollouts)
        assert metrics["train/tokens"] == sum(sum(row["written"]) for row in rollouts)
    staleness = artifact(ahead, 2, "metrics")["rollout/staleness_mean"]
    assert staleness == 1 if mode == "one_step_off" else 0 < staleness < 1
    assert any(len(versions) > 1 for versions in spans) == (mode == "asynchronous")
    assert [found for found in verify(RunView.read(ahead.folder)) if found.severity != "note"] == []


def test_tokens_of_the_environment_are_not_counted_as_generated(ahead, mode):
    for step in range(1, 4):
        metrics = artifact(ahead, step, "metrics")
        left, after = (artifact(ahead, step, name).to_pylist() for name in ("left", "next_stream"))
        before, now = (sum(sum(row["written"]) for row in rows) for rows in (left, after))
        assert now < sum(len(row["tokens"]) for row in after)
        assert metrics["rollout/tokens_ahead"] == now
        assert metrics["rollout/tokens_beside_update"] == now - before
        # One step ahead, all are played at once and to their ends.
        steps = 12 if mode == "asynchronous" else max(sum(row["written"]) for row in after)
        assert metrics["rollout/decode_steps_beside_update"] == steps


@ASYNCHRONOUS
def test_an_update_lands_within_a_turn_and_between_two(ahead):
    landed = {"within": 0, "between": 0}
    for step in range(1, 4):
        versions = {
            (row["group"], row["sample"]): row["versions"] for row in artifact(ahead, step, "rollouts").to_pylist()
        }
        for turn in artifact(ahead, step, "turns").to_pylist():
            wrote = versions[turn["group"], turn["sample"]][turn["begin"] : turn["observation_end"] + 1]
            whole = len({*wrote[: turn["end"] - turn["begin"]]}) == 1
            landed["between" if whole else "within"] += len({*wrote}) > 1
    assert min(landed.values()) > 0, landed


def test_held_out_lengths_are_of_what_the_policy_wrote(ahead):
    step = max(step for step in range(4) if "heldout_turns" in ahead.ledger.artifacts(step))
    written, ends = Counter(), dict[int, int]()
    for turn in artifact(ahead, step, "heldout_turns").to_pylist():
        written[turn["group"]] += turn["end"] - turn["begin"]
        ends[turn["group"]] = turn["observation_end"]
    found = ahead.store.get_json(ahead.ledger.artifacts(step)["evaluation"])
    assert found["length_mean"] == sum(written.values()) / len(ends) < sum(ends.values()) / len(ends)


def test_fewer_processes_than_episodes_change_nothing(ahead, loop_run, settings, mode):
    """Those that rest end where others wait, and are asked again."""
    environment = settings["environment"] | {"at_once": 3}
    few = loop_run(f"few-{mode}", **settings | {"environment": environment, "steps": 2}, **MODES[mode])
    for step in (1, 2):
        ours, theirs = few.ledger.artifacts(step), ahead.ledger.artifacts(step)
        for name in ("turns", "rollouts", "next_stream", "behaviour", "next_policy"):
            assert ours[name].digest == theirs[name].digest, name


@pytest.fixture(scope="module")
def synchronous(loop_run, settings):
    return loop_run("synchronous", **settings | {"pipeline.mode": "synchronous", "pipeline.verified_share": 0.0625})


def test_without_staleness_the_artifacts_are_those_of_a_synchronous_run(loop_run, settings, mode, synchronous):
    fresh = loop_run(f"fresh-{mode}", **settings, **MODES[mode], **{"pipeline.max_staleness": 0})
    expected = synchronous
    for step in range(1, 4):
        ours, theirs = fresh.ledger.artifacts(step), expected.ledger.artifacts(step)
        shared = theirs.keys() - {"metrics"}
        assert {"turns", "rollouts", "rewards", "next_policy"} <= shared
        assert {name: ours[name].digest for name in shared} == {name: theirs[name].digest for name in shared}


def test_kills_while_episodes_are_open_end_with_equal_records(ahead, tmp_path):
    """Environments of episodes that go on are asked the same again."""
    for after, code in ((150, -signal.SIGKILL), (100, -signal.SIGKILL), (10**9, 0)):
        assert exit_code_of_life(ahead.folder / "run.json", tmp_path, after) == code
    assert type(ahead)(tmp_path / "killed").records == ahead.records


def replayed(run, first, last=3, *, rerun=False):
    """The outcomes of the steps from `first` to `last`."""
    return [verdict.outcome for verdict in run.replayed(range(first, last + 1), rerun_environments=rerun)]


def test_replays_take_the_recorded_answers_or_ask_again(ahead, place):
    assert replayed(ahead, 0) == ["equal"] * 4
    assert replayed(ahead, 3, rerun=True) == ["equal"]
    place.write_text(DIGITS.replace("% 3", "% 2"))
    try:
        assert replayed(ahead, 3) == ["equal"]
        assert replayed(ahead, 3, rerun=True) == ["different"]
    finally:
        place.write_text(DIGITS)


@ASYNCHRONOUS
def test_an_episode_that_the_run_did_not_play_makes_a_replay_different(ahead):
    """More of them end beside the update, so prompts of which nothing is recorded enter."""
    (verdict,) = ahead.replayed([1], "pipeline.ahead_tokens=30", "pipeline.max_staleness=3")
    assert verdict.outcome == "different"
    (cause,) = (cause for cause in verdict.causes if "configuration differs" in cause)
    assert "pipeline.ahead_tokens" in cause
    (said,) = verdict.difference
    place = r'the replay fails: step 1, task ahead: sample 0 of the prompt "[0-9+*-]+="'
    assert re.match(rf"{place}: the run played no such episode in this step, so no answers are recorded; ", said)


@ASYNCHRONOUS
def test_what_episodes_in_flight_may_have_used_is_not_taken_back(ahead):
    """More is allowed: turns that were cut are over."""
    for change, begun in (
        ("environment.turn_tokens=2", "environment.turn_tokens=3"),
        ("environment.max_turns=11", "environment.max_turns=12"),
        ("environment.observation_tokens=1", "environment.observation_tokens=null"),
        ("data.max_prompt_tokens=500", "data.max_prompt_tokens=512"),
    ):
        with pytest.raises(UserError, match=rf"step 3 goes on from completions begun under {re.escape(begun)}$"):
            ahead.replayed([3], change)
    for unasked in ("environment.timeout_seconds=3", "environment.at_once=2"):
        with pytest.raises(UserError, match=r"no environment is asked, .* add --rerun-environments$"):
            ahead.replayed([1], unasked)
    rows = [row for row in artifact(ahead, 2, "next_stream").to_pylist() if not row["finish"]]
    assert any(turn["end"] - turn["begin"] == 3 for row in rows for turn in row["turns"]), "a turn was cut"
    for change in ("environment.turn_tokens=4", "environment.turn_tokens=null", "environment.max_turns=13"):
        (verdict,) = ahead.replayed([3], change)
        assert [line for line in (*verdict.causes, *verdict.difference) if "fails" in line] == []
    assert replayed(ahead, 3) == ["equal"]


def test_turns_that_the_run_did_not_play_make_a_replay_different(loop_run, settings):
    """All episodes go on after what is recorded of them, so all of them crash."""
    run = loop_run("one turn", **settings | {"environment": settings["environment"] | {"max_turns": 1}, "steps": 1})
    (verdict,) = run.replayed([1], "environment.max_turns=3")
    assert verdict.outcome == "different"
    assert verdict.difference[0].startswith("outputs.rollout.turns: ")
    assert "column" in verdict.difference[1]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_recorded_answers_are_found_by_the_names_that_a_pipeline_gives(loop_run, settings, mode):
    """Those of step 0, which no pipeline has, keep theirs."""
    settings = settings | MODES.get(mode, {})
    names = {"turns": "played", "heldout_turns": "asked", "next_stream": "waiting"}
    pipeline = load_config("tiny", settings).pipeline
    steps = [
        {
            **{"name": step.name, "uses": step.uses},
            "needs": {port: names.get(artifact, artifact) for port, artifact in step.inputs().items()},
            "provides": {port: names[port] for port in import_spec(step.uses).outputs if port in names},
        }
        for step in pipeline.steps
    ]
    carries = {before: names.get(after, after) for before, after in pipeline.carries.items()}
    run = loop_run("renamed", **settings | {"pipeline.steps": steps, "pipeline.carries": carries, "steps": 2})
    assert {"asked", "played"} <= run.ledger.artifacts(2).keys()
    assert replayed(run, 0, 2) == ["equal"] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline.mode": "one_step_off", "pipeline.max_inflight_prompts": 2}, "max_inflight_prompts"),
        ({"pipeline.mode": "asynchronous", "pipeline.drop_or_wait": "drop"}, "pipeline.drop_or_wait=drop"),
        (
            {"pipeline.mode": "asynchronous", "pipeline.recompute_kv_cache_after_weight_update": False},
            "recompute_kv_cache_after_weight_update=false",
        ),
    ],
)
def test_what_would_cut_episodes_is_refused(settings, change, said):
    with pytest.raises(UserError, match=f"no episodes with .*{said}"):
        load_config("tiny", settings | change)


def stopped():
    """Chunks of which none comes."""
    yield from ()
    raise RuntimeError("stopped")


@ASYNCHRONOUS
def test_a_task_that_begins_again_stores_no_more_than_it_asks_for(ahead, tmp_path, monkeypatch):
    """At first it played more parts, some to the end of their episodes; the environments rest where they were then."""
    found = []
    for name, tries in (("again", [9, 1]), ("once", [1])):
        run = type(ahead)(shutil.copytree(ahead.folder, tmp_path / name / ahead.folder.name))
        run.cut_after(3, "train")
        with run.opened() as opened:
            begin(opened)
            planned = next(each for each in opened.graph.steps if each.name == "ahead")
            artifacts = carried(opened, 3) | opened.directory.ledger.artifacts(3)
            ports = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
            for count in tries[:-1]:
                monkeypatch.setattr(stream, "chunks_ahead", lambda *asked, count=count: chain([2] * count, stopped()))
                with pytest.raises(StepError, match="stopped"):
                    run_step(opened, 3, planned, ports)
                assert len(list((run.folder / "shards").rglob("*.parquet"))) > 0, "some episodes were over"
            monkeypatch.setattr(stream, "chunks_ahead", lambda *asked: [2])
            entry = run_step(opened, 3, planned, ports).entry
            table = opened.directory.store.get_table(entry.outputs["next_stream"])
            assert {row["finish"] for row in table.to_pylist()} == {""}
            found.append(entry.outputs["next_stream"].digest)
    assert found[0] == found[1]


def test_episodes_end_before_an_update_where_none_may_land_in_flight(loop_run, settings):
    whole = {"pipeline.in_flight_weight_updates": False, "pipeline.ahead_tokens": 4}
    run = loop_run("whole", **settings | MODES["asynchronous"] | whole)
    for step in range(1, 4):
        artifacts = run.ledger.artifacts(step)
        assert all(len(set(row["versions"])) == 1 for row in run.store.get_table(artifacts["rollouts"]).to_pylist())
        after = run.store.get_table(artifacts["next_stream"]).to_pylist()
        assert not any(row["tokens"] or row["turns"] for row in after if not row["finish"])
        assert any(row["finish"] for row in after)
    records = run.records
    run.cut_after(2, "train")
    run.resume()
    assert run.records == records
    assert replayed(run, 2) == ["equal"] * 2


def test_a_prompt_whose_episodes_all_fail_does_not_stand_for_its_step(loop_run, settings, tmp_path):
    """It is over beside the update, before another prompt of its step has entered."""
    place, seeds = tmp_path / "fails.py", [sample_seed(0, 2, 0, sample) % 2**64 for sample in range(4)]
    begins, answers = "self._question = task.question", "said, self._next ="
    text = DIGITS.replace(begins, f"self._seed = task.seed\n        {begins}")
    place.write_text(text.replace(answers, f"assert self._seed not in {seeds}\n        {answers}", 1))
    narrow = {"in_flight_weight_updates": False, "max_inflight_prompts": 1, "ahead_tokens": 2, "chunk_tokens": 2}
    pipeline = {f"pipeline.{name}": value for name, value in narrow.items()}
    environment = settings["environment"] | {"name": f"{place}:Digits"}
    run = loop_run("fails", **settings | MODES["asynchronous"] | pipeline | {"environment": environment})
    waiting = artifact(run, 1, "next_stream").to_pylist()
    assert {(row["batch"], row["group"], bool(row["finish"])) for row in waiting} == {(2, 0, True)}
    ended = {turn["group"]: turn["outcome"] for turn in artifact(run, 2, "turns").to_pylist() if turn["outcome"]}
    assert ended[0] == "crashed" != ended[1]
    assert len(run.records) == 4


@pytest.mark.parametrize(
    ("task", "after", "kind"),
    [
        ("ahead", "rollout", MODES["asynchronous"]),
        pytest.param("ahead", "rollout", MODES["one_step_off"], marks=pytest.mark.slow),
        ("rollout", "prompts", {"pipeline.mode": "synchronous"}),
        ("evaluate", "sync", {"pipeline.mode": "synchronous"}),
    ],
)
def test_a_step_that_is_halted_waits_for_no_environment(
    loop_run, settings, copy_of, halted_ahead, tmp_path, task, after, kind
):
    """One that would take a minute for an answer, beside a task that has failed."""
    place, stalls, answered = tmp_path / "stalling.py", tmp_path / "stalls", tmp_path / "answered"
    stall = f"""if pathlib.Path({str(stalls)!r}).exists():
            time.sleep(60)
            pathlib.Path({str(answered)!r}).touch()
        self._question = task.question"""
    place.write_text("import pathlib\nimport time\n" + DIGITS.replace("self._question = task.question", stall))
    environment = settings["environment"] | {"name": f"{place}:Digits", "timeout_seconds": 300}
    run = copy_of(loop_run("stalled", **settings | {"environment": environment, "steps": 2}, **kind))
    run.cut_after(2, after)
    shutil.rmtree(run.folder / "shards", ignore_errors=True)
    with run.opened() as opened:
        begin(opened)
        stalls.touch()
        halted_ahead(opened, 2, task)
        assert not answered.exists()


def test_after_a_loss_its_episodes_are_played_anew(ahead, halted_ahead, tmp_path):
    """The error of the first attempt lives on, with the frames that held the open episodes."""
    shutil.copytree(ahead.folder.parent, tmp_path / "loop")
    run = type(ahead)(tmp_path / "loop" / ahead.folder.name)
    run.cut_after(2, "rollout")
    shutil.rmtree(run.folder / "shards", ignore_errors=True)
    with run.opened() as opened:
        begin(opened)
        failed = halted_ahead(opened, 2)
        opened.cluster = SimpleNamespace(replace=lambda: None, gang=SimpleNamespace(check_shared=lambda folder: None))
        opened.replace_members()
        opened.cluster = None
        train(opened)
    assert failed.__cause__ is not None
    assert run.records == ahead.records
