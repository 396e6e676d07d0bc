"""A run whose filters drop rows: its updates share out what is left, and its metrics are of that."""

import pytest


@pytest.fixture(scope="module")
def filtered(loop_run, small):
    """For reading only. Of its steps one has no row left, and others a part of them."""
    ahead = {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 12, "pipeline.chunk_tokens": 4}
    one_draw = {"rollout.refill": None, "rollout.oversample": 2.0}
    return loop_run("filtered", shipped="dapo", **small, **ahead, **one_draw, **{"steps": 4, "training.minibatches": 2})


def test_every_update_has_tokens(filtered):
    kept, ratios, rates = (filtered.metric(f"train/{name}") for name in ("rows", "ratio_mean", "learning_rate"))
    digests = {step: record["weights_digest"] for step, record in enumerate(filtered.records)}
    tables = [filtered.store.get_table(filtered.ledger.artifacts(step)["filtered"]) for step in kept]
    rows = [sum(table["keep"].to_pylist()) for table in tables]
    assert [*kept.values()] == rows
    assert 0 in rows
    assert len({0, 16}.union(rows)) > 2
    updates = 0
    for step, left in kept.items():
        updates += 2 if left else 0
        assert ratios[step] == pytest.approx(1 if left else 0, abs=0.05)
        assert (digests[step] == digests[step - 1]) == (left == 0)
        assert rates[step] == pytest.approx(1e-4 * min(1, updates / 5))


def test_the_run_is_replayed_and_goes_on_equal(filtered, tmp_path):
    assert [verdict.outcome for verdict in filtered.replayed(range(2, 5))] == ["equal"] * 3
    run = filtered.copy(tmp_path)
    run.cut_after(3, "train")
    run.resume()
    assert run.records == filtered.records
