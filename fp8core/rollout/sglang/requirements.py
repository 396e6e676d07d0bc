"""The SGLang that is supported, and what it cannot do of a configuration: found before SGLang is imported."""

from collections.abc import Iterator
from importlib.metadata import version as installed_version

from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.numerics.gemm import OUTPUT_MULTIPLE
from fp8core.rollout.requirements import (
    EngineBuild,
    VersionOf,
    aligned_refusals,
    aligned_shape_refusals,
    find_release,
    stock_refusals,
    tile_refusals,
)

# This engine uses parts of SGLang that it does not promise to keep (`internals`).
_RELEASES = {"sglang": "0.5.15"}
# FlashAttention 3 reads FP8 for these.
_HEAD_DIMS = (64, 128, 256)
_ALIGNED = "rollout.sglang.model=aligned"
# SGLang has greedy requests at temperature 0 alone; what is lower divides by nearly nothing.
LOWEST_TEMPERATURE = 1e-4
# Tokens that a page of the aligned model's attention is a multiple of.
_PAGE = 16


def find_build(platform: str, version_of: VersionOf = installed_version) -> EngineBuild:
    install = "pip install 'fp8-grpo[sglang]' on Hopper, in an environment of its own"
    return find_release("sglang", platform, _RELEASES, install, version_of)


def contract_refusals(contract: PrecisionContract, options: SglangConfig, build: EngineBuild) -> Iterator[str]:
    if options.model == "aligned":
        size = options.page_size
        fitting = size if size % _PAGE == 0 else f"a multiple of {_PAGE}"
        pages = (size, fitting, "its attention reads parts of pages")
        yield from aligned_refusals(_ALIGNED, contract, {"rollout.sglang.page_size": pages})
        return
    yield from stock_refusals(contract, build)
    if contract.rounding_points != "stepwise":
        yield (
            f"precision.rounding_points={contract.rounding_points}: {build.described} has kernels of its own for "
            "norms, rotary positions and SwiGLU, which round where no points of the contract do; set it to stepwise"
        )


def model_refusals(arch: Architecture, contract: PrecisionContract, options: SglangConfig) -> Iterator[str]:
    if arch.experts is not None:
        yield "rollout.engine=sglang: the model has experts; set rollout.engine to vllm"
    if options.model == "aligned":
        yield from aligned_shape_refusals(_ALIGNED, arch)
    elif arch.hidden_size % OUTPUT_MULTIPLE:
        yield (
            f"rollout.engine=sglang: a hidden size of {arch.hidden_size}, which is no multiple of "
            f"{OUTPUT_MULTIPLE}; set rollout.engine to embedded"
        )
    if contract.rollout.kv_cache == "fp8" and arch.head_dim not in _HEAD_DIMS:
        yield (
            f"precision.rollout.kv_cache=fp8: head_dim {arch.head_dim}; FlashAttention 3 reads FP8 for "
            f"{', '.join(map(str, _HEAD_DIMS))}; set it to bf16"
        )
    yield from tile_refusals(arch, contract, "rollout.engine to vllm")
