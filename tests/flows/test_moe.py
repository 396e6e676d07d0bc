"""A mixture of experts through the whole loop, with the rollout's choice of experts replayed."""

import pytest

from fp8core.store.artifacts import ArtifactStore


@pytest.fixture(scope="module")
def replayed(launch, small):
    return launch("experts", config="tiny-moe", overrides={**small, "rollout.router_replay": True})


def rollouts(finished, index):
    return ArtifactStore(finished.folder).get_table(finished.ledger.tasks(index)["rollout"].outputs["rollouts"])


def test_a_mixture_of_experts_is_exact(replayed):
    assert replayed.summary["steps"] == 2
    assert replayed.summary["tmpe_max"] == 1.0
    assert replayed.summary["tokens_differing"] == 0


def test_the_experts_of_every_position_are_stored(replayed):
    for row in rollouts(replayed, 1).to_pylist():
        positions = row["experts"]
        assert len(positions) == len(row["prompt_tokens"]) + len(row["tokens"]) - 1
        for layers in positions:
            assert len(layers) == 2
            assert all(0 <= low < high < 4 for low, high in layers)


def test_replay_of_an_equal_choice_changes_no_weight(replayed, launch, small):
    """The trainer computes what the rollout computed, so it would have chosen the same experts."""
    own = launch("own-choice", config="tiny-moe", overrides=small)
    assert own.summary["weights_digest"] == replayed.summary["weights_digest"]
    assert "experts" not in rollouts(own, 1).column_names
