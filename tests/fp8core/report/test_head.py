"""The head of a report: its sentences and the one action; and the rows of its steps."""

from dataclasses import replace

import pytest

from fp8core.report.head import head, mismatch
from fp8core.report.pages import report_html
from fp8core.report.run_data import RunData, read_run
from fp8core.report.step_table import MOST_ROWS, step_rows
from fp8core.store.run_view import Provenance

SILENT = {"reward/groups_with_signal": 0.0, "rollout/cut_off_share": 1.0}


@pytest.fixture
def run(whole_run) -> RunData:
    return read_run(whole_run.folder, "whole")


def history(heldout: tuple[float, float], rewards: list[float], **more: float) -> list[dict[str, float]]:
    rows = [
        {"step": step, "reward/mean": reward, "alignment/token_mult_prob_error": 1.0, **more}
        for step, reward in enumerate(rewards, 1)
    ]
    return [
        {"step": 0, "reward/heldout_accuracy": heldout[0]},
        *rows[:-1],
        rows[-1] | {"reward/heldout_accuracy": heldout[1]},
    ]


LEVEL, RISING = [0.5, 0.6] * 12, [0.2 + 0.52 * i / 23 + 0.01 * (-1) ** i for i in range(24)]


def test_the_result_names_what_decided_first(run: RunData) -> None:
    config = run.view.config
    assert config is not None
    many = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"prompts": 256})})
    run = replace(run, view=replace(run.view, config=many))
    result, _ = head(replace(run, history=history((0.375, 0.637), LEVEL)))
    assert result.startswith(
        "Learned: held-out accuracy 0.375 to 0.637. Reward 0.550 to 0.550, within chance. Rollout and"
    )
    result, _ = head(replace(run, history=history((0.375, 0.637), RISING)))
    assert "Reward 0.302 to 0.618, beyond chance." in result
    assert head(replace(run, history=[]))[-1].startswith("Too short to tell. No step measured")


@pytest.mark.parametrize(
    ("heldout", "rewards", "action"),
    [
        ((0.1, 0.9), RISING, "fp8-grpo evaluate {place} --samples 2, then fp8-grpo export {place} --step 4"),
        ((0.9, 0.1), RISING, "loss.reference_kl"),
        ((0.9, 0.1), RISING[::-1], "lower training.learning_rate"),
        ((0.5, 0.5), LEVEL, "raise training.learning_rate"),
    ],
)
def test_one_action_follows_from_the_verdict(run: RunData, heldout, rewards, action: str) -> None:
    *_, last = head(replace(run, history=history(heldout, rewards)))
    assert last.startswith("Next: ")
    # The run does not lie below ./runs.
    assert action.format(place=run.view.folder) in last
    config = run.view.config
    assert config is not None
    usual = config.model_copy(update={"runs": type(config).model_fields["runs"].default})
    shown = replace(run, view=replace(run.view, config=usual), history=history(heldout, rewards))
    assert action.format(place="whole") in head(shown)[-1]


def test_what_stopped_or_silenced_a_run_comes_before_its_verdict(run: RunData) -> None:
    assert run.view.config is not None
    longer = replace(run, view=replace(run.view, config=run.view.config.model_copy(update={"steps": 80})))
    assert f"fp8-grpo resume {run.view.folder} trains the 76 steps" in head(longer)[-1]
    one_left = replace(
        run, view=replace(run.view, config=run.view.config.model_copy(update={"steps": 5})), provenance=Provenance()
    )
    assert " trains the 1 step left," in head(one_left)[-1]
    silent = head(replace(longer, history=history((0.5, 0.5), LEVEL, **SILENT)))
    assert "Raise rollout.max_new_tokens" in silent[0]
    assert not any(words.startswith("Next: ") for words in silent)


def test_the_steps_and_tokens_of_equal_policies_are_counted(run: RunData) -> None:
    tokens = int(sum(row.get("rollout/tokens", 0) for row in run.history))
    assert mismatch(run) == f"The mismatch is zero in all 4 steps, on all {tokens:,} tokens."
    rows = history((0.5, 0.5), LEVEL)
    rows[1]["alignment/token_mult_prob_error"] = 1.1
    rows[2]["alignment/tokens_differing"] = 3.0
    assert mismatch(replace(run, history=rows)) == "The mismatch is zero in 22 of 24 steps, on all tokens."
    assert mismatch(replace(run, history=[])) is None


def test_every_step_has_a_row_with_its_events(run: RunData) -> None:
    rows = step_rows(run)
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0][1] == "-"
    assert "checkpoint" in rows[-1][-1]
    assert rows[-1][3] == "1 exactly"
    assert "<details><summary>whole, step by step</summary>" in report_html([run])


def test_a_long_run_keeps_its_last_step_and_those_with_events(run: RunData) -> None:
    rows = step_rows(replace(run, history=[{"step": step} for step in range(5 * MOST_ROWS + 2)]))
    assert len(rows) <= MOST_ROWS + 10
    assert {"4", f"{5 * MOST_ROWS + 1}"} <= {row[0] for row in rows}
