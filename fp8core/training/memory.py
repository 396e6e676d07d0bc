"""Memory of a trainer: what those on GPUs have in common, and that of one that computes on the host."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.families import parameter_shapes
from fp8core.models.weights import fused_linear, is_linear, layer_of
from fp8core.resources.memory import (
    BF16_BYTES,
    EMULATED,
    FP32_BYTES,
    ROUTER,
    Need,
    Part,
    Shapes,
    StoredBytes,
    count,
    count_parameters,
    emulated_bytes,
    is_expert,
)
from fp8core.rollout.registry import engine_entry
from fp8core.training.lora import adapter_shapes
from fp8core.training.optimisers.optimiser import find_optimiser, moment_elements

# CUDA context, GEMM workspaces, communication buffers, a chunk of logits. An estimate.
WORKSPACE = 2_000_000_000
# CUDA context, communication. An estimate.
AT_REST = 2_000_000_000
MomentFormat = Literal["fp32", "bf16"]
MASTER_WEIGHTS = "master weights"
MOMENTS = "optimiser states"
"""The items that stay between steps and are in a checkpoint."""


@dataclass(frozen=True)
class TrainerMemory:
    """The memory that a trainer holds on one of its GPUs.

    Attributes:
        exported: what an update of the engine adds.
        scoring: stays of a trainer that never learns.
        at_rest: bytes that stay beside the state while the trainer does not compute.
        advice: settings whose change lowers the memory of an update."""

    state: Callable[[RunConfig, Architecture, "Parallel"], tuple[Need, ...]]
    step: Callable[[RunConfig, Architecture, "Parallel"], tuple[Need, ...]]
    exported: Callable[[RunConfig, Architecture, "Parallel", StoredBytes], tuple[Need, ...]]
    scoring: Callable[[RunConfig, Architecture, "Parallel"], tuple[Need, ...]]
    at_rest: int
    advice: str


@dataclass(frozen=True)
class Parallel:
    """The spread of training over GPUs: the rest is data parallel. Experts have a grid of their own. `context`: those
    that share each pack."""

    gpus: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1


def state_of(config: RunConfig, arch: Architecture, own: int, form: MomentFormat) -> tuple[Need, Need]:
    """`own`: parameters of one GPU."""
    return Need(MASTER_WEIGHTS, own * FP32_BYTES, "FP32"), _moments(config, parameter_shapes(arch), own, form)


def _moments(config: RunConfig, shapes: Shapes, own: int, form: MomentFormat, of: str = "") -> Need:
    settings = config.training.optimiser
    elements = math.ceil(moment_elements(settings, shapes) * own / count(shapes))
    width = {"fp32": FP32_BYTES, "bf16": BF16_BYTES}[form]
    return Need(MOMENTS, elements * width, f"{find_optimiser(settings).name}, {form.upper()}{of}")


def adapted_state(config: RunConfig, arch: Architecture, gpus: int, form: MomentFormat) -> tuple[Need, ...]:
    """Where adapters learn, each GPU has all of them."""
    lora = config.training.lora
    shapes = parameter_shapes(arch)
    assert lora is not None, "the caller asked"
    trainable = adapter_shapes(shapes, lora)
    return (
        Need("frozen weights", math.ceil(count(shapes) * BF16_BYTES / gpus), "BF16"),
        Need(MASTER_WEIGHTS, count(trainable) * FP32_BYTES, "FP32, of adapters"),
        _moments(config, trainable, count(trainable), form, ", of adapters"),
    )


def gradients(config: RunConfig, arch: Architecture, note: str) -> Need:
    """Gradients of all weights, or of adapters and of the widest linear, whose gradient goes on to them."""
    lora = config.training.lora
    shapes = parameter_shapes(arch)
    if lora is None:
        return Need("gradients", count(shapes) * FP32_BYTES, note)
    bytes_by_stack: dict[tuple[int | None, str], int] = {}
    for name, shape in shapes.items():
        if is_linear(name):
            key = layer_of(name), fused_linear(name)
            bytes_by_stack[key] = bytes_by_stack.get(key, 0) + math.prod(shape)
    elements = max(bytes_by_stack.values()) + count(adapter_shapes(shapes, lora))
    return Need("gradients", elements * FP32_BYTES, "FP32, of adapters and of one linear at a time")


def exported(config: RunConfig, sync: StoredBytes, made_from: Need) -> tuple[Need, ...]:
    """The policy in the engine's formats, and beside an engine that is awake what it is made from."""
    shipment = Need("weights to send", sync.total, "the whole policy in the engine's formats")
    return (shipment,) if engine_entry(config).sleeps(config) else (shipment, made_from)


def exported_in_one_piece(config: RunConfig, _: Architecture, __: Parallel, sync: StoredBytes) -> tuple[Need, ...]:
    return exported(config, sync, Need("what they are made from", sync.total, "the same, not yet in one piece"))


def cut_parameters(arch: Architecture, parallel: Parallel) -> Part:
    """Parameters of one GPU, with the number of GPUs that each kind is cut over."""
    kinds: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in parameter_shapes(arch).items():
        # Norms and routers are whole on every GPU of a tensor-parallel group; a bias is cut as its linear is.
        whole = (len(shape) == 1 and not name.endswith(".bias")) or name.endswith(ROUTER)
        parts = parallel.expert if is_expert(name) else 1 if whole else parallel.tensor
        kinds.setdefault(parts, {})[name] = shape
    return [(kind, parts) for parts, kind in kinds.items()]


def host_state(config: RunConfig, arch: Architecture) -> tuple[Need, ...]:
    """Masters and optimiser states of a trainer that computes on the host; its checkpoints hold them."""
    if config.training.lora is not None:
        return adapted_state(config, arch, 1, "fp32")
    return state_of(config, arch, count_parameters(arch).total, "fp32")


def host_needs(config: RunConfig, arch: Architecture) -> tuple[Need, ...]:
    """The memory of `training.exact` on a CPU; activations come on top."""
    return (*host_state(config, arch), gradients(config, arch, "FP32"), Need("weights", emulated_bytes(arch), EMULATED))
