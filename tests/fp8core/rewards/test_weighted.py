"""Several rewards of a completion: their sum, their record, and what stays that of the main verifier."""

import json
from contextlib import closing

import pytest

from fp8core.config.load import load_config
from fp8core.config.reward import RewardConfig
from fp8core.config.run import own_code
from fp8core.errors import UserError
from fp8core.rewards.scorer import ScoreRequest
from fp8core.rewards.verifier import build_verifier, reward_of
from fp8core.run.refusals import pipeline_of
from fp8core.run.rollouts import failures


def verdicts(config, *completions):
    verifier = build_verifier(RewardConfig.model_validate(config))
    try:
        return verifier.verify([ScoreRequest("?", completion, "3", "stop") for completion in completions])
    finally:
        verifier.close()


@pytest.mark.parametrize(
    ("prompt", "completion", "finish", "score"),
    [
        ("?", "<a>x</a>#3", "stop", 1),
        ("?", "<a>x</a>#3", "length", 0),
        ("?", "</a>x<a>", "stop", 0),
        ("?", "<a>x", "stop", 0),
        ("?", "<a><a>x</a>", "stop", 0),
        ("Use <a>, </a>.\n<a>\n", "x</a>#3", "stop", 1),
        ("<a>\n\n</a>\n\n", "#3", "stop", 1),
        ("<a>\n", "<a>x</a>#3", "stop", 0),
        ("Use <a>: ", "x</a>#3", "stop", 0),
    ],
)
def test_a_format_has_each_tag_once_in_order_also_those_that_end_the_prompt(prompt, completion, finish, score):
    form = {"name": "form", "verifier": "format", "weight": 0.25, "options": {"tags": ["<a>", "</a>"]}}
    with closing(build_verifier(RewardConfig.model_validate({"others": [form]}))) as verifier:
        (found,) = verifier.verify([ScoreRequest(prompt, completion, "3", finish)])
    assert found.side_scores == (("form", score, 0.25, "right" if score else "wrong"),)


def test_a_reward_is_the_weighted_sum_and_the_verdict_stays_that_of_the_main_verifier(tmp_path):
    (tmp_path / "own.py").write_text(
        "def vowels(prompt, completion, reference, finish, of):\n"
        "    return float(sum(completion.count(v) for v in of))\n"
        "def never(prompt, completion, reference, finish):\n    return 1 / 0\n"
        "def seldom(prompt, completion, reference, finish):\n    return 1 / completion.count('a')\n"
    )
    other = {"name": "vowels", "verifier": f"{tmp_path / 'own.py'}:vowels", "weight": -2.0, "options": {"of": "ae"}}
    right, wrong = verdicts({"others": [other]}, "<a>e</a>#3", "e#4")
    assert [(found.outcome, found.score) for found in (right, wrong)] == [("right", 1.0), ("wrong", 0.0)]
    assert [reward_of(found) for found in (right, wrong)] == [1 - 2 * 3, -2.0]
    failing = [{"name": "mine", "verifier": f"{tmp_path / 'own.py'}:{name}"} for name in ("seldom", "never")]
    noted, checked = verdicts({"others": failing[:1]}, "#3", "a#3")
    remark = failures(load_config("tiny"), [noted, checked])
    assert remark is not None
    assert "1 of 2 by reward.others.mine: mine: own.py:6: ZeroDivisionError" in remark
    assert failures(load_config("tiny"), [checked]) is None
    assert (reward_of(noted), noted.outcome) == (1.0, "right")
    assert "mine: own.py:6: ZeroDivisionError" in noted.detail
    # A round of a step may fail as a whole: the step tells.
    failed = verdicts({"others": failing[1:]}, "#3", "a#3")
    with pytest.raises(UserError, match=r"others.mine: no answer could be checked: mine: own.py:4: ZeroDivisionError"):
        failures(load_config("tiny"), failed)
    assert failures(load_config("tiny"), [*failed, checked]) is not None
    config = load_config("tiny", {"reward.others": [other]})
    assert own_code(config) == {"reward.others.vowels.verifier": other["verifier"]}


def test_a_mistake_in_another_verifier_names_its_own_setting():
    def others(verifier):
        settings = {"verifier": "integer", "others": [{"name": "strict", "verifier": verifier}], "workers": 1}
        return RewardConfig.model_validate(settings)

    with closing(build_verifier(others("chain"))) as built:
        (fault,) = built.faults([("?", "1,000")])
    assert fault.startswith("reward.others.strict.verifier=chain: the reference of '?' is '1,000'")
    with pytest.raises(UserError, match=r"^reward\.others\.strict\.verifier=nowhere:score: nowhere cannot be imported"):
        build_verifier(others("nowhere:score"))


def test_a_run_records_each_score_and_each_mean(loop_run, tmp_path):
    """Held-out answers are the main verifier's alone: the other one has seen the training's prompts and no others."""
    again = {"name": "again", "verifier": "chain", "weight": 2.0}
    # Without data.columns, a parameter of that name may keep its default.
    (tmp_path / "own.py").write_text(
        "def seen(prompt, completion, reference, finish, log, columns=None):\n"
        "    print(prompt, file=open(log, 'a'))\n"
        "    return 0.0\n"
    )
    log = tmp_path / "log"
    seen = {"name": "seen", "verifier": f"{tmp_path / 'own.py'}:seen", "options": {"log": str(log)}}
    step = {"name": "filter", "uses": "tasks.filter:filter", "needs": ["rewards"]}
    edits = {"insert": [{"after": "reward", "step": step}], "rewire": {"record": {"rewards": "filtered"}}}
    run = loop_run("weighted", steps=1, reward={"others": [again, seen]}, pipeline=edits)
    artifacts = run.ledger.artifacts(1)
    rows, metrics = run.store.get_table(artifacts["rewards"]).to_pylist(), run.store.get_json(artifacts["metrics"])
    assert all(row["reward"] == row["score_verdict"] + 2 * row["score_again"] for row in rows)
    assert {*log.read_text().splitlines()} == {*run.store.get_table(artifacts["prompts"])["text"].to_pylist()}
    for name in ("verdict", "again"):
        assert metrics[f"reward/{name}"] == pytest.approx(sum(row[f"score_{name}"] for row in rows) / len(rows))
    described = run.records[1]["executed"]["reward"]
    assert json.dumps(described["others"]["again"]) == '{"verifier": "chain"}'


def test_another_verifier_takes_no_name_of_a_declared_metric():
    other = {"name": "groups_with_signal", "verifier": "chain"}
    with pytest.raises(UserError, match=r"^reward\.others: reward/groups_with_signal is a metric already"):
        pipeline_of(load_config("tiny", {"reward.others": [other]}))
