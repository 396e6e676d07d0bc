"""Memory of devices, needs of engines and of phases of a training, and sizes of weights by their shapes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from fp8core.config.capability import Node
from fp8core.config.precision import CacheFormat, LinearFormat, PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.families import parameter_shapes
from fp8core.models.weights import StoredNames, is_linear, rollout_formats
from fp8core.numerics.recipe import TILE

_MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """A place of tensors; `memory` is bytes, `platform` as `config.capability.this_platform` names it."""

    name: str
    memory: int
    platform: str = "cpu"


# As nvidia-smi prints their memory.
GPUS = {
    "h100": Device("NVIDIA H100 80 GB", 81_559 * _MIB, "sm_90"),
    "h200": Device("NVIDIA H200", 143_771 * _MIB, "sm_90"),
}


@dataclass(frozen=True)
class Machine:
    """`gpu`: each of its GPUs. `host`: its own memory; None where that is not known, and nothing is refused by it."""

    gpu: Device | None
    host: Device | None


def named_gpu(name: str) -> Device:
    if name not in GPUS:
        raise UserError(f"--gpu {name}: unknown; known: {', '.join(GPUS)}")
    return GPUS[name]


def machine_of(node: Node) -> Machine:
    gpu = None if node.gpu is None else Device(*node.gpu, node.platform)
    return Machine(gpu, Device("host", node.memory))


GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """A line of a plan; `note` is its content, or that it is an estimate."""

    item: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Phase:
    """Needs at the same time. `limit`: bytes, None where unknown. `advice`: what to change where they are more."""

    name: str
    needs: tuple[Need, ...]
    limit: int | None
    advice: str

    @property
    def total(self) -> int:
        return sum(need.bytes for need in self.needs)

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit

    @property
    def free_share(self) -> float:
        """Share of the limit that nothing takes; 1 where there is no limit."""
        return 1.0 if self.limit is None else 1 - self.total / self.limit


@dataclass(frozen=True)
class DevicePlan:
    """The phases of one device, or of each of `count` equal ones."""

    device: Device | None
    count: int
    phases: tuple[Phase, ...]

    @property
    def name(self) -> str:
        if self.device is None:
            return "host"
        return self.device.name if self.count == 1 else f"each of {self.count} {self.device.name}"

    def refusals(self) -> Iterator[str]:
        for phase in self.phases:
            if phase.limit is not None and not phase.fits:
                largest = sorted(phase.needs, key=lambda need: -need.bytes)[:3]
                needs = ", ".join(f"{need.item} {gib(need.bytes)}" for need in largest)
                need = f"{phase.name} on {self.name} needs {gib(phase.total)} GiB ({needs})"
                yield f"{need}, there are {gib(phase.limit)}; {phase.advice}"


def gib(size: int) -> str:
    return f"{size / GIB:,.1f}" if size >= GIB / 10 or size == 0 else f"{size / GIB:.2g}"


Shapes = Mapping[str, tuple[int, ...]]
Part = list[tuple[Shapes, int]]
"""Parameters of one GPU before they are cut, by the number of GPUs they are cut over."""

FP32_BYTES = 4
BF16_BYTES = 2
_WIDTH: dict[LinearFormat, int] = {"fp8_block": 1, "bf16": BF16_BYTES, "fp32": FP32_BYTES}
_SCALE_BYTES = 4
_FP64 = 8
_EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROUTER = ".mlp.gate.weight"
EMULATED = "FP64 beside FP32, ready for exact products"


@dataclass(frozen=True)
class StoredBytes:
    codes: int
    scales: int
    kept: int

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.kept


def stored_bytes(shapes: Shapes, formats: StoredNames) -> StoredBytes:
    """The bytes that `models.weights.stored_weights` makes of parameters of these shapes."""
    codes = scales = kept = 0
    for name, shape in shapes.items():
        form = formats.of(name)
        size = math.prod(shape)
        if form == "fp8_block":
            codes += size
            scales += _SCALE_BYTES * math.prod(math.ceil(side / TILE) for side in shape)
        else:
            kept += size * _WIDTH[form]
    return StoredBytes(codes, scales, kept)


@dataclass(frozen=True)
class ParameterCounts:
    """All parameters, those of linears of layers and of the head, and those that multiply one token (`active`)."""

    total: int
    linear: int
    head: int
    active: int


@cache
def count_parameters(arch: Architecture) -> ParameterCounts:
    shapes = parameter_shapes(arch)
    total = count(shapes)
    experts = count({name: shape for name, shape in shapes.items() if is_expert(name)})
    idle = 0 if arch.experts is None else experts - experts * arch.experts.per_token // arch.experts.count
    return ParameterCounts(
        total=total,
        linear=count({name: shape for name, shape in shapes.items() if is_linear(name)}),
        head=math.prod(shapes[_EMBEDDING if arch.tie_embeddings else HEAD]),
        active=total - idle,
    )


def count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def memory_of(part: Part) -> int:
    return sum(math.ceil(count(shapes) / parts) for shapes, parts in part)


def is_expert(name: str) -> bool:
    return ".experts." in name


_CACHE_WIDTH: dict[CacheFormat, int] = {"fp8": 1, "bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class CacheRoom:
    """The KV cache of each of `engines`: `sequences` of `sequence` tokens fit, `wanted` would be decoded together."""

    bytes: int
    bytes_per_token: int
    tokens: int
    sequence: int
    sequences: int
    wanted: int
    engines: int

    @property
    def need(self) -> Need:
        return Need("KV cache", self.bytes, f"{self.bytes_per_token:,} bytes a token")


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one engine on a GPU or the host.

    Attributes:
        needs: while it generates.
        asleep: while a training has the GPU; None for an engine that keeps everything.
        limit: bytes of the GPU that it may take; None where nothing bounds it.
        cache: None where that grows as it generates.
        refusal: why it would not start with this cache.
    """

    needs: tuple[Need, ...]
    asleep: tuple[Need, ...] | None = None
    limit: int | None = None
    advice: str = ""
    cache: CacheRoom | None = None
    refusal: str | None = None


def shipped_bytes(arch: Architecture, contract: PrecisionContract) -> StoredBytes:
    """The bytes that one sync sends, which the engine then holds."""
    return stored_bytes(parameter_shapes(arch), rollout_formats(contract, arch.num_layers).stored_names())


def cache_bytes_per_token(arch: Architecture, form: CacheFormat) -> int:
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * _CACHE_WIDTH[form]


def engine_weights(config: RunConfig, arch: Architecture, parts: int = 1) -> Need:
    note = "as they are sent" if parts == 1 else f"as they are sent, 1 of {parts} parts"
    return Need("engine weights", math.ceil(shipped_bytes(arch, config.precision).total / parts), note)


def emulated_bytes(arch: Architecture) -> int:
    """Weights as the exact emulation holds them: all in FP32, and those of linears and head in FP64 too."""
    counts = count_parameters(arch)
    return counts.total * FP32_BYTES + (counts.linear + counts.head) * _FP64
