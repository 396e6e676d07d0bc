"""Architecture, contract and grid arrive in Megatron's own words."""

import pytest
import torch

from fp8core.config.megatron import MegatronConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.plan.shapes import PUBLISHED
from fp8core.training.megatron.arguments import model_arguments, transformer_arguments

FP8 = PrecisionContract(training=TrainingPrecision(kv_cache="bf16"))


def test_qwen3_8b_in_block_fp8():
    found = transformer_arguments(PUBLISHED["Qwen/Qwen3-8B-Base"], FP8, MegatronConfig(), "cuda", deterministic=True)
    assert found["fp8"] == "e4m3"
    assert found["fp8_recipe"] == "blockwise"
    assert not found["first_last_layers_bf16"]
    assert (found["num_layers"], found["hidden_size"], found["ffn_hidden_size"]) == (36, 4096, 12_288)
    assert (found["num_attention_heads"], found["num_query_groups"], found["kv_channels"]) == (32, 8, 128)
    assert found["qk_layernorm"]
    assert found["deterministic_mode"]
    assert found["layernorm_epsilon"] == 1e-6
    assert found["params_dtype"] == torch.bfloat16
    assert found["transformer_impl"] == "transformer_engine"
    assert "num_moe_experts" not in found


def test_layers_kept_in_bf16_at_both_ends():
    contract = FP8.model_copy(update={"bf16_first_layers": 2, "bf16_last_layers": 3})
    found = transformer_arguments(
        PUBLISHED["Qwen/Qwen3-8B-Base"], contract, MegatronConfig(), "cuda", deterministic=True
    )
    assert found["first_last_layers_bf16"]
    assert (found["num_layers_at_start_in_bf16"], found["num_layers_at_end_in_bf16"]) == (2, 3)


def test_qwen3_moe_with_its_experts_spread():
    moe = PUBLISHED["Qwen/Qwen3-30B-A3B"]
    megatron = MegatronConfig(gpus=8, tensor_parallel=2, sequence_parallel=True, expert_parallel=8)
    found = transformer_arguments(moe, FP8, megatron, "cuda", deterministic=True)
    assert (found["num_moe_experts"], found["moe_router_topk"], found["moe_ffn_hidden_size"]) == (128, 8, 768)
    assert found["moe_layer_freq"] == [1] * 48
    assert not found["moe_router_pre_softmax"], "the weights of the chosen experts sum to 1"
    assert found["moe_grouped_gemm"]
    assert (found["expert_model_parallel_size"], found["expert_tensor_parallel_size"]) == (8, 1)
    assert found["sequence_parallel"]


@pytest.mark.parametrize(("stages", "varies"), [(1, False), (4, True)])
def test_stages_tell_each_other_how_long_a_pack_is(stages, varies):
    megatron = MegatronConfig(gpus=8, pipeline_parallel=stages)
    found = transformer_arguments(PUBLISHED["Qwen/Qwen3-8B-Base"], FP8, megatron, "cuda", deterministic=True)
    assert (found["pipeline_model_parallel_size"], found["variable_seq_lengths"]) == (stages, varies)
    assert found["pipeline_dtype"] == torch.bfloat16
    assert found["moe_token_dispatcher_type"] == "alltoall", "Megatron takes no other with lengths that vary"


@pytest.mark.parametrize(("recompute", "granularity"), [("none", None), ("selective", "selective"), ("full", "full")])
def test_what_is_computed_again(recompute, granularity):
    llama = PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
    found = transformer_arguments(llama, FP8, MegatronConfig(recompute=recompute), "cuda", deterministic=True)
    assert found.get("recompute_granularity") == granularity


def test_fp32_on_a_cpu_has_megatrons_own_layers(architecture):
    fp32 = PrecisionContract(
        rollout=SidePrecision(linear="fp32", kv_cache="fp32"),
        training=TrainingPrecision(linear="fp32", kv_cache="fp32"),
    )
    found = transformer_arguments(architecture(), fp32, MegatronConfig(), "cpu", deterministic=True)
    assert found["params_dtype"] == torch.float32
    assert found["transformer_impl"] == "local"
    assert not {"fp8", "fp8_recipe"} & found.keys()


def test_embeddings_are_tied_and_padded():
    llama = PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
    tied = type(llama)(**{**vars(llama), "tie_embeddings": True})
    assert model_arguments(tied, MegatronConfig())["share_embeddings_and_output_weights"]
    assert not model_arguments(llama, MegatronConfig())["share_embeddings_and_output_weights"]
    assert model_arguments(llama, MegatronConfig(gpus=8, tensor_parallel=8))["vocab_size"] == 129_024
