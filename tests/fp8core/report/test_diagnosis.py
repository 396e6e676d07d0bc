"""Diagnoses of real runs, of healthy ones too, and of what these histories do not hold.

`histories.json` has runs of 24 steps or fewer: their configuration and settings, metrics and last texts. `lr01` and
`negcollapse` had other rates and, like `negative`, a further verifier that takes 2 from each reward; the verifiers of
`says_no`, `says_wrong` and `constant` gave every completion one verdict.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.report.conclusion import answer
from fp8core.report.diagnosis import Evidence, diagnosis, find_fall

RUNS = json.loads(Path(__file__).with_name("histories.json").read_text())


def evidence(name: str, steps: int | None = None) -> Evidence:
    run = RUNS[name]
    count = len(run["metrics"]["step"]) if steps is None else steps + 1
    columns = {metric: values[:count] for metric, values in run["metrics"].items()}
    rows = [{metric: values[i] for metric, values in columns.items() if values[i] is not None} for i in range(count)]
    learning = answer(rows, prompts=256).learning
    return Evidence(rows, load_config(run["config"], run["settings"]), learning, "".join(run["texts"][:1]), name)


@pytest.mark.parametrize(
    ("run", "cause", "words"),
    [
        ("collapse", "collapsed", "after step 1: the share of right answers fell from 0.641 to 0"),
        ("collapse", "collapsed", "Lower training.learning_rate (now 0.5)"),
        ("lr01", "collapsed", "fp8-grpo export lr01 --step 3 FOLDER"),
        ("cutoff", "cut off", "Raise rollout.max_new_tokens (now 2)"),
        ("says_no", "verifier refuses all", "\u201c0,8,7,7#7\u201d. If such texts are right, change reward"),
        ("says_no", "verifier refuses all", "data.template"),
        ("says_wrong", "verifier refuses all", "reward.verifier (now chain), else choose easier problems"),
        ("constant", "no signal", "group were equal in 12 of 12 steps. Choose harder problems"),
    ],
)
def test_the_cause_names_what_was_seen_and_one_change(run, cause, words) -> None:
    found = diagnosis(evidence(run))
    assert found is not None
    assert found.cause == cause
    assert words in found.sentence


@pytest.mark.parametrize("run", ["healthy", "async", "negative", "distil", "dapo", "tools"])
def test_a_healthy_run_has_no_diagnosis(run) -> None:
    assert diagnosis(evidence(run)) is None
    early = diagnosis(evidence(run, 4))
    assert early is None


@pytest.mark.parametrize(("run", "step"), [("collapse", 0), ("lr01", 3), ("negcollapse", 1)])
def test_the_step_to_go_back_to_wrote_rewarded_answers(run, step) -> None:
    found = evidence(run)
    assert diagnosis(found).step == step
    assert found.history[step + 1]["reward/outcome_right"] > 0.6
    # Generation ahead: the newest policy that was rewarded is older.
    assert found.config is not None
    ahead = found.config.pipeline.model_copy(update={"mode": "asynchronous", "max_staleness": 2})
    older = replace(found, config=found.config.model_copy(update={"pipeline": ahead}))
    assert diagnosis(older).step == max(0, step - 2)


@pytest.mark.parametrize(
    ("rights", "prompts"),
    [([0.9, 0.0], 1), ([0.5, 0.25, 0.0, 0.0], 2), ([0.8] * 20 + [0.5], 32), ([0.6] * 20 + [0.0] + [0.5] * 5, 32)],
)
def test_what_chance_makes_or_passes_is_no_collapse(rights, prompts) -> None:
    rows = [{"step": step, "reward/outcome_right": right} for step, right in enumerate(rights, 1)]
    assert find_fall(rows, prompts) is None


@pytest.mark.parametrize(
    ("left", "more", "collapsed"),
    [
        (0.3, {}, False),
        (0.1, {}, True),
        # The verifier broke, not the policy.
        (0.0, {"reward/outcome_timeout": 0.9}, False),
    ],
)
def test_a_policy_that_is_left_with_little_has_collapsed(left, more, collapsed) -> None:
    rows = [{"step": step, "reward/outcome_right": 0.7} for step in range(1, 11)]
    rows += [{"step": step, "reward/outcome_right": left, **more} for step in range(11, 21)]
    assert (find_fall(rows, 32) is not None) == collapsed


def rows(shares: dict[str, float], steps: int = 12, **more: float) -> list[dict[str, float]]:
    named = {"cut off": "rollout/cut_off_share"}
    found = {named.get(name, f"reward/outcome_{name}"): share for name, share in shares.items()}
    return [{"step": step, "reward/groups_with_signal": 0.0, **found, **more} for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("shares", "reward", "cause", "advised"),
    [
        ({"crashed": 0.9, "wrong": 0.1, "right": 0.0, "cut off": 1.0}, 0.0, "verifier failed", "repair the verifier"),
        ({"timeout": 0.9, "wrong": 0.1}, 0.0, "verifier failed", "timeout_seconds"),
        ({"unparsed": 1.0, "right": 0.0, "cut off": 0.1}, 0.0, "verifier refuses all", "data.template"),
        # A right answer that is cut off after its end lacks nothing.
        ({"right": 1.0, "cut off": 1.0}, 1.0, "no signal", "harder problems"),
        ({"right": 0.4, "wrong": 0.3, "unparsed": 0.3}, 0.4, "no signal", "rollout.group_size"),
        ({}, 0.5, "no signal", "rollout.group_size"),
    ],
)
def test_a_run_without_a_signal_is_told_why(shares, reward, cause, advised) -> None:
    found = diagnosis(Evidence(rows(shares, **{"reward/mean": reward}), load_config("tiny"), "not learned"))
    assert found is not None
    assert found.cause == cause
    assert advised.lower() in found.sentence.lower()
