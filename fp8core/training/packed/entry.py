"""The packed trainer as a registered trainer: what it can compute, and its memory. Nothing is loaded."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.models.architecture import Architecture, with_whole_tiles
from fp8core.models.families import family_of, parameter_shapes
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics.attention import HEAD_DIMS, LARGEST_GROUP, decode_kernel_takes
from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.gemm import OUTPUT_MULTIPLE
from fp8core.numerics.grouped import GROUP_MULTIPLE, most_rows
from fp8core.numerics.logprobs import ChunkedHead
from fp8core.numerics.packed import packed_length
from fp8core.numerics.recipe import TILE
from fp8core.resources.kernels import Product, gradient_products, layer_products, weight_gradient_products
from fp8core.resources.memory import BF16_BYTES, FP32_BYTES, Need, count_parameters, stored_bytes
from fp8core.rl.objective import Objective
from fp8core.rollout.registry import engine_entry, longest_sequence
from fp8core.training.lora import adapter_refusals
from fp8core.training.memory import (
    MOMENTS,
    Parallel,
    TrainerMemory,
    adapted_state,
    exported_in_one_piece,
    gradients,
    state_of,
)
from fp8core.training.optimisers.optimiser import find_optimiser
from fp8core.training.packed.context import pack_multiple
from fp8core.training.packed.masters import largest_share, layer_stacks
from fp8core.training.ranks import ALONE, Ranks
from fp8core.training.registry import TrainerEntry

if TYPE_CHECKING:
    from fp8core.training.packed.trainer import PackedTrainer

_SETTING = "training.packed"
_POINTS = ("stepwise", "kernels")


def required_environment(training: TrainingConfig) -> dict[str, str]:
    """torch's deterministic mode refuses a product of cuBLAS without it."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if training.device == "cuda" and training.deterministic else {}


def contract_refusals(contract: PrecisionContract, device: str, platform: str) -> Iterator[str]:
    """A message for all that no kernel of this trainer computes on a `device`."""
    training = contract.training
    if device == "cuda" and platform == "cpu":
        yield "training.device=cuda: torch sees no GPU"
    if training.linear == "fp32":
        yield f"{_SETTING} with precision.training.linear=fp32: set it to bf16 or fp8_block"
    if training.backward_format != training.linear:
        yield (
            f"{_SETTING} with precision.training.backward={training.backward_format}: its backward has the format of "
            f"the forward ({training.linear}); set backward to null"
        )
    if contract.rounding_points not in _POINTS:
        yield (
            f"{_SETTING} with precision.rounding_points={contract.rounding_points}: its kernels have the points "
            f"`kernels`; set it to {' or '.join(_POINTS)}"
        )


def model_refusals(arch: Architecture, contract: PrecisionContract, device: str) -> Iterator[str]:
    yield from family_of(arch).refusals("packed", _SETTING)
    if device == "cpu":
        return
    if contract.training.linear == "fp8_block" and arch.hidden_size % OUTPUT_MULTIPLE:
        yield (
            f"{_SETTING} with precision.training.linear=fp8_block: the model's hidden size is {arch.hidden_size}; it "
            f"must be a multiple of {OUTPUT_MULTIPLE}; set linear to bf16, or training.device to cpu"
        )
    group = arch.num_heads // arch.num_kv_heads
    if contract.training.kv_cache == "fp8" and not decode_kernel_takes(arch.head_dim, group):
        yield (
            f"{_SETTING} with precision.training.kv_cache=fp8: the model has head_dim={arch.head_dim} and {group} "
            f"query heads a KV head; the kernel takes head_dim {' or '.join(map(str, HEAD_DIMS))} and at most "
            f"{LARGEST_GROUP}; set kv_cache to bf16, or training.device to cpu"
        )


def packs(config: RunConfig, arch: Architecture) -> range:
    """The numbers of tokens that a GPU can have of a pack; a sequence longer than a micro-batch is a pack alone."""
    if config.training.device != "cuda":
        return range(0)
    return range(TILE, _longest_pack(config, arch, 1) + 1, TILE)


def _longest_pack(config: RunConfig, arch: Architecture, ranks: int) -> int:
    """Tokens, where so many ranks share one."""
    longest = max(config.training.tokens_per_pass, packed_length(longest_sequence(config, arch)))
    return round_up(longest, pack_multiple(ranks))


