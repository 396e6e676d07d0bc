"""What cannot be cut, or is not a multiple of what Transformer Engine wants, is refused before anything is loaded."""

import pytest
from pydantic import ValidationError

from fp8core.config.megatron import MegatronConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.errors import UserError
from fp8core.plan.shapes import PUBLISHED
from fp8core.training.megatron.grid import check_grid, token_multiple

BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
)
FP8 = PrecisionContract(training=TrainingPrecision(kv_cache="bf16"))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"gpus": 4, "tensor_parallel": 3}, "gpus=4 is no multiple of tensor_parallel=3"),
        ({"gpus": 4, "pipeline_parallel": 2, "expert_parallel": 4}, "expert_parallel=4 x pipeline_parallel=2"),
        ({"sequence_parallel": True}, "needs tensor_parallel above 1"),
        ({"micro_batch_tokens": 1000}, "multiple of 128"),
        ({"gpus": 0}, "greater than or equal to 1"),
        ({"gpus": 3, "pipeline_parallel": 2}, "gpus=3 is no multiple of tensor_parallel=1 x pipeline_parallel=2"),
        ({"gpus": 2, "pipeline_parallel": 2, "virtual_stages": 2}, "virtual_stages\n.*not permitted"),
    ],
)
def test_a_grid_that_does_not_come_out_even_is_refused(parts, reason):
    with pytest.raises(ValidationError, match=reason):
        MegatronConfig(**parts)


@pytest.mark.parametrize(
    ("changes", "parts", "longest", "reason"),
    [
        ({}, {"tensor_parallel": 4}, 64, "tensor_parallel=4: does not divide the model's 2 KV heads"),
        ({}, {"pipeline_parallel": 3}, 64, "pipeline_parallel=3: does not divide the model's 2 layers"),
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
    megatron = MegatronConfig(gpus=12, **parts)
    with pytest.raises(UserError, match=f"^training.megatron.{reason}"):
        check_grid(architecture(**changes), megatron, BF16, longest)


def test_experts_and_tensor_parallelism_need_sequence_parallelism():
    moe = PUBLISHED["Qwen/Qwen3-30B-A3B"]
    with pytest.raises(UserError, match="sequence_parallel=false: with experts and tensor_parallel=2"):
        check_grid(moe, MegatronConfig(gpus=8, tensor_parallel=2), FP8, 4096)
    check_grid(moe, MegatronConfig(gpus=8, tensor_parallel=2, sequence_parallel=True, expert_parallel=8), FP8, 4096)


def test_block_fp8_wants_multiples_of_128_on_each_gpu():
    llama = PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
    check_grid(llama, MegatronConfig(gpus=8, tensor_parallel=8, sequence_parallel=True), BF16, 2048)
    check_grid(llama, MegatronConfig(gpus=8, tensor_parallel=8, sequence_parallel=True), FP8, 2048)
    narrow = {**vars(llama), "intermediate_size": 14_464}
    with pytest.raises(UserError, match=r"linear=fp8_block: MLP has 7232 columns on each GPU.*tensor_parallel"):
        check_grid(type(llama)(**narrow), MegatronConfig(gpus=2, tensor_parallel=2), FP8, 2048)


def test_tokens_are_padded_so_that_each_gpu_of_a_sequence_group_has_whole_tiles():
    assert token_multiple(MegatronConfig(gpus=4, tensor_parallel=4)) == 128
    assert token_multiple(MegatronConfig(gpus=4, tensor_parallel=4, sequence_parallel=True)) == 512
