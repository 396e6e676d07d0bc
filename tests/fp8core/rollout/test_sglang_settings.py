"""What SGLang is started with, what it is refused for, where its tensors lie, and what its report means."""

import json
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8core.alignment.bounds import contract_of
from fp8core.config.engines import SglangConfig
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.errors import EngineLost, UserError
from fp8core.models.architecture import Architecture, Experts
from fp8core.numerics.grouped import Quantisers
from fp8core.numerics.recipe import RECIPES
from fp8core.rollout.aligned import decoder_of
from fp8core.rollout.resident import ResidentEngine
from fp8core.rollout.sglang import internals
from fp8core.rollout.sglang.engine import SglangEngine
from fp8core.rollout.sglang.requirements import (
    SglangBuild,
    contract_refusals,
    find_build,
    model_refusals,
)
from fp8core.rollout.sglang.settings import (
    Launch,
    cache_tokens,
    described_formats,
    engine_arguments,
    model_config,
    required_environment,
)
from fp8core.rollout.sglang.worker import Mailbox, WorkerError
from fp8core.run.policy import SyncError, check_formats

BUILD = SglangBuild("0.5.15")
FP8 = PrecisionContract(attention="fp8")
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
)
ARCH = Architecture(
    family="qwen3",
    vocab_size=200,
    hidden_size=256,
    intermediate_size=384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_positions=256,
    rope_scaling=None,
    qk_norm=True,
    tie_embeddings=False,
)
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())
SPARSE = replace(ARCH, family="qwen3_moe", experts=EXPERTS)
LAUNCH = Launch("/folder", 256, 16)
STOCK = SglangConfig()
ALIGNED = SglangConfig(model="aligned", page_size=16)
POINTS = FP8.model_copy(update={"rounding_points": "kernels"})


def _installed(version):
    def version_of(distribution):
        if version is None or distribution != "sglang":
            raise PackageNotFoundError(distribution)
        return version

    return version_of


def _refused(found, *complaints):
    messages = list(found)
    assert len(messages) == len(complaints), messages
    for message, complaint in zip(messages, complaints, strict=True):
        assert re.search(complaint, message)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("platform", "version", "complaint"),
    [
        ("sm_90", None, "not installed; pip install"),
        ("sm_90", "0.5.14", r"sglang 0\.5\.14 is installed, this engine supports sglang 0\.5\.15"),
        ("sm_90", "0.5.15.post1", r"sglang 0\.5\.15\.post1 is installed"),
        ("sm_100", "0.5.15", "on sm_100: this engine supports it on sm_90"),
        ("cpu", "0.5.15", "on a machine without a GPU"),
    ],
)
def test_every_other_version_and_machine_is_refused(platform, version, complaint):
    with pytest.raises(UserError, match=complaint):
        find_build(platform, _installed(version))


def test_contracts_it_cannot_run_are_refused():
    assert not list(contract_refusals(FP8, STOCK, BUILD))
    assert not list(contract_refusals(FP8.model_copy(update={"scale_rule": "fp32"}), STOCK, BUILD))
    _refused(contract_refusals(POINTS, STOCK, BUILD), "set it to stepwise")
    fp16 = FP8.model_copy(update={"attention": "fp16_over_fp8_cache"})
    _refused(contract_refusals(fp16, STOCK, BUILD), "sglang 0.5.15 multiplies E4M3 Q and P .* precision.attention=fp8")
    exact = FP8.model_copy(update={"rollout": SidePrecision(linear="fp32", kv_cache="fp32")})
    _refused(contract_refusals(exact, STOCK, BUILD), "precision.rollout.linear=fp32: sglang 0.5.15 computes")


