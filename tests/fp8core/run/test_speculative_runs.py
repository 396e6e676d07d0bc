"""A run with drafts has the records of one without, and shows what came of them."""

import pytest

from fp8core.report.run_data import read_run

DRAFTS = {"rollout.speculation": {"source": "suffix"}}


@pytest.fixture(scope="module")
def drafting(loop_run):
    """For reading only."""
    return loop_run("drafting", **DRAFTS)


def test_records_are_those_of_a_run_without_drafts(drafting, whole_run):
    assert drafting.records == whole_run.records
    drafting_report, plain_report = (read_run(run.folder, "run").history for run in (drafting, whole_run))
    for row, plain in zip(drafting_report[1:], plain_report[1:], strict=True):
        assert row.items() > plain.items()
        assert row["rollout/draft_tokens"] > 0
        share = row["rollout/accepted_tokens"] / row["rollout/draft_tokens"]
        assert row["rollout/draft_acceptance"] == share
        assert row["rollout/forwards"] + row["rollout/saved_forwards"] == row["rollout/length_max"] - 1


def test_the_same_step_again_is_equal_with_and_without(drafting):
    assert [verdict.outcome for verdict in drafting.replayed(range(3, 5))] == ["equal"] * 2


def test_a_resumed_run_may_change_the_setting(drafting, whole_run, tmp_path):
    run = drafting.copy(tmp_path)
    run.cut_after(3, "prompts")
    run.resume(**{"rollout.speculation.source": "none"})
    assert run.records == whole_run.records


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout.stop_strings": ["#"], "steps": 1},
        {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 3, "pipeline.verified_share": 1.0, "steps": 3},
    ],
    ids=["stop strings", "asynchronous"],
)
def test_other_runs_have_their_records_too(loop_run, settings):
    plain, drafting = (loop_run(name, **settings, **drafts) for name, drafts in (("plain", {}), ("drafts", DRAFTS)))
    assert drafting.records == plain.records
