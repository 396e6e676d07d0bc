"""A mixture of experts through the whole loop, with the rollout's choice of experts replayed, and packed."""

import pytest


@pytest.fixture(scope="module")
def replayed(loop_run, small):
    return loop_run("experts", "tiny-moe", steps=2, **small, **{"rollout.router_replay": True})


def test_a_mixture_of_experts_is_exact_and_its_choice_is_stored(replayed):
    assert replayed.metric("alignment/token_mult_prob_error") == {1: 1.0, 2: 1.0}
    assert replayed.metric("alignment/tokens_differing") == {1: 0, 2: 0}
    for row in replayed.store.get_table(replayed.ledger.artifacts(1)["rollouts"]).to_pylist():
        positions = row["experts"]
        assert len(positions) == len(row["prompt_tokens"]) + len(row["tokens"]) - 1
        for layers in positions:
            assert len(layers) == 2
            assert all(0 <= low < high < 4 for low, high in layers)


def test_a_packed_update_is_exact_and_its_cut_run_ends_equal(loop_run, small, tmp_path):
    router = {"loss.router.load_balancing": 0.01, "loss.router.z": 0.001}
    packed = {"training.packed": True, "precision.rounding_points": "kernels", **router}
    whole = loop_run("packed", "tiny-moe", steps=3, **small, **packed)
    assert whole.metric("alignment/token_mult_prob_error") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert whole.metric("alignment/tokens_differing") == {1: 0, 2: 0, 3: 0}
    assert len({record["weights_digest"] for record in whole.records}) == 4
    assert all(1 <= value < 4 for value in whole.metric("train/router_load").values())
    run = whole.copy(tmp_path)
    run.cut_after(3, "rollout")
    run.resume()
    assert run.records == whole.records
    assert [verdict.outcome for verdict in run.replayed([2, 3])] == ["equal", "equal"]