def test_models_it_cannot_hold_are_refused():
    assert not list(model_refusals(ARCH, FP8, STOCK))
    _refused(
        model_refusals(replace(ARCH, head_dim=32, num_heads=8, num_kv_heads=4), FP8, STOCK),
        "FlashAttention 3 reads FP8 for 64, 128, 256",
    )
    _refused(model_refusals(replace(ARCH, intermediate_size=192), FP8, STOCK), r"gate_proj.weight is \[192, 256\]")
    assert not list(model_refusals(replace(ARCH, head_dim=32, intermediate_size=192), BF16, STOCK))
    _refused(model_refusals(replace(ARCH, hidden_size=288), BF16, STOCK), "no multiple of 64")


def test_experts_are_held_in_both_formats():
    assert not list(model_refusals(SPARSE, FP8, STOCK))
    narrow = replace(SPARSE, experts=replace(EXPERTS, intermediate_size=72))
    assert not list(model_refusals(narrow, BF16, STOCK))
    _refused(model_refusals(narrow, FP8, STOCK), r"experts.0.gate_proj.weight is \[72, 256\].* multiples of 128")


@pytest.mark.parametrize(
    ("arch", "complaint"),
    [
        (replace(SPARSE, experts=replace(EXPERTS, dense_layers=(1,))), "layer 1 has no experts"),
        (replace(SPARSE, experts=replace(EXPERTS, sparse_step=2)), "layer 0 has no experts"),
        (replace(SPARSE, tie_embeddings=True), "embedding and head are one weight"),
        (replace(SPARSE, experts=replace(EXPERTS, intermediate_size=36)), "experts of width 36.* multiples of 8"),
    ],
)
def test_models_with_experts_that_sglang_does_not_make_are_refused(arch, complaint):
    _refused(model_refusals(arch, BF16, STOCK), complaint)


def test_experts_have_one_kernel_and_their_choice_is_recorded_where_it_is_asked_for():
    recorded = {"enable_return_routed_experts", "disable_overlap_schedule"}
    arguments = engine_arguments(SPARSE, BF16, STOCK, LAUNCH)
    assert arguments["moe_runner_backend"] == "triton"
    assert not recorded & arguments.keys()
    replayed = engine_arguments(SPARSE, BF16, STOCK, replace(LAUNCH, routes=True))
    assert {name: replayed[name] for name in replayed.keys() - arguments.keys()} == dict.fromkeys(recorded, True)
    assert not {"moe_runner_backend", *recorded} & engine_arguments(ARCH, BF16, STOCK, LAUNCH).keys()


def test_an_engine_is_started_as_the_contract_says():
    arguments = engine_arguments(ARCH, FP8, SglangConfig(kv_cache_gib=0.5, page_size=16), LAUNCH)
    assert {arguments[name] for name in ("quantization", "attention_backend", "sampling_backend")} == {"fp8_grpo"}
    assert arguments["kv_cache_dtype"] == "fp8_e4m3"
    assert arguments["context_length"] == 258
    # A token has K and V of two layers of two heads of 128 bytes.
    assert arguments["max_total_tokens"] == (1 << 29) // 1024
    assert "enable_deterministic_inference" not in arguments
    plain = engine_arguments(ARCH, BF16, SglangConfig(graphs=False), LAUNCH)
    assert plain["kv_cache_dtype"] == "bf16"
    assert plain["disable_cuda_graph"]
    assert plain["max_total_tokens"] is None


def test_deterministic_inference_has_sglangs_own_sampler():
    arguments = engine_arguments(ARCH, FP8, SglangConfig(batch_invariant=True), LAUNCH)
    assert arguments["enable_deterministic_inference"]
    assert not {"sampling_backend", "enable_custom_logit_processor"} & arguments.keys()


def test_the_aligned_model_has_its_own_attention_sampler_and_class():
    arguments = engine_arguments(ARCH, POINTS, ALIGNED, LAUNCH)
    assert {arguments[name] for name in ("attention_backend", "sampling_backend")} == {"fp8_grpo_aligned"}
    assert arguments["quantization"] == "fp8_grpo"
    config = model_config(ARCH, POINTS, ALIGNED)
    assert config["architectures"] == ["AlignedQwen3ForCausalLM"]
    assert decoder_of(SimpleNamespace(**json.loads(json.dumps(config)))) == ARCH
    assert "fp8_grpo_decoder" not in model_config(ARCH, POINTS, STOCK)


