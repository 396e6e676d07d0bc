"""SGLang as a registered engine: its release, what it cannot do of a configuration, its environment and its memory."""

from collections.abc import Iterator
from importlib.metadata import version as installed_version

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture, padded_vocabulary
from fp8core.models.families import family_of
from fp8core.numerics.gemm import OUTPUT_MULTIPLE
from fp8core.numerics.rotary import YarnScaling
from fp8core.resources.kernels import Product, layer_products
from fp8core.resources.memory import Device, EngineMemory
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import EngineEntry, longest_refusals
from fp8core.rollout.requirements import (
    EngineBuild,
    VersionOf,
    aligned_refusals,
    aligned_shape_refusals,
    find_release,
    resident_memory,
    stock_refusals,
    tile_refusals,
)
from fp8core.rollout.sglang.settings import required_environment, suggested_environment

# CUDA context, activations, captured graphs.
_WORKSPACE = 5_000_000_000
_LONGEST = "rollout.sglang.context_length"
# This engine uses parts of SGLang that it does not promise to keep (`internals`).
_RELEASES = {"sglang": "0.5.17"}
# FlashAttention 3 reads FP8 for these.
_HEAD_DIMS = (64, 128, 256)
_ALIGNED = "rollout.sglang.model=aligned"
# Tokens that a page of the aligned model's attention is a multiple of.
_PAGE = 16


def find_build(platform: str, version_of: VersionOf = installed_version) -> EngineBuild:
    install = "pip install 'fp8-grpo[sglang]' on Hopper, in an environment of its own"
    return find_release("sglang", platform, _RELEASES, install, version_of)


def contract_refusals(contract: PrecisionContract, options: SglangConfig, build: EngineBuild) -> Iterator[str]:
    if options.model == "aligned":
        yield from aligned_refusals(_ALIGNED, contract)
        if options.page_size % _PAGE:
            yield f"{_ALIGNED}: rollout.sglang.page_size={options.page_size}, it must be a multiple of {_PAGE}"
        return
    yield from stock_refusals(contract, build)
    if contract.rounding_points != "stepwise":
        yield (
            f"precision.rounding_points={contract.rounding_points}: {build.label} has kernels of its own for "
            "norms, rotary positions and SwiGLU, which round where no points of the contract do; set it to stepwise"
        )


def model_refusals(arch: Architecture, contract: PrecisionContract, options: SglangConfig) -> Iterator[str]:
    if options.model == "aligned":
        yield from aligned_shape_refusals(_ALIGNED, arch)
        if arch.experts is not None:
            yield f"{_ALIGNED}: it computes no experts; set rollout.engine to vllm"
    else:
        yield from family_of(arch).refusals("sglang", "rollout.engine=sglang")
        if arch.hidden_size % OUTPUT_MULTIPLE:
            yield (
                f"rollout.engine=sglang: a hidden size of {arch.hidden_size}, which is no multiple of "
                f"{OUTPUT_MULTIPLE}; set rollout.engine to embedded"
            )
        if isinstance(rope := arch.rope_scaling, YarnScaling) and rope.attention_factor is not None:
            yield (
                f"rollout.engine=sglang: a YaRN attention factor of {rope.attention_factor}, which SGLang's own model "
                "does not read; set rollout.sglang.model to aligned"
            )
    if contract.rollout.kv_cache == "fp8" and arch.head_dim not in _HEAD_DIMS:
        yield (
            f"precision.rollout.kv_cache=fp8: head_dim {arch.head_dim}; FlashAttention 3 reads FP8 for "
            f"{', '.join(map(str, _HEAD_DIMS))}; set it to bf16"
        )
    yield from tile_refusals(arch, contract, "rollout.engine to vllm")


def _build(config: RunConfig, arch: Architecture) -> RolloutEngine:
    # SGLang is optional.
    from fp8core.rollout.sglang.engine import SglangEngine

    rollout = config.rollout
    return SglangEngine(arch, config.precision, rollout.sglang, rollout.max_batch, find_build(this_platform()))


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    yield from contract_refusals(config.precision, config.rollout.sglang, find_build(node.platform, node.version))


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    yield from longest_refusals(_LONGEST, config.rollout.sglang.context_length, arch)
    yield from model_refusals(arch, config.precision, config.rollout.sglang)


def _environment(config: RunConfig, node: Node) -> Environment:
    find_build(node.platform, node.version)
    return Environment(required_environment(), suggested_environment())


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    options = config.rollout.sglang
    return resident_memory(
        config,
        arch,
        gpu,
        options,
        share=("rollout.sglang.mem_fraction_static", options.mem_fraction_static),
        longest=(_LONGEST, options.context_length or arch.max_positions),
        workspace=_WORKSPACE,
        workspace_in_share=False,
    )


def _products(config: RunConfig, arch: Architecture) -> Iterator[Product]:
    rollout = config.rollout
    head = config.precision.rollout.head
    if config.precision.rollout.linear == "fp8_block":
        rows = range(1, max(rollout.sglang.chunked_prefill_size, rollout.max_batch) + 1)
        yield from layer_products(arch, rows)
    if head == "fp32":
        yield Product("bf16", padded_vocabulary(arch.vocab_size), arch.hidden_size, range(1, rollout.max_batch + 1))


ENGINE = EngineEntry(
    name="sglang",
    packages=("sglang",),
    build=_build,
    check=_check,
    check_model=_check_model,
    requirements=lambda: find_build(this_platform()).label,
    environment=_environment,
    memory=_memory,
    gpus=lambda config: config.cluster.engines,
    longest=lambda config: config.rollout.sglang.context_length,
    arithmetic=lambda config: "kernels" if config.rollout.sglang.model == "aligned" else "own",
    products=_products,
    continues=lambda config: "equal" if config.rollout.sglang.model == "aligned" else "anew",
    sleeps=lambda config: config.rollout.sglang.sleep,
    truncates=True,
    # Its own model rounds where no points of a contract do.
    stock={"rollout.sglang.model": "stock", "precision.rounding_points": "stepwise"},
)
