"""Megatron Core as a registered trainer: its conditions and its memory. Megatron itself is not imported here."""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from fp8core.config.capability import Environment, Node, this_node
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.config.training import MegatronConfig
from fp8core.errors import refuse
from fp8core.models.architecture import Architecture
from fp8core.models.families import family_of
from fp8core.models.weights import is_linear
from fp8core.numerics.recipe import TILE
from fp8core.resources.memory import BF16_BYTES, FP32_BYTES, Need, StoredBytes, count_parameters, memory_of
from fp8core.rollout.registry import longest_sequence
from fp8core.training.megatron.conversion import padded_vocabulary, token_multiple
from fp8core.training.memory import AT_REST, WORKSPACE, Parallel, TrainerMemory, cut_parameters, exported, state_of
from fp8core.training.ranks import Ranks
from fp8core.training.registry import TrainerEntry
from fp8core.training.trainer import LocalTrainer

_PACKAGES = "megatron-core", "transformer-engine"


def _missing(node: Node) -> Iterator[str]:
    for package in _PACKAGES:
        if package not in node.packages:
            yield f"training.trainer=megatron: {package} is not installed (pip install 'fp8-grpo[megatron]')"


def machine_refusals(config: RunConfig, node: Node) -> Iterator[str]:
    """A message for all that is missing or not computed on `node`, where ranks compute."""
    if node.platform == "cpu":
        yield "training.trainer=megatron: Megatron trains on GPUs, and torch sees none here; set it to torch"
        return
    yield from _missing(node)
    contract = config.precision.training
    rules = config.precision.recipe
    if contract.linear == "fp32":
        yield "precision.training.linear=fp32: Megatron computes in BF16 or block FP8; set it to bf16 or fp8_block"
    if contract.linear == "fp8_block" and rules.activations.rule != rules.weights.rule:
        yield (
            f"precision.scale_rule={rules.name}: Transformer Engine quantises activations and weights by one rule; set "
            "it to fp32 or to pow2"
        )
    if contract.kv_cache == "fp8":
        yield (
            "precision.training.kv_cache=fp8: Megatron's attention computes in BF16; set it to bf16, and let "
            "`correction` act on what the rollout's FP8 cache changes"
        )
    if contract.backward_format != contract.linear:
        yield (
            f"precision.training.backward={contract.backward_format}: Transformer Engine multiplies backward in the "
            f"format of the forward; set it to null or to {contract.linear}"
        )
    if config.cluster.ranks > node.gpus:
        yield f"cluster.ranks={config.cluster.ranks}: this machine has {node.gpus} GPUs"


def environment(config: RunConfig) -> Environment:
    """Transformer Engine reads these variables when it is imported."""
    variables = {
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1" if config.precision.scale_rule == "fp32" else "0",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0" if config.training.deterministic else "1",
    }
    # One queue keeps communication behind the GEMM that it shall overlap with.
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if config.training.megatron.tensor_parallel > 1 else {}
    return Environment(variables, queues)


def grid_refusals(
    arch: Architecture, megatron: MegatronConfig, contract: PrecisionContract, longest: int
) -> Iterator[str]:
    """A message for all that Megatron or Transformer Engine would refuse later; `longest`: tokens of a sequence."""
    yield from family_of(arch).refusals("megatron", "training.trainer=megatron")
    if (rope := arch.rope_scaling) is not None and rope.attention_scale != 1:
        yield (
            f"training.trainer=megatron: rope_scaling of the model multiplies Q and K by {rope.attention_scale:.4g}, "
            "which Transformer Engine's rotary kernel does not; set trainer to torch"
        )
    tensor = megatron.tensor_parallel
    expert = megatron.expert_parallel
    yield from _remainder("tensor_parallel", tensor, arch.num_kv_heads, "KV heads")
    yield from _remainder("tensor_parallel", tensor, arch.intermediate_size, "columns of the MLP")
    if arch.experts is None:
        yield from _remainder("expert_parallel", expert, 1, "expert (it is dense)")
    else:
        yield from _remainder("expert_parallel", expert, arch.experts.count, "experts")
        if tensor > 1 and not megatron.sequence_parallel:
            yield _refusal("sequence_parallel", "false", f"with experts and tensor_parallel={tensor} it must be true")
    multiple = token_multiple(megatron)
    if megatron.micro_batch_tokens % multiple:
        yield _refusal("micro_batch_tokens", megatron.micro_batch_tokens, f"is no multiple of {multiple}")
    if longest > megatron.micro_batch_tokens:
        yield _refusal("micro_batch_tokens", megatron.micro_batch_tokens, f"the longest sequence has {longest} tokens")
    if contract.training.linear == "fp8_block" and (partial := _partial_sides(arch, tensor)):
        yield (
            f"precision.training.linear=fp8_block: on each GPU a linear of the model has a side of {partial[0]}, and "
            f"Transformer Engine quantises multiples of {TILE}; set it to bf16"
        )