def test_the_aligned_model_refuses_what_it_does_not_compute():
    assert not [*contract_refusals(POINTS, ALIGNED, BUILD), *model_refusals(ARCH, POINTS, ALIGNED)]
    _refused(contract_refusals(FP8, ALIGNED, BUILD), "precision.rounding_points=stepwise, it must be kernels")
    pages = ALIGNED.model_copy(update={"page_size": 8})
    _refused(contract_refusals(POINTS, pages, BUILD), "rollout.sglang.page_size=8, it must be a multiple of 16")
    invariant = ALIGNED.model_copy(update={"batch_invariant": True})
    _refused(contract_refusals(POINTS, invariant, BUILD), "rollout.sglang.batch_invariant=True, it must be False")
    _refused(model_refusals(replace(ARCH, vocab_size=202), POINTS, ALIGNED), "a vocabulary of 202")


def test_log_probs_of_the_aligned_model_are_promised_to_be_equal():
    settings = {"rollout.engine": "sglang", "precision.rounding_points": "kernels", "rollout.sglang.page_size": 16}
    contracts = {}
    for model in ("stock", "aligned"):
        config = load_config("h200-small", {**settings, "rollout.sglang.model": model})
        contracts[model] = contract_of(config)[0]
    assert contracts == {"stock": "matched", "aligned": "aligned"}


def test_the_cache_has_whole_pages():
    sized = SglangConfig(kv_cache_gib=1e-5, page_size=4)
    assert cache_tokens(ARCH, FP8, sized) == 8
    assert cache_tokens(ARCH, BF16, sized) == 4


def test_the_model_says_what_is_quantised_and_how():
    contract = FP8.model_copy(update={"scale_rule": "fp32", "bf16_first_layers": 1})
    config = model_config(ARCH, contract, STOCK)
    section = config["quantization_config"]
    assert section["quant_method"] == "fp8_grpo"
    assert (section["scale_rule"], section["head"]) == ("fp32", "fp32")
    kept = section["modules_to_not_convert"]
    assert "model.layers.0.mlp.gate_proj" in kept
    assert not [name for name in kept if name.startswith("model.layers.1.")]
    assert config["max_position_embeddings"] == 258


def _described(**changes):
    linear = {"kernel": "BlockFp8Linear", "dtype": "float8_e4m3fn"}
    layer = {"implementation": "ScaledAttention", "version": 3, "cache": "float8_e4m3fn", "products": "fp8"}
    linears = {f"model.layers.{i}.mlp.down_proj": linear for i in range(2)}
    return {"linears": linears, "attention": [layer, layer], "head": "float32", "activations": "fp32"} | changes


def test_a_report_is_checked_against_the_contract():
    points = {"rounding_points": "kernels of SGLang"}
    check_formats(described_formats(_described(), FP8, 2) | points, FP8)
    stock = [_described()["attention"][0] | {"implementation": "FlashAttentionBackend"}] * 2
    for change, complaint in (
        ({"activations": "pow2"}, "scale_rule=pow2"),
        ({"head": "bfloat16"}, "head=bf16"),
        ({"attention": stock}, "attention=float8_e4m3fn by FlashAttentionBackend 3"),
        (
            {
                "linears": {
                    f"model.layers.{i}.x_proj": {"kernel": "Fp8LinearMethod", "dtype": "float8_e4m3fn"}
                    for i in range(2)
                }
            },
            "linears in float8_e4m3fn by Fp8LinearMethod",
        ),
    ):
        with pytest.raises(SyncError, match=complaint):
            check_formats(described_formats(_described(**change), FP8, 2) | points, FP8)


