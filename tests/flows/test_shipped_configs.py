"""Every configuration that is shipped runs, at reduced size: on this CPU, whatever engine and model it names."""

import json
from dataclasses import replace

import pytest

from fp8core.config.load import load_open_config, shipped_names
from fp8core.models.checkpoint import save_checkpoint
from fp8core.models.initial import initial_weights
from fp8core.plan.shapes import PUBLISHED

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
SMALL_BATCH = {
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 4,
    "evaluation.prompts": 1,
    "threads": 1,
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    rows = [{"question": f"Tom has {i} apples and buys 7 more.", "answer": f"#### {i + 7}"} for i in range(24)]
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def checkpoint(small_checkpoint, bpe_tokenizer, tmp_path):
    """checkpoint(model): a small one of the published model's family, any small one for a model that is left open."""

    def of_family(model):
        if model not in PUBLISHED:
            return small_checkpoint
        published = PUBLISHED[model]
        experts = published.experts and replace(published.experts, count=4, per_token=2, intermediate_size=128)
        vocabulary = {"vocab_size": bpe_tokenizer.vocab_size, "max_positions": 512}
        arch = replace(published, **SIZES, **vocabulary, experts=experts)
        save_checkpoint(tmp_path / "model", arch, initial_weights(arch, seed=0), bpe_tokenizer)
        return tmp_path / "model"

    return of_family


@pytest.mark.parametrize("name", shipped_names())
def test_it_runs(launch, small, checkpoint, problems, name):
    config = load_open_config(name)
    if config.architecture is not None:
        reduced = small | {f"architecture.{key}": size for key, size in SIZES.items()}
    else:
        reduced = SMALL_BATCH | {"model": str(checkpoint(config.model)), "data.source": str(problems)}
    # What trains on a GPU has the references of its kernels here.
    here = {"rollout.engine": "embedded", "training.device": "cpu", "training.packed": config.training.packs or None}
    finished = launch(f"shipped-{name}", steps=1, config=name, overrides={**reduced, **here})
    assert finished.state.is_completed(), finished.state.message
    assert finished.summary["steps"] == 1
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
