"""Every configuration that is shipped runs, at reduced size: on this CPU, whatever engine and model it names."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest

from fp8core.config.capability import Node, check_contract
from fp8core.config.load import load_config, load_open_config, shipped_names
from fp8core.models.checkpoint import initial_weights, save_checkpoint
from fp8core.models.hub import PUBLISHED, model_shape
from fp8core.rollout.vllm.requirements import VllmBuild, contract_refusals, model_refusals
from fp8core.run.build import build_base
from fp8core.training.registry import trainer_of

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
EIGHT_GPUS = ("llama", "qwen3", "qwen3-moe")
FP32 = {"linear": "fp32", "kv_cache": "fp32"}
ON_ONE_CPU = {
    "precision.rollout": FP32,
    "precision.training": FP32,
    "precision.rounding_points": "stepwise",
    "cluster.ranks": 1,
    "training.megatron": {"expert_parallel": 1, "recompute": "none"},
    "rollout.engine": "embedded",
    "cluster.engines": 1,
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


def reduced(name, config, small, checkpoint, problems):
    """What makes a shipped configuration small, without a change of what it computes."""
    if config.architecture is not None:
        return small | {f"architecture.{key}": size for key, size in SIZES.items()}
    # The chat template of the small checkpoint has no tool calls.
    budgets = dict.fromkeys(("environment.turn_tokens", "environment.observation_tokens"), 4)
    called = {} if config.environment is None else {"environment.format": "plain", **budgets}
    return SMALL_BATCH | called | {"model": str(checkpoint(config.model)), "data.source": str(problems)}


@pytest.fixture
def taught(tmp_path):
    """taught(config): where the teacher of a configuration lies that names one, a policy that knows nothing."""

    def setting(config):
        if config.loss.distillation.teacher is None:
            return {}
        base = build_base(config)
        save_checkpoint(tmp_path / "teacher", base.arch, base.tensors, base.tokenizer)
        return {"loss.distillation.teacher": str(tmp_path / "teacher")}

    return setting


# One of each kind in the first tier, as flows: our exact trainer, a pipeline of its own, the references of the kernels.
FIRST_TIER = ("tiny", "careful", "llama-aligned")
EXACT = {"alignment/token_mult_prob_error": 1.0, "alignment/tokens_differing": 0}


@pytest.fixture
def on_this_cpu(small, checkpoint, problems, taught):
    """on_this_cpu(name): settings that make a shipped configuration run here."""

    def settings(name):
        config = load_open_config(name)
        # What trains on a GPU has the references of its kernels here.
        here = {
            "rollout.engine": "embedded",
            "training.device": "cpu",
            "training.packed": trainer_of(config.training).name == "packed" or None,
        }
        return {**reduced(name, config, small, checkpoint, problems), **here, **taught(config)}

    return settings


@pytest.mark.parametrize("name", FIRST_TIER)
def test_it_runs(launch, on_this_cpu, name):
    finished = launch(f"shipped-{name}", steps=1, config=name, overrides=on_this_cpu(name))
    assert finished.state.is_completed(), finished.state.message
    assert finished.summary["steps"] == 1
    assert finished.summary["tmpe_max"] == 1.0
    assert finished.summary["tokens_differing"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in shipped_names() if name not in (*FIRST_TIER, *EIGHT_GPUS)])
def test_its_loop_runs(loop_run, on_this_cpu, name):
    run = loop_run(f"shipped-{name}", name, steps=1, **on_this_cpu(name))
    assert {key: run.metric(key)[1] for key in EXACT} == EXACT


@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron Core is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_what_megatron_trains_on_eight_gpus_runs(loop_run, small, checkpoint, problems, name):
    """By Megatron, in the format and on the grid of one that it has on a CPU."""
    config = load_open_config(name)
    assert (config.training.trainer, config.rollout.engine) == ("megatron", "vllm")
    overrides = {**reduced(name, config, small, checkpoint, problems), **ON_ONE_CPU}
    run = loop_run(f"shipped-{name}", name, steps=1, **overrides)
    assert run.metric("alignment/token_mult_prob_error")[1] == pytest.approx(1.0, abs=1e-4)
    assert run.records[1]["executed"]["training"]["trainer"] == "megatron"


@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_a_hopper_machine_takes_what_eight_gpus_are_configured_for(name):
    """vLLM 0.26 and Megatron with Transformer Engine, asked for their refusals as on such a machine."""
    config, hopper = load_config(name), VllmBuild("vllm", "0.26.0", "cuda")
    arch = model_shape(config)
    check_contract(config.precision, "sm_90", corrected=config.correction.method != "none")
    trainer = trainer_of(config.training)
    node = Node("sm_90", 8, packages={"megatron-core": "0.16", "transformer-engine": "2.0"})
    assert not [*trainer.check(config, node)]
    assert not [*trainer.check_model(config, arch)]
    assert not [*contract_refusals(config.precision, config.rollout.vllm, hopper)]
    assert not [*model_refusals(arch, config.precision, config.rollout.vllm)]
    assert config.rollout.router_replay == bool(arch.sparse_layers)
    assert config.cluster.engines == config.cluster.ranks == 8


def test_dynamic_sampling_draws_more_and_trains_on_what_has_a_signal(launch, small):
    finished = launch("dynamic", steps=1, config="dapo", overrides={**small, "pipeline.steps.filter.with.groups": 1})
    run_id = finished.mlflow_run().info.run_id
    metrics = finished.mlflow.get_run(run_id).data.metrics
    drawn = 2 * small["rollout"]["prompts_per_step"] * small["rollout"]["group_size"]
    assert metrics["detail/rollout/tokens"] >= drawn
    assert metrics["detail/train/rows"] <= small["rollout"]["group_size"]


def test_a_shortfall_can_be_an_error(launch, small):
    demanding = {"pipeline.steps.filter.with.groups": 1000, "pipeline.steps.filter.with.shortfall": "error"}
    refused = launch("shortfall", steps=1, config="dapo", overrides={**small, **demanding})
    assert refused.state.is_failed()
    assert "of 1000 wanted groups" in refused.state.message
