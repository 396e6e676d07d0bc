"""Two sources with a verifier each: what a step records of them, a kill, a replay; in every mode."""

import json

import pytest

from fp8core.data.chain import running_values
from fp8core.run.verify import verify
from fp8core.store.ledger import START, stored_metrics
from fp8core.store.run_view import RunView

PREFIX = "Compute "
# No answer of the untrained policy is right: its length decides.
EVEN = """
def even(prompt, completion, answer, finish, base=0.0):
    return base + float(len(completion) % 2)
"""
MODES = {
    "synchronous": {},
    "one_step_off": {
        "pipeline.mode": "one_step_off",
        "reward.others": [{"name": "digit", "verifier": "chain", "weight": 0.0}],
    },
    "asynchronous": {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 3},
    "refill": {"rollout.refill.max_batches": 3, "rollout.retire_after": 1},
    "environment": {
        "environment": {"name": "calculator", "options": {"modulus": 10, "left_to_right": True}, "max_turns": 2}
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "even.py").write_text(EVEN)
    questions = [f"{a}+{b}*{c}=" for a in range(5) for b in range(5) for c in range(4)]
    rows = [{"question": each, "answer": running_values(each)[-1], "unit": each[0]} for each in questions]
    (folder / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    easy = {"name": "easy", "weight": 3, "source": "chain", "chain": {"min_operands": 3}}
    hard = {"name": "hard", "source": str(folder / "hard.jsonl"), "template": PREFIX + "{question}"}
    own = {"verifier": f"{folder / 'even.py'}:even", "options": {"base": 2.0}, "columns": ["unit"]}
    return [easy, hard | own]


@pytest.fixture(scope="module", params=MODES)
def mixed(request, loop_run, data):
    settings = {"data": data, "rollout": {"prompts_per_step": 5, "group_size": 4, "max_new_tokens": 10}}
    return loop_run(f"mixed-{request.param}", **settings, **MODES[request.param])


def test_each_row_has_its_source_and_the_reward_of_its_verifier(mixed):
    drawn = []
    for index in range(1, 5):
        artifacts = mixed.ledger.artifacts(index)
        tables = [mixed.store.get_table(artifacts[name]).to_pylist() for name in ("prompts", "rollouts", "rewards")]
        prompts, rollouts, rewards = tables
        drawn += [row["source"] for row in prompts]
        by_source = {name: [] for name in ("easy", "hard")}
        for rollout, reward in zip(rollouts, rewards, strict=True):
            (prompt,) = (row for row in prompts if row["group"] == rollout["group"])
            assert reward["source"] == prompt["source"]
            assert prompt["text"].startswith(PREFIX) == (prompt["source"] == "hard") == bool(prompt["columns"])
            if reward["source"] == "easy":
                assert reward["reward"] in (0.0, 1.0)
            else:
                # An episode that ends in a call has no answer to verify.
                assert reward["reward"] >= 2.0 or reward["outcome"] in ("wrong", "unparsed")
            by_source[reward["source"]].append((reward["reward"], sum(rollout["written"])))
        metrics = stored_metrics(mixed.ledger, mixed.store, index)
        for name, values in by_source.items():
            assert (f"reward/source/{name}" in metrics) == bool(values)
            if values:
                means = [pytest.approx(sum(column) / len(values)) for column in zip(*values, strict=True)]
                assert [metrics[f"reward/source/{name}"], metrics[f"rollout/length_source/{name}"]] == means
        assert metrics["alignment/token_mult_prob_error"] == 1.0
    # With refill, groups with a signal have other shares than the draws.
    assert 13 <= drawn.count("easy") <= 17 or "refill" in mixed.folder.name
    for index in (START, 2, 4):
        evaluation = mixed.store.get_json(mixed.ledger.artifacts(index)["evaluation"])
        easy, hard = (evaluation["sources"][name]["accuracy"] for name in ("easy", "hard"))
        assert 6 * easy + 2 * hard == pytest.approx(8 * evaluation["accuracy"])
        assert stored_metrics(mixed.ledger, mixed.store, index)["reward/heldout_source/hard"] == hard


def test_a_kill_changes_nothing_and_a_replay_finds_no_difference(mixed, tmp_path):
    run = mixed.copy(tmp_path)
    run.cut_after(3, "rollout")
    run.resume()
    weights = [[record["weights_digest"] for record in each.records] for each in (run, mixed)]
    assert weights[0] == weights[1]
    assert {result.outcome for result in run.replayed(range(3, 5))} == {"equal"}
    assert [*verify(RunView.read(run.folder))] == []
