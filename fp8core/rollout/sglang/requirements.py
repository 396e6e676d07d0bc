"""The installed SGLang, and what it cannot do of a configuration: found before SGLang is imported.

This engine uses parts of SGLang that it does not promise to keep (`internals`), so one version is supported.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Final

from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.weights import rollout_formats
from fp8core.numerics.gemm import OUTPUT_MULTIPLE
from fp8core.numerics.recipe import TILE
from fp8core.rollout.aligned import contract_refusals as aligned_refusals
from fp8core.rollout.aligned import shape_refusals
from fp8core.rollout.resident import attention_refusals

SUPPORTED: Final = "0.5.15"
_HOPPER = "sm_90"
# FlashAttention 3 reads FP8 for these.
_HEAD_DIMS = (64, 128, 256)
_ALIGNED = "rollout.sglang.model=aligned"
# SGLang has greedy requests at temperature 0 alone; what is lower divides by nearly nothing.
_LOWEST_TEMPERATURE = 1e-4
# BF16 values that SGLang's SwiGLU reads at once.
_ACTIVATION_WIDTH = 8
# Tokens that a page of the aligned model's attention is a multiple of.
_PAGE = 16


@dataclass(frozen=True)
class SglangBuild:
    """An installed SGLang, by the version of its package."""

    version: str

    @property
    def described(self) -> str:
        return f"sglang {self.version}"


def find_build(platform: str, version_of: Callable[[str], str] = installed_version) -> SglangBuild:
    """The SGLang of this environment; `version_of`: PackageNotFoundError where a distribution is not installed.

    Raises UserError: no SGLang is installed, one that this engine does not support, or on other than a Hopper GPU.
    """
    try:
        version = version_of("sglang")
    except PackageNotFoundError:
        raise UserError(
            "rollout.engine=sglang: SGLang is not installed; "
            "pip install 'fp8-grpo[sglang]' on Hopper, in an environment of its own"
        ) from None
    if version != SUPPORTED:
        raise UserError(
            f"rollout.engine=sglang: sglang {version} is installed, this engine supports sglang {SUPPORTED}"
        )
    if platform != _HOPPER:
        where = "a machine without a GPU" if platform == "cpu" else platform
        raise UserError(
            f"rollout.engine=sglang: sglang {version} on {where}: this engine supports it on {_HOPPER} (Hopper)"
        )
    return SglangBuild(version)


def contract_refusals(contract: PrecisionContract, options: SglangConfig, build: SglangBuild) -> Iterator[str]:
    rollout = contract.rollout
    if options.model == "aligned":
        size = options.page_size
        fitting = size if size % _PAGE == 0 else f"a multiple of {_PAGE}"
        rest = {
            "rollout.sglang.batch_invariant": (options.batch_invariant, False, "none of its operations see the batch"),
            "rollout.sglang.page_size": (size, fitting, "its attention reads parts of pages"),
        }
        yield from aligned_refusals(_ALIGNED, contract, rest)
        return
    yield from attention_refusals(contract, build.described)
    if rollout.linear == "fp32":
        yield f"precision.rollout.linear=fp32: {build.described} computes in BF16 or FP8; set it to bf16 or fp8_block"
    if contract.rounding_points != "stepwise":
        yield (
            f"precision.rounding_points={contract.rounding_points}: {build.described} has kernels of its own for "
            "norms, rotary positions and SwiGLU, which round where no points of the contract do; set it to stepwise"
        )


def temperature_refusals(temperature: float) -> Iterator[str]:
    """A temperature that SGLang would divide by."""
    if 0 < temperature < _LOWEST_TEMPERATURE:
        yield f"rollout.temperature={temperature}: SGLang samples at {_LOWEST_TEMPERATURE} or above"


def model_refusals(arch: Architecture, contract: PrecisionContract, options: SglangConfig) -> Iterator[str]:
    if options.model == "aligned":
        yield from shape_refusals(_ALIGNED, arch)
    if arch.experts is not None:
        yield from expert_refusals(arch)
    if arch.hidden_size % OUTPUT_MULTIPLE:
        yield (
            f"rollout.engine=sglang: a hidden size of {arch.hidden_size}, which is no multiple of "
            f"{OUTPUT_MULTIPLE}; set rollout.engine to embedded"
        )
    if contract.rollout.kv_cache == "fp8" and arch.head_dim not in _HEAD_DIMS:
        yield (
            f"precision.rollout.kv_cache=fp8: head_dim {arch.head_dim}; FlashAttention 3 reads FP8 for "
            f"{', '.join(map(str, _HEAD_DIMS))}; set it to bf16"
        )
    formats = rollout_formats(contract, arch.num_layers).stored_names()
    for name, shape in parameter_shapes(arch).items():
        if formats.of(name) == "fp8_block" and any(size % TILE for size in shape):
            yield (
                f"precision.rollout.linear=fp8_block: {name} is {list(shape)}; SGLang fuses linears, and experts, so "
                f"both sides of each must be multiples of {TILE}; set it to bf16, or rollout.engine to embedded"
            )
            return


def expert_refusals(arch: Architecture) -> Iterator[str]:
    """Models with experts that SGLang's class of them (`models/qwen3_moe.py`) does not make."""
    assert arch.experts is not None
    if dense := sorted(set(range(arch.num_layers)) - set(arch.sparse_layers)):
        yield (
            f"rollout.engine=sglang: layer {dense[0]} has no experts, and SGLang {SUPPORTED} gives some to every layer "
            "of such a model; set rollout.engine to vllm"
        )
    if arch.tie_embeddings:
        yield (
            f"rollout.engine=sglang: embedding and head are one weight, and SGLang {SUPPORTED} has a head of its own "
            "in a model with experts; set rollout.engine to vllm"
        )
    if arch.experts.intermediate_size % _ACTIVATION_WIDTH:
        yield (
            f"rollout.engine=sglang: experts of width {arch.experts.intermediate_size}; SGLang's SwiGLU takes "
            f"multiples of {_ACTIVATION_WIDTH}; set rollout.engine to vllm"
        )
