"""What the Megatron trainer cannot do on a machine is refused before anything is loaded."""

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.training.megatron import requirements
from fp8core.workers.build import engine_environment

FP32 = ["precision.rollout={linear: fp32, kv_cache: fp32}", "precision.training={linear: fp32, kv_cache: fp32}"]
BF16_CACHE = ["precision.training={linear: fp8_block, kv_cache: bf16}"]


def config(*changes):
    return load_config("tiny", ["training.trainer=megatron", *changes])


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("changes", "platform", "reason"),
    [
        ([], "cpu", "linear=fp8_block: without a GPU Megatron trains in FP32"),
        ([*FP32, "training.megatron.recompute=full"], "cpu", "recompute: Megatron does that on a GPU alone"),
        ([*FP32, "training.megatron={gpus: 2, expert_parallel: 2}"], "cpu", "expert_parallel: .* set it to 1"),
        (FP32, "sm_90", "linear=fp32: Megatron trains in FP32 on a CPU alone"),
        ([], "sm_90", "kv_cache=fp8: Megatron's attention computes in BF16"),
        (["precision.training={linear: fp8_block, kv_cache: bf16, backward: bf16}"], "sm_90", "backward=bf16"),
        ([*FP32, "training.megatron={gpus: 2, pipeline_parallel: 2}"], "cpu", "pipeline_parallel: .* set it to 1"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_it_is_refused_with_the_reason(changes, platform, reason):
    with pytest.raises(UserError, match=reason):
        requirements.check_requirements(config(*changes), platform)


@pytest.mark.usefixtures("installed")
def test_what_megatron_does_passes():
    requirements.check_requirements(config(*FP32), "cpu")
    requirements.check_requirements(config(*BF16_CACHE), "sm_90")
    requirements.check_requirements(config(*BF16_CACHE, "training.megatron={gpus: 2, pipeline_parallel: 2}"), "sm_90")


def test_more_gpus_than_there_are_are_refused_by_number():
    eight = config(*BF16_CACHE, "training.megatron.gpus=8")
    with pytest.raises(UserError, match=r"^training\.megatron\.gpus=8: this machine has 1$"):
        requirements.check_gpus(eight, "sm_90", here=1)
    requirements.check_gpus(eight, "sm_90", here=8)
    requirements.check_gpus(eight, "cpu", here=0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if "transformer" in name else object())
    with pytest.raises(UserError, match="transformer_engine is not installed"):
        requirements.check_requirements(config(*BF16_CACHE), "sm_90")


def test_the_scale_rule_is_in_the_environment_before_anything_is_imported():
    rules = {rule: engine_environment(config(f"precision.scale_rule={rule}")).required for rule in ("pow2", "fp32")}
    assert rules["pow2"]["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "0"
    assert rules["fp32"]["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert rules["pow2"]["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    free = engine_environment(config("training.deterministic=false")).required
    assert free["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "1"
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" not in engine_environment(load_config("tiny", [])).required
