"""Every configuration that is shipped runs, at reduced size (gsm8k needs a model: see test_real_model)."""

import pytest

from fp8core.config.load import shipped_names


@pytest.mark.parametrize("name", [name for name in shipped_names() if name not in ("gsm8k", "tiny")])
def test_it_runs(launch, small, name):
    finished = launch(f"shipped-{name}", steps=2, config=name, overrides=small)
    assert finished.state.is_completed(), finished.state.message
    assert finished.summary["tmpe_max"] == 1.0
    assert finished.summary["tokens_differing"] == 0


def test_dynamic_sampling_draws_more_and_trains_on_what_has_a_signal(launch, small):
    finished = launch("dynamic", steps=1, config="dapo", overrides={**small, "pipeline.steps.filter.with.groups": 1})
    run_id = finished.mlflow_run().info.run_id
    metrics = finished.mlflow.get_run(run_id).data.metrics
    drawn = 2 * small["rollout"]["prompts_per_step"] * small["rollout"]["group_size"]
    assert metrics["rollout/tokens"] >= drawn
    assert metrics["train/rows"] <= small["rollout"]["group_size"]


def test_a_shortfall_can_be_an_error(launch, small):
    demanding = {"pipeline.steps.filter.with.groups": 1000, "pipeline.steps.filter.with.shortfall": "error"}
    refused = launch("shortfall", steps=1, config="dapo", overrides={**small, **demanding})
    assert refused.state.is_failed()
    assert "of 1000 wanted groups" in refused.state.message
