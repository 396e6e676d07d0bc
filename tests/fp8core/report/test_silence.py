"""Steps without a signal: their cause, and the advice that fits it."""

from dataclasses import replace

import pytest

from fp8core.config.load import load_config
from fp8core.report.pages import report_html
from fp8core.report.run_data import read_run
from fp8core.report.silence import silence


def rows(*shares: dict[str, float], signal: float = 0.0) -> list[dict[str, float]]:
    names = {"cut off": "rollout/cut_off_share"}
    return [
        {
            "step": step,
            "reward/groups_with_signal": signal,
            **{names.get(name, f"reward/outcome_{name}"): share for name, share in found.items()},
        }
        for step, found in enumerate(shares, 1)
    ]


@pytest.mark.parametrize(
    ("shares", "advised"),
    [
        ({"unparsed": 1.0, "cut off": 0.98}, "rollout.max_new_tokens"),
        ({"unparsed": 1.0, "cut off": 0.1}, "data.template"),
        ({"wrong": 1.0, "cut off": 0.0}, "easier problems"),
        ({"right": 1.0, "cut off": 1.0}, "harder problems"),
        ({"crashed": 0.9, "wrong": 0.1, "cut off": 1.0}, "repair the verifier or environment"),
        ({"right": 0.4, "wrong": 0.3, "unparsed": 0.3}, "rollout.group_size"),
        ({}, "rollout.group_size"),
    ],
)
def test_the_advice_fits_the_cause(shares, advised) -> None:
    found = silence(rows(shares, shares), None)
    assert found is not None
    assert advised in found.advice


@pytest.mark.parametrize(
    ("environment", "reward", "advised"),
    [("guess", 0.0, 'Outcome("right")'), ("guess", 0.5, "rollout.group_size"), (None, 0.0, "rollout.group_size")],
)
def test_right_outcomes_to_which_an_environment_gave_no_reward(environment, reward, advised) -> None:
    silent = [{**row, "reward/mean": reward} for row in rows({"right": 0.4, "wrong": 0.4, "unparsed": 0.2})]
    found = silence(silent, load_config("tiny", {"environment": environment and {"name": environment}}))
    assert found is not None
    assert advised in found.advice


def test_the_shares_are_those_of_the_silent_steps() -> None:
    heard = rows({"right": 1.0}, signal=0.5)
    silent = rows({"unparsed": 1.0, "wrong": 0.0, "cut off": 0.97}, {"unparsed": 0.9, "wrong": 0.1, "cut off": 0.99})
    none, some = silence(silent, None), silence([*heard, *silent], None)
    assert none is not None
    assert none.words == "No step had a signal: 95 % unparsed, 5 % wrong, 98 % cut off"
    assert some is not None
    assert some.words == "2 of 3 steps had no signal: 95 % unparsed, 5 % wrong, 98 % cut off"
    assert silence(heard, None) is None
    assert silence([{"step": 0}], None) is None


def test_a_run_that_learns_from_a_teacher_is_not_silent() -> None:
    silent, teacher = rows({"right": 1.0}), "loss.distillation.teacher=x"
    assert silence(silent, load_config("tiny")) is not None
    taught = load_config("tiny", [teacher, "loss.distillation.weight=1.0", "loss.distillation.rewards=0.0"])
    assert silence(silent, taught) is None


def test_equal_groups_are_a_signal_where_others_are_compared() -> None:
    """Of REINFORCE++ rewards of other prompts are, and a penalty of the reward differs by token."""
    spread = [{**row, "reward/std": spread} for row, spread in zip(rows({}, {}), (0.5, 0.0), strict=True)]
    whole = silence(spread, load_config("tiny", {"loss.advantage": "reinforce_plus_plus"}))
    assert whole is not None
    assert (whole.silent, whole.steps) == (1, 2)
    assert silence(spread[:1], load_config("tiny", {"loss.advantage": "reinforce_plus_plus"})) is None
    assert silence(spread, load_config("careful", {"loss.reward_kl": 0.1})) is None


@pytest.mark.parametrize(("silent", "of", "many"), [(1, 80, False), (26, 80, False), (27, 80, True), (1, 1, True)])
def test_a_third_of_the_steps_are_many(silent: int, of: int, many: bool) -> None:
    found = silence(rows(*[{}] * silent) + rows(*[{}] * (of - silent), signal=1.0), None)
    assert found is not None
    assert found.many == many


def test_the_head_of_a_report_says_why_a_run_learned_nothing(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    silent = {"reward/groups_with_signal": 0.0, "rollout/cut_off_share": 1.0}
    html = report_html([replace(run, history=[{**row, **silent} if row["step"] else row for row in run.history])])
    head = html.partition("<nav>")[0]
    assert ">No step had a signal: " in head
    assert "100 % cut off" in head
    assert "rollout.max_new_tokens" in head
    assert "had a signal" not in report_html([run]).partition("<nav>")[0]
    assert "<td>outcomes of completions, mean of all steps</td>" in html
