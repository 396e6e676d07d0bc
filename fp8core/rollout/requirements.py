"""Requirements of vLLM and SGLang, checked before either is imported: release, formats, shapes, memory."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from fp8core.config.engines import SglangConfig, VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.families import family_of, parameter_shapes
from fp8core.models.weights import rollout_formats
from fp8core.numerics.attention import HEAD_DIMS, LARGEST_GROUP, decode_kernel_takes
from fp8core.numerics.gemm import OUTPUT_MULTIPLE
from fp8core.numerics.recipe import TILE
from fp8core.resources.memory import GIB, CacheRoom, Device, EngineMemory, Need, cache_bytes_per_token, engine_weights
from fp8core.rollout.aligned import POINTS
from fp8core.rollout.registry import longest_sequence

VersionOf = Callable[[str], str]
_HOPPER = "sm_90"
# Logits of a row that begins on 16 bytes, as TMA stores it; `log_softmax` sums another way from elsewhere.
_ALIGNED_ROW = 4
# Memory that a sleeping engine leaves on its GPU: CUDA context, graphs, workspaces. An estimate.
_ASLEEP = 2_000_000_000


@dataclass(frozen=True)
class EngineBuild:
    distribution: str
    version: str
    on_gpu: bool = True

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version}" + ("" if self.on_gpu else " on a CPU")


def find_release(
    engine: str, platform: str, releases: Mapping[str, str], install: str, version_of: VersionOf = installed_version
) -> EngineBuild:
    """`releases`: the one that we are written for, by distribution; a name with `-cpu` needs no GPU.

    Raises UserError: none is installed, another release, or one that does not run on this platform.
    """
    for name, release in releases.items():
        try:
            version = version_of(name)
        except PackageNotFoundError:
            continue
        parts = release.split(".")
        if version.split(".")[: len(parts)] != parts:
            raise UserError(f"rollout.engine={engine}: {name} {version} is installed, {name} {release} is supported")
        on_gpu = not name.endswith("-cpu")
        if on_gpu and platform != _HOPPER:
            where = "a machine without a GPU" if platform == "cpu" else platform
            raise UserError(f"rollout.engine={engine}: {name} {version} on {where}: it needs {_HOPPER} (Hopper)")
        return EngineBuild(name, version, on_gpu)
    raise UserError(f"rollout.engine={engine}: it is not installed; {install}")


def stock_refusals(contract: PrecisionContract, build: EngineBuild) -> Iterator[str]:
    """Formats that no kernel of an engine's own has."""
    if build.on_gpu and contract.attention_of(contract.rollout) == "fp16_over_fp8_cache":
        yield (
            f"precision.attention=fp16_over_fp8_cache: {build.label} multiplies E4M3 Q and P over an FP8 cache; "
            "set precision.attention=fp8, or take the aligned model"
        )
    if contract.rollout.linear == "fp32":
        yield f"precision.rollout.linear=fp32: {build.label} computes in BF16 or FP8; set it to bf16 or fp8_block"


def aligned_refusals(place: str, contract: PrecisionContract) -> Iterator[str]:
    """`place`: the setting that chose the model."""
    rollout = contract.rollout
    requirements = {
        "precision.rounding_points": (contract.rounding_points, POINTS, "its operations round there"),
        "precision.rollout.linear": (rollout.linear, "fp8_block", "its linears multiply codes"),
        "precision.rollout.kv_cache": (rollout.kv_cache, "fp8", "its attention reads an FP8 cache"),
        "precision.rollout.head": (rollout.head, "fp32", "its logits are FP32"),
    }
    for setting, (value, needs, reason) in requirements.items():
        if value != needs:
            yield f"{place}: {setting}={value}, it must be {needs}: {reason}"


def aligned_shape_refusals(place: str, arch: Architecture) -> Iterator[str]:
    group = arch.num_heads // arch.num_kv_heads
    yield from family_of(arch).refusals("aligned", place)
    if not decode_kernel_takes(arch.head_dim, group):
        yield (
            f"{place}: head_dim {arch.head_dim} with {group} query heads per KV head; its attention "
            f"needs head_dim {' or '.join(map(str, HEAD_DIMS))} and at most {LARGEST_GROUP}; set it to stock"
        )
    for what, size, multiple in (
        ("hidden size", arch.hidden_size, OUTPUT_MULTIPLE),
        ("vocabulary", arch.vocab_size, _ALIGNED_ROW),
    ):
        if size % multiple:
            yield f"{place}: a {what} of {size}, which is no multiple of {multiple}; set it to stock"


def tile_refusals(arch: Architecture, contract: PrecisionContract, cure: str) -> Iterator[str]:
    """`cure`: another setting, and its value."""
    formats = rollout_formats(contract, arch.num_layers).stored_names()
    for name, shape in parameter_shapes(arch).items():
        if formats.of(name) == "fp8_block" and any(size % TILE for size in shape):
            yield (
                f"precision.rollout.linear=fp8_block: {name} is {list(shape)}, and both sides must be multiples of "
                f"{TILE}; set it to bf16, or {cure}"
            )
            return


def resident_memory(
    config: RunConfig,
    arch: Architecture,
    gpu: Device | None,
    options: VllmConfig | SglangConfig,
    *,
    share: tuple[str, float],
    longest: tuple[str, int],
    workspace: int,
    workspace_in_share: bool,
    gpus: int = 1,
) -> EngineMemory:
    """The memory of an engine on one of its `gpus`.

    `share`: the setting of its share of the GPU, for a cache without a size of its own. `longest`: the setting of the
    longest sequence, for which the cache needs room.
    """
    weights = engine_weights(config, arch, gpus)
    if gpu is None:
        return EngineMemory((weights,))
    limit = int(gpu.memory * share[1])
    setting = share[0]
    if options.kv_cache_gib is not None:
        limit = gpu.memory
        setting = f"{setting.rpartition('.')[0]}.kv_cache_gib"
    if not workspace_in_share:
        limit = min(gpu.memory, limit + workspace)
    rest = limit - weights.bytes - workspace
    cache = _cache(
        config, arch, max(0, rest) if options.kv_cache_gib is None else int(options.kv_cache_gib * GIB), gpus
    )
    refusal = None
    if cache.tokens < longest[1]:
        refusal = (
            f"the KV cache has room for {cache.tokens:,} tokens, {longest[0]} is {longest[1]:,}; raise {setting}, or "
            f"lower {longest[0].rpartition('.')[2]}"
        )
    asleep = (Need("engine asleep", _ASLEEP, "CUDA context, graphs; estimate"),) if options.sleep else None
    # A cache fills the engine's share of the GPU, unless the weights alone do not fit in it.
    advice = f"{'raise' if options.kv_cache_gib is None and rest < 0 else 'lower'} {setting}"
    needs = weights, Need("engine workspace", workspace, "CUDA context, activations, graphs; estimate"), cache.need
    return EngineMemory(needs, asleep, limit, advice, cache, refusal)


def _cache(config: RunConfig, arch: Architecture, size: int, gpus: int) -> CacheRoom:
    engines = config.cluster.engines
    rollout = config.rollout
    sequence = longest_sequence(config, arch)
    per_token = cache_bytes_per_token(arch, config.precision.rollout.kv_cache) // gpus
    tokens = size // per_token
    sequences = min(math.ceil(rollout.drawn_prompts / engines) * rollout.group_size, rollout.max_batch)
    return CacheRoom(size, per_token, tokens, sequence, tokens // sequence, sequences, engines)
