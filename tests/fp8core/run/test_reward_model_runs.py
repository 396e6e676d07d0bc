"""Runs whose rewards come from a reward model: it is local, so a replay computes its scores again."""

import pytest
from tiny_reward_model import save_reward_model

from flows.cli import main


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_replay_scores_again_and_says_so_if_the_weights_differ(loop_run, tmp_path, bpe_tokenizer, mode):
    folder = save_reward_model(tmp_path / "model", bpe_tokenizer)
    reward = {"verifier": "reward_model", "options": {"model": str(folder), "batch_size": 5}}
    run = loop_run("scored", steps=2, reward=reward, **{"pipeline.mode": mode})
    assert run.metric("alignment/token_mult_prob_error") == {1: 1.0, 2: 1.0}
    rewards = run.store.get_table(run.ledger.artifacts(2)["rewards"])
    assert len({*rewards["reward"].to_pylist()}) > rewards.num_rows // 2
    messages = run.store.get_table(run.ledger.artifacts(2)["prompts"])["messages"].to_pylist()
    assert messages[0].startswith('[["user", "')
    assert [verdict.outcome for verdict in run.replayed(range(3))] == ["equal"] * 3
    assert main(["verify", str(run.folder)]) == 0
    save_reward_model(folder, bpe_tokenizer, seed=1)
    (verdict,) = run.replayed(range(2, 3))
    assert verdict.outcome == "different"
    assert verdict.causes[0].startswith("executed differs: reward.weights ")
    assert verdict.difference[1].startswith("row 0, column reward: ")
