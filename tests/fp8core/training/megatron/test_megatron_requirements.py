"""What the Megatron trainer cannot do on a machine is refused before anything is loaded."""

import re
from dataclasses import replace

import pytest
import torch

from fp8core.config.capability import Node, this_node
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import MegatronConfig
from fp8core.errors import UserError, refuse
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.numerics.rotary import LinearScaling, YarnScaling
from fp8core.run.build import engine_environment
from fp8core.training.megatron.arguments import transformer_arguments
from fp8core.training.megatron.entry import grid_refusals, machine_refusals

FP32 = ["precision.rollout={linear: fp32, kv_cache: fp32}", "precision.training={linear: fp32, kv_cache: fp32}"]
BF16_CACHE = ["precision.training={linear: fp8_block, kv_cache: bf16}", "precision.scale_rule=pow2"]


def config(*changes):
    return load_config("tiny", ["training.trainer=megatron", *changes])


def node(platform, gpus):
    """A machine on which everything is installed."""
    return Node(platform, gpus, packages={"megatron-core": "0.16.1", "transformer-engine": "2.9"})


@pytest.mark.parametrize(
    ("changes", "platform", "reason"),
    [
        ([], "cpu", "Megatron trains on GPUs, and torch sees none here; set it to torch"),
        (FP32, "sm_90", "linear=fp32: Megatron computes in BF16 or block FP8"),
        ([], "sm_90", "kv_cache=fp8: Megatron's attention computes in BF16"),
        (["precision.training={linear: fp8_block, kv_cache: bf16, backward: bf16}"], "sm_90", "backward=bf16"),
        (
            [BF16_CACHE[0], "precision.scale_rule=fp32_activations"],
            "sm_90",
            "scale_rule=fp32_activations: Transformer Engine .* by one rule; set it to fp32 or to pow2",
        ),
    ],
)
def test_it_is_refused_with_the_reason(changes, platform, reason):
    with pytest.raises(UserError, match=reason):
        refuse(machine_refusals(config(*changes), node(platform, 2)))


def test_the_scale_rule_is_in_the_environment_before_anything_is_imported():
    here = this_node(("megatron-core", "transformer-engine"))
    rules = {
        rule: engine_environment(config(f"precision.scale_rule={rule}"), here).required for rule in ("pow2", "fp32")
    }
    assert rules["pow2"]["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "0"
    assert rules["fp32"]["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert rules["pow2"]["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    free = engine_environment(config("training.deterministic=false"), here).required
    assert free["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "1"
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" not in engine_environment(load_config("tiny", []), here).required


BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
)
FP8 = PrecisionContract(training=TrainingPrecision(kv_cache="bf16"))


@pytest.mark.parametrize(
    ("ranks", "parts", "reason"),
    [
        (4, {"tensor_parallel": 3}, r"cluster\.ranks=4 is no multiple of training\.megatron\.tensor_parallel=3"),
        (4, {"expert_parallel": 3}, "expert_parallel=3"),
        (1, {"sequence_parallel": True}, "needs tensor_parallel above 1"),
        (1, {"micro_batch_tokens": 1000}, "multiple of 128"),
        (1, {"gpus": 1}, r"training\.megatron\.gpus: unknown key"),
    ],
)
def test_a_grid_that_does_not_come_out_even_is_refused(ranks, parts, reason):
    spread = {f"training.megatron.{key}": value for key, value in parts.items()}
    with pytest.raises(UserError, match=reason):
        load_config("tiny", {"training.trainer": "megatron", "cluster.ranks": ranks, **spread})


@pytest.mark.parametrize(
    ("changes", "parts", "longest", "reason"),
    [
        ({}, {"tensor_parallel": 4}, 64, "tensor_parallel=4: does not divide the model's 2 KV heads"),
        ({}, {"expert_parallel": 2}, 64, "expert_parallel=2: does not divide the model's 1 expert"),
        ({}, {"micro_batch_tokens": 128}, 129, "micro_batch_tokens=128: the longest sequence has 129 tokens"),
        (
            {},
            {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_tokens": 384},
            64,
            "micro_batch_tokens=384: is no multiple of 256",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(architecture, changes, parts, longest, reason):
    megatron = MegatronConfig(**parts)
    with pytest.raises(UserError, match=f"^training.megatron.{reason}"):
        refuse(grid_refusals(architecture(**changes), megatron, BF16, longest))


def test_only_frequencies_are_scaled(architecture):
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=16)
    first, *others = (
        [*grid_refusals(architecture(rope_scaling=scaling), MegatronConfig(), BF16, 64)]
        for scaling in (yarn, replace(yarn, attention_factor=1.0), LinearScaling(factor=4.0))
    )
    assert re.search(r"multiplies Q and K by 1.139, .*; set trainer to torch$", *first)
    assert others == [[], []]


def test_block_fp8_needs_whole_tiles_on_each_gpu():
    llama = HUB_ARCHITECTURES["meta-llama/Llama-3.1-8B-Instruct"]
    refuse(grid_refusals(llama, MegatronConfig(tensor_parallel=8), FP8, 2048))
    narrow = replace(llama, intermediate_size=14_464)
    refuse(grid_refusals(narrow, MegatronConfig(), FP8, 2048))
    refuse(grid_refusals(narrow, MegatronConfig(tensor_parallel=2), BF16, 2048))
    with pytest.raises(UserError, match=r"linear=fp8_block: on each GPU .* a side of 7232, .* set it to bf16"):
        refuse(grid_refusals(narrow, MegatronConfig(tensor_parallel=2), FP8, 2048))


def test_layers_kept_in_bf16_at_both_ends():
    contract = FP8.model_copy(update={"bf16_first_layers": 2, "bf16_last_layers": 3})
    found = transformer_arguments(
        HUB_ARCHITECTURES["Qwen/Qwen3-8B-Base"], contract, MegatronConfig(), deterministic=True
    )
    assert (found["fp8"], found["fp8_recipe"], found["transformer_impl"]) == ("e4m3", "blockwise", "transformer_engine")
    assert found["params_dtype"] == torch.bfloat16
    assert found["deterministic_mode"]
    assert found["first_last_layers_bf16"]
    assert (found["num_layers_at_start_in_bf16"], found["num_layers_at_end_in_bf16"]) == (2, 3)