class _Reporting(SglangEngine):
    """An engine without SGLang, whose worker reports these kernels of one type of linear, by layer."""

    def __init__(self, *kernels):
        ResidentEngine.__init__(self, ARCH, FP8, longest=256, sleeps=False, routes=False)
        linears = {f"model.layers.{i}.mlp.down_proj": {"kernel": k, "dtype": "bfloat16"} for i, k in enumerate(kernels)}
        self._answers = {"describe": _described(linears=linears, model="Qwen3ForCausalLM"), "scales": []}
        self._build, self._resolved = BUILD, {"graphs": False}

    def ask_policies(self, method, *arguments):
        return [self._answers[method]]


def test_every_kernel_of_a_type_of_linear_is_reported():
    """Of layers that are kept in BF16, too, wherever they lie."""
    kernels = _Reporting("UnquantizedLinearMethod", "BlockFp8Linear", "UnquantizedLinearMethod").describe()["kernels"]
    assert kernels == {"down_proj": "UnquantizedLinearMethod+BlockFp8Linear"}


@pytest.mark.parametrize(
    ("experts", "found"),
    [
        ({"kernel": "BlockFp8Experts", "dtype": "float8_e4m3fn"}, "fp8_block"),
        ({"kernel": "UnquantizedFusedMoEMethod by triton", "dtype": "bfloat16"}, "fp8_block+bf16"),
        (
            {"kernel": "UnquantizedFusedMoEMethod by deep_gemm", "dtype": "bfloat16"},
            "fp8_block+bfloat16 by UnquantizedFusedMoEMethod by deep_gemm",
        ),
    ],
)
def test_experts_count_among_the_linears_of_their_layer(experts, found):
    linears = _described()["linears"]
    described = _described(linears=linears | {"model.layers.1.mlp.experts": experts})
    assert described_formats(described, FP8, 2)["linear"] == ["fp8_block", found]


class _Method:
    """As `BlockFp8Experts`, without SGLang."""

    def __init__(self, first, second):
        self._first, self._second = (Quantisers(RECIPES[name].activations) for name in (first, second))

    def quantisers(self, device):
        return SimpleNamespace(inputs=self._first.inputs, activated=self._second.activated)


@pytest.mark.parametrize(
    ("names", "found"),
    [(("pow2", "pow2"), "pow2"), (("fp32_activations", "fp32"), "fp32"), (("pow2", "fp32"), "fp32+pow2")],
)
def test_the_rule_of_experts_is_found_from_what_both_their_inputs_became(names, found):
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 256, 256).to(torch.float8_e4m3fn), requires_grad=False)
    experts.w2_weight = nn.Parameter(torch.zeros(2, 256, 128).to(torch.float8_e4m3fn), requires_grad=False)
    experts.quant_method = _Method(*names)
    model = nn.ModuleDict({"experts": experts})
    assert internals.describe_scale_rule(model) == found
    assert internals.describe_linears(model) == {"experts": {"kernel": "_Method", "dtype": "float8_e4m3fn"}}


def test_a_request_has_its_own_answer(tmp_path):
    engine, worker = Mailbox(str(tmp_path)), Mailbox(str(tmp_path))
    engine.ask("write", (3, {"a": b"bytes"}))
    assert worker.asked() == ("write", (3, {"a": b"bytes"}))
    worker.put([1.5], None)
    assert engine.answered() == [1.5]
    engine.ask("describe", ())
    with pytest.raises(FileNotFoundError):
        engine.answered()
    worker.put(None, "Traceback: broken")
    with pytest.raises(WorkerError, match="broken"):
        engine.answered()


def test_a_host_that_cannot_start_is_lost_and_leaves_nothing(monkeypatch):
    """Here no SGLang is installed: its host ends when it imports it."""
    for name, value in required_environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineLost, match="SGLang's host ended"):
        SglangEngine(ARCH, FP8, SglangConfig(), 16, BUILD)