def products(config: RunConfig, arch: Architecture) -> Iterator[Product]:
    tokens = packs(config, arch)
    if not tokens:
        return
    if config.precision.training.linear == "fp8_block":
        tile_arch = with_whole_tiles(arch)
        yield from layer_products(tile_arch, tokens)
        yield from gradient_products(tile_arch, tokens)
        yield from weight_gradient_products(tile_arch, tokens)
    chunk = max(1, ChunkedHead.chunk_elements // arch.vocab_size)
    yield Product("bf16", arch.vocab_size, arch.hidden_size, range(1, min(chunk, tokens[-1]) + 1))


# CUDA context, GEMM workspaces, and the larger of a chunk of logits with what is made of it and what attention's
# backward takes (`kernels.attention_backward.MOST_BYTES`). An estimate.
_WORKSPACE = 4_000_000_000
# CUDA context, and memory that torch keeps because a part of it is used. An estimate: 10 GiB for this and an engine's
# workspace were too few beside a policy of 8B.
_AT_REST = 8_000_000_000


def _state(config: RunConfig, arch: Architecture, parallel: Parallel) -> tuple[Need, ...]:
    if config.training.lora is not None:
        return adapted_state(config, arch, parallel.gpus, config.training.optimiser.state)
    own = largest_share(parameter_shapes(arch).values(), parallel.gpus)
    return state_of(config, arch, own, config.training.optimiser.state)


def _scoring(config: RunConfig, arch: Architecture, parallel: Parallel) -> tuple[Need, ...]:
    return tuple(need for need in _state(config, arch, parallel) if need.item != MOMENTS)


def _step(config: RunConfig, arch: Architecture, parallel: Parallel) -> tuple[Need, ...]:
    """The weights of a pass, which every GPU has whole, and what it makes of them."""
    recomputes = config.training.activation_checkpointing
    weight_bytes = stored_bytes(
        parameter_shapes(arch), training_formats(config.precision, arch.num_layers).stored_names()
    )
    return (
        Need("weights", weight_bytes.total, "as they are multiplied"),
        Need("quantised copies", weight_bytes.codes, "transposed FP8 codes for dgrad"),
        _gradients(config, arch, parallel),
        Need("activations", _activations(config, arch, parallel), "layers recomputed" if recomputes else "all kept"),
        *_shared_keys(config, arch, parallel),
        Need("workspace", _WORKSPACE, "estimate"),
    )


def _shared_keys(config: RunConfig, arch: Architecture, parallel: Parallel) -> Iterator[Need]:
    """K and V of one layer, where ranks share a pack. Their gradients are BF16, of two chunks and by query head; the
    FP32 sum is sent and received."""
    if parallel.context > 1:
        by_token = (6 * arch.num_kv_heads + 2 * arch.num_heads) * BF16_BYTES + 3 * arch.num_kv_heads * FP32_BYTES
        tokens = _longest_pack(config, arch, parallel.context)
        yield Need("keys of other ranks", tokens * by_token * arch.head_dim, "K, V and their gradients, a layer's")


def _gradients(config: RunConfig, arch: Architecture, parallel: Parallel) -> Need:
    if config.training.reduce_gradients == "per_update" or config.training.lora is not None or parallel.gpus == 1:
        return gradients(config, arch, "FP32, of this GPU's packs")
    stacks = [stack for index in range(arch.num_layers) for stack in layer_stacks(arch, index).values() if stack.width]
    linears = [(rows, *stack.width) for stack in stacks for _, rows in stack.parts]
    whole = count_parameters(arch).total - sum(map(math.prod, linears))
    travelling = _TRAVELLING * max(math.prod(stack.shape) for stack in stacks)
    elements = whole + largest_share(linears, parallel.gpus) + travelling
    return Need("gradients", elements * FP32_BYTES, "FP32; of linears the own rows, and one that travels")


_TRAVELLING = 4
"""Copies of a gradient: as it was made, cut for the ranks, in one buffer, and as it has come from them."""


def _activations(config: RunConfig, arch: Architecture, parallel: Parallel) -> int:
    """Blocks, rotary positions and attention keep this of a pass for its backward."""
    hidden = arch.hidden_size
    query = arch.num_heads * arch.head_dim
    every = query + 2 * arch.num_kv_heads * arch.head_dim
    # Inputs of linears: column codes, or the BF16 tensors.
    operand = 1 if config.precision.training.linear == "fp8_block" else BF16_BYTES
    attention = operand * (hidden + query) + BF16_BYTES * (2 * hidden + 2 * every + query)
    tokens = _longest_pack(config, arch, parallel.context) // parallel.context
    inside = [tokens * attention + _mlp_activations(arch, i, tokens, operand) for i in range(arch.num_layers)]
    if not config.training.activation_checkpointing:
        return sum(inside)
    # A layer that is computed again keeps the stream before both halves, attention's result and its log-sum-exps.
    outside = BF16_BYTES * (2 * hidden + query) + FP32_BYTES * arch.num_heads
    return tokens * outside * arch.num_layers + max(inside)


def _mlp_activations(arch: Architecture, layer: int, tokens: int, operand: int) -> int:
    """Inputs of both linears, and gate and up. With experts all are by row, as are results, and so is the route."""
    hidden, experts = arch.hidden_size, arch.experts
    if experts is None or layer not in arch.sparse_layers:
        width = arch.intermediate_size
        return tokens * (operand * (hidden + width) + BF16_BYTES * 2 * width)
    width = experts.intermediate_size
    by_row = operand * (hidden + width) + BF16_BYTES * (2 * width + hidden) + _INDEX_BYTES
    by_choice = FP32_BYTES + 2 * _INDEX_BYTES
    by_token = BF16_BYTES * hidden + FP32_BYTES * experts.count + by_choice * experts.per_token
    rows = most_rows(tokens * experts.per_token, experts.count, GROUP_MULTIPLE)
    return rows * by_row + tokens * by_token


_INDEX_BYTES = 8


MEMORY = TrainerMemory(
    state=_state,
    step=_step,
    exported=exported_in_one_piece,
    scoring=_scoring,
    at_rest=_AT_REST,
    advice="lower training.tokens_per_pass",
)


def _on_gpu(training: TrainingConfig) -> bool:
    return training.device == "cuda"


def _build(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks = ALONE
) -> "PackedTrainer":
    from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

    formats = PackedFormats(
        training_formats(config.precision, arch.num_layers),
        rollout_formats(config.precision, arch.num_layers),
        longest=engine_entry(config).longest(config) or arch.max_positions,
    )
    objective = Objective(config.loss, config.correction)
    device = torch.device(config.training.device)
    return PackedTrainer(arch, masters, formats, config.training, objective, device, ranks, config.seed)


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    shared = config.training.context_parallel
    if config.cluster.ranks > shared and not _on_gpu(config.training):
        yield (
            f"cluster.ranks={config.cluster.ranks}: on a CPU training.packed trains in one process, or in those that "
            f"share its passes; set it to training.context_parallel={shared}, or training.packed to false"
        )
    if config.rollout.router_replay:
        yield (
            f"rollout.router_replay with {_SETTING}: superfluous, as it chooses the experts of an exact engine by the "
            "same bytes; set it to false"
        )
    optimiser = config.training.optimiser
    if config.cluster.ranks > 1 and config.training.lora is None and find_optimiser(optimiser).whole_tensors:
        yield (
            f"training.optimiser.name={optimiser.name}: each of {config.cluster.ranks} packed ranks has rows of a "
            "matrix, and an update needs all of it; set it to adamw, or cluster.ranks to 1"
        )
    yield from contract_refusals(config.precision, config.training.device, node.platform)


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    yield from model_refusals(arch, config.precision, config.training.device)
    if arch.sparse_layers and config.training.context_parallel > 1:
        shared = config.training.context_parallel
        yield f"training.context_parallel={shared}: it would cut the groups of experts' gradients; set it to 1"
    yield from adapter_refusals(arch, config.training.lora)


def _grid(config: RunConfig) -> Parallel | None:
    training = config.training
    return Parallel(config.cluster.ranks, context=training.context_parallel) if _on_gpu(training) else None


def _requirements() -> str:
    return "references of its kernels on this CPU" if this_platform() == "cpu" else "block FP8 and BF16 on Hopper"


TRAINER = TrainerEntry(
    name="packed",
    is_chosen=lambda training: training.trainer == "torch" and training.computes_packed,
    build=_build,
    arithmetic="kernels",
    scores_updates=True,
    device=lambda training: training.device,
    build_sft=_build,
    requirements=_requirements,
    check=_check,
    check_model=_check_model,
    environment=lambda config: Environment(required_environment(config.training)),
    grid=_grid,
    needs_gpu=lambda config: _on_gpu(config.training),
    memory=lambda training: MEMORY if _on_gpu(training) else None,
    products=products,
    packs=packs,
)