def _partial_sides(arch: Architecture, tensor: int) -> list[int]:
    """Sides of a GPU's share of linears that are no multiples of 128."""
    query = arch.num_heads * arch.head_dim // tensor
    keys = arch.num_kv_heads * arch.head_dim // tensor
    sides = [arch.hidden_size, query, query + 2 * keys]
    if len(arch.sparse_layers) < arch.num_layers:
        sides.append(arch.intermediate_size // tensor)
    if arch.experts is not None:
        sides.append(arch.experts.intermediate_size)
    return [side for side in sides if side % TILE]


def _remainder(name: str, group: int, count: int, what: str) -> Iterator[str]:
    if count % group:
        yield _refusal(name, group, f"does not divide the model's {count} {what}")


def _refusal(name: str, value: object, reason: str) -> str:
    return f"training.megatron.{name}={value}: {reason}"


# Of `training.megatron.model`: elements of a part's logits, and how many tensors of that size there are at a time. The
# gradient of the head's weight is added up in FP32 beside that of a part.
_LOGITS = 1 << 27
_LOGIT_TENSORS = 4
_HEAD_GRADIENTS = 2
# Norms, rotary, SwiGLU and attention keep their inputs; an FP8 linear keeps codes of its own by rows and by columns.
_COPIES = 2
_REPEATABLE = "repeatable backward; none with training.deterministic=false"


def _state(config: RunConfig, arch: Architecture, parallel: Parallel) -> tuple[Need, ...]:
    parameters = memory_of(cut_parameters(arch, parallel))
    weights = Need("weights", parameters * BF16_BYTES, "BF16"), Need("gradients", parameters * FP32_BYTES, "FP32")
    own = math.ceil(count_parameters(arch).total / parallel.gpus)
    return *state_of(config, arch, own, "fp32"), *weights


def _step(config: RunConfig, arch: Architecture, parallel: Parallel) -> tuple[Need, ...]:
    tensor = parallel.tensor
    linear = memory_of(
        [
            ({name: shape for name, shape in shapes.items() if is_linear(name)}, parts)
            for shapes, parts in cut_parameters(arch, parallel)
        ]
    )
    fp8 = config.precision.training.linear == "fp8_block"
    codes = (Need("quantised copies", _COPIES * linear, "FP8 codes by rows and by columns"),) if fp8 else ()
    repeatable = config.training.deterministic
    scores = (Need("attention scores", _scores(config, arch, tensor), _REPEATABLE),) if repeatable else ()
    return (
        *codes,
        *scores,
        Need("activations", _activations(config, arch, tensor), "of one pack; estimate"),
        Need("head", _head(config, arch, tensor), "logits of a part, FP32 gradients of its weight"),
        Need("workspace", WORKSPACE, "estimate"),
    )


def _export_memory(config: RunConfig, arch: Architecture, parallel: Parallel, sync: StoredBytes) -> tuple[Need, ...]:
    """Where GPUs share the weights, the policy is put together in main memory; else it is made on every GPU."""
    if (parallel.tensor, parallel.expert) != (1, 1):
        return ()
    return exported(config, sync, Need("what they are made from", count_parameters(arch).total * BF16_BYTES, "BF16"))


def _scores(config: RunConfig, arch: Architecture, tensor: int) -> int:
    """cuDNN's repeatable backward of packed sequences holds the scores of each head and sequence, every one as long as
    the pack. On Hopper: 512 GiB for 64 sequences, 8 heads and packs of 16,384. The fewest sequences fill a pack."""
    pack = config.training.megatron.micro_batch_tokens
    sequences = math.ceil(pack / longest_sequence(config, arch))
    return sequences * (arch.num_heads // tensor) * pack * pack * FP32_BYTES


def _head(config: RunConfig, arch: Architecture, tensor: int) -> int:
    rows = padded_vocabulary(arch, tensor) // tensor
    logits = min(_LOGITS, config.training.megatron.micro_batch_tokens * rows)
    return FP32_BYTES * (_LOGIT_TENSORS * logits + _HEAD_GRADIENTS * rows * arch.hidden_size)


def _activations(config: RunConfig, arch: Architecture, tensor: int) -> int:
    """Bytes of all layers' activations, or of their inputs and one layer that is recomputed."""
    spread = config.training.megatron
    hidden = arch.hidden_size
    heads = (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    width = arch.intermediate_size
    if (experts := arch.experts) is not None:
        width = experts.per_token * (experts.intermediate_size + hidden)
    inside = (5 * hidden + 2 * heads + 3 * width) // tensor
    inputs = hidden // (tensor if spread.sequence_parallel else 1)
    layers = arch.num_layers
    activations = layers * inputs + 2 * inside if spread.recompute == "full" else layers * (inputs + inside)
    return spread.micro_batch_tokens * BF16_BYTES * activations


MEMORY = TrainerMemory(
    state=_state,
    step=_step,
    exported=_export_memory,
    scoring=_state,
    at_rest=AT_REST,
    # Nothing else gives as much back as the scores that repeatable attention holds.
    advice="set training.deterministic=false, lower training.megatron.micro_batch_tokens",
)


def _build(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks) -> LocalTrainer:
    from fp8core.training.megatron.trainer import process_trainer

    return process_trainer(config, arch, masters, ranks)


def _requirements() -> str:
    node = this_node(_PACKAGES)
    refuse(_missing(node))
    return f"megatron-core {node.packages['megatron-core']}, block FP8 and BF16 on Hopper"


TRAINER = TrainerEntry(
    name="megatron",
    packages=_PACKAGES,
    is_chosen=lambda training: training.trainer == "megatron",
    build=_build,
    arithmetic="own",
    scores_updates=False,
    # The head has a part of the vocabulary on each GPU, and a support is of the whole.
    truncates=False,
    device=lambda _: "cuda",
    requirements=_requirements,
    check=machine_refusals,
    check_model=lambda config, arch: grid_refusals(
        arch, config.training.megatron, config.precision, longest_sequence(config, arch)
    ),
    environment=environment,
    grid=lambda config: Parallel(
        config.cluster.ranks, config.training.megatron.tensor_parallel, config.training.megatron.expert_parallel
    ),
    needs_gpu=lambda _: True,
    memory=lambda _: MEMORY,
)
