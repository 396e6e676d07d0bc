"""Episodes, also beside the update, whole or over several policies: exact, durable, and equal when replayed."""

import signal

import pytest
from episode_life import exit_code_of_life

from fp8core.run.verify import verify
from fp8core.store.run_view import RunView


@pytest.fixture(scope="module")
def settings(digits):
    return {
        "environment": {"name": f"{digits}:Digits", "max_turns": 12, "turn_tokens": 3},
        **{"rollout.max_new_tokens": 28, "rollout.group_size": 4, "rollout.prompts_per_step": 2, "steps": 3},
    }


AHEAD = {"pipeline.verified_share": 1.0}
MODES = {
    "synchronous": {},
    "one_step_off": AHEAD | {"pipeline.mode": "one_step_off"},
    # Some updates land within a turn, and some episodes are over beside them.
    "asynchronous": AHEAD | {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 12, "pipeline.chunk_tokens": 2},
}


@pytest.fixture(
    scope="module", params=["synchronous", "asynchronous", pytest.param("one_step_off", marks=pytest.mark.slow)]
)
def mode(request):
    return request.param


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
        assert metrics["train/mask_differing"] == 0
        assert metrics["environment/turns"] > 2
        assert any(not all(row["written"]) for row in rollouts)
        assert metrics["train/tokens"] == sum(sum(row["written"]) for row in rollouts)
        if mode == "synchronous":
            continue
        spans += [{*row["versions"]} for row in rollouts]
        assert {version for row in rollouts for version in row["versions"]} <= {max(0, step - 2), step - 1}
        if mode == "one_step_off":
            assert metrics["rollout/prompts_waiting"] == len({row["group"] for row in rollouts})
            assert {version for row in rollouts for version in row["versions"]} == {max(0, step - 2)}
    if mode != "synchronous":
        staleness = artifact(ahead, 2, "metrics")["rollout/staleness_mean"]
        assert staleness == 1 if mode == "one_step_off" else 0 < staleness < 1
    assert any(len(versions) > 1 for versions in spans) == (mode == "asynchronous")
    assert [found for found in verify(RunView.read(ahead.folder)) if found.severity != "note"] == []


def test_kills_while_episodes_are_open_end_with_equal_records(ahead, tmp_path):
    """Environments of episodes that go on are asked the same again."""
    for after, code in ((150, -signal.SIGKILL), (100, -signal.SIGKILL), (10**9, 0)):
        assert exit_code_of_life(ahead.folder / "run.json", tmp_path, after) == code
    assert type(ahead)(tmp_path / "killed").records == ahead.records


def test_drafts_change_no_record(ahead, loop_run, settings, mode):
    drafting = loop_run("drafting", **settings, **MODES[mode], **{"rollout.speculation.source": "suffix"})
    assert drafting.records == ahead.records
    manifests = [drafting.store.get_json(entry.manifest) for entry in drafting.ledger.steps().values()]
    counts = [manifest["observed"]["drafts"] for manifest in manifests]
    assert any(name.startswith("draft_tokens") for count in counts for name in count), counts


def replayed(run, first, last=3):
    """The outcomes of the steps from `first` to `last`."""
    return [verdict.outcome for verdict in run.replayed(range(first, last + 1))]


def test_replays_take_the_recorded_answers(ahead, digits):
    assert replayed(ahead, 0) == ["equal"] * 4
    text = digits.read_text()
    digits.write_text(text.replace("% 3", "% 2"))
    try:
        assert replayed(ahead, 3) == ["equal"]
    finally:
        digits.write_text(text)
