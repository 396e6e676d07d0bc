"""Small deployments of the published models: what a Hopper machine takes, and what a row says."""

from dataclasses import replace

import pytest

from benchmarks.deployment_hopper import CASES, MODELS, parts_of, run_facts, small_model, small_problems, small_settings
from fp8core.config.capability import Node, check_contract
from fp8core.config.load import load_config
from fp8core.data.source import build_source
from fp8core.models.hub import PUBLISHED
from fp8core.plan.run_plan import plan_run, refuse_unfit
from fp8core.resources.memory import GPUS, Machine
from fp8core.rollout.vllm.requirements import VllmBuild, contract_refusals, model_refusals
from fp8core.training.registry import trainer_grid, trainer_of

SIZES = {
    *("evaluation.prompts", "rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_tokens"),
    *("cluster.ranks", "training.megatron.expert_parallel", "training.megatron.micro_batch_tokens"),
    "cluster.engines",
}


@pytest.mark.parametrize("case", CASES)
def test_hopper_gpus_take_the_small_ones(case):
    name, grid = parts_of(case)
    config, arch = load_config(name, small_settings("cuda", grid)), small_model(name, "cuda")
    check_contract(config.precision, "sm_90", corrected=config.correction.method != "none")
    trainer = trainer_of(config.training)
    node = Node("sm_90", 8, packages={"megatron-core": "0.16", "transformer-engine": "2.0"})
    assert not [*trainer.check(config, node)]
    assert not [*trainer.check_model(config, arch)]
    assert not [*contract_refusals(config.precision, config.rollout.vllm, VllmBuild("vllm", "0.26.0", "cuda"))]
    assert not [*model_refusals(arch, config.precision, config.rollout.vllm)]
    machine = Machine(GPUS["h200"], None)
    refuse_unfit(plan_run(config, arch, machine, trainer_grid(config, machine)))


@pytest.mark.parametrize("name", MODELS)
def test_only_sizes_and_the_verifier_differ_from_what_is_shipped(name):
    assert small_settings("cuda", "one").keys() == SIZES | {"reward.verifier"}
    arch, published = small_model(name, "cuda"), PUBLISHED[load_config(name).model]
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "experts")
    assert arch == replace(published, **{key: getattr(arch, key) for key in shape})
    assert (arch.head_dim, arch.hidden_size % 128, arch.vocab_size % 128) == (128, 0, 0)


def test_there_are_problems_enough(tmp_path):
    problems = small_problems(tmp_path / "p.jsonl")
    config = load_config("qwen3", small_settings("cuda", "one") | {"data.source": str(problems)})
    source = build_source(config.data, config.evaluation)
    assert len(source.heldout(config.evaluation.prompts)) == config.evaluation.prompts
    assert len(source.training(1, config.rollout.prompts_per_step, seed=0)) == config.rollout.prompts_per_step


def test_a_row_says_what_a_run_did_and_that_its_checkpoint_is_what_the_engine_holds(whole_run, tmp_path):
    facts = run_facts(whole_run.folder)
    assert (facts["steps"], facts["tmpe"]) == (4, [1.0] * 4)
    assert facts["checkpoint_is_held"] is True
    assert len({*facts["engine_digests"]}) == len({*facts["weights_digests"]}) == 4
    assert facts["ran"]["rollout_linear"] == facts["ran"]["training_linear"] == ["fp8_block"]
    assert facts["ran"]["rollout"]["engine"] == "embedded"
    assert "dtypes" not in facts["ran"]["rollout"]
    assert facts["versions"]["prefect"]
    assert run_facts(tmp_path) == {"steps": 0}


def test_a_checkpoint_that_is_not_what_the_engine_holds_is_seen(run_copy):
    (policy,) = (run_copy.folder / "checkpoints" / "00004" / "policy").glob("*.safetensors")
    data = bytearray(policy.read_bytes())
    data[-1] ^= 1  # The sign or the exponent of the last weight.
    policy.write_bytes(data)
    assert run_facts(run_copy.folder)["checkpoint_is_held"] is False
