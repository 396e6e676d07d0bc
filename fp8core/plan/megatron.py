"""Memory of the Megatron trainer on a GPU beyond masters and optimiser states: weights in BF16 and, for FP8 linears,
Transformer Engine's codes of them by rows and by columns beside them; FP32 gradients; activations of the packs that a
stage of the pipeline has in flight; what the head makes of a part of their tokens."""

import math

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.weights import is_linear
from fp8core.plan.needs import Need
from fp8core.plan.rollout import longest_sequence
from fp8core.plan.weights import Part, held
from fp8core.training.megatron.grid import padded_vocabulary

_BF16, _FP32 = 2, 4
# Of `training.megatron.head`: elements of a part's logits, and how many tensors of that size there are at a time. The
# gradient of the head's weight is added up in FP32 beside that of a part.
_LOGITS, _LOGIT_TENSORS, _HEAD_GRADIENTS = 1 << 27, 4, 2
# Norms, rotary, SwiGLU and attention keep their inputs; an FP8 linear keeps codes of its own by rows and by columns.
_COPIES = 2
_REPEATABLE = "repeatable backward; none with training.deterministic=false"


def megatron_state(part: Part) -> tuple[Need, ...]:
    """What one GPU that holds `part` keeps between steps: Megatron's buffers, from the start to the end."""
    parameters = held(part)
    return Need("weights", parameters * _BF16, "BF16"), Need("gradients", parameters * _FP32, "FP32")


def megatron_step(
    config: RunConfig, arch: Architecture, part: Part, tensor: int, pipeline: int, workspace: int
) -> tuple[Need, ...]:
    """What a step adds to that, where so many GPUs share the linears and so many stages the layers."""
    linear = held(
        [({name: shape for name, shape in shapes.items() if is_linear(name)}, parts) for shapes, parts in part]
    )
    fp8 = config.precision.training.linear == "fp8_block"
    codes = (Need("quantised copies", _COPIES * linear, "FP8 codes by rows and by columns"),) if fp8 else ()
    repeatable = config.training.deterministic
    scores = (Need("attention scores", _scores(config, arch, tensor), _REPEATABLE),) if repeatable else ()
    return (
        *codes,
        *scores,
        Need("activations", _activations(config, arch, tensor, pipeline), f"of {_packs(pipeline)}; estimate"),
        Need("head", _head(config, arch, tensor), "logits of a part, FP32 gradients of its weight"),
        Need("workspace", workspace, "estimate"),
    )


def _scores(config: RunConfig, arch: Architecture, tensor: int) -> int:
    """cuDNN's repeatable backward of packed sequences holds the scores of each head and sequence, every one as long as
    the pack (seen on Hopper: 64 sequences, 8 heads, packs of 16,384: 512 GiB). The fewest sequences fill a pack."""
    pack = config.training.megatron.micro_batch_tokens
    sequences = math.ceil(pack / longest_sequence(config, arch))
    return sequences * (arch.num_heads // tensor) * pack * pack * _FP32


def _head(config: RunConfig, arch: Architecture, tensor: int) -> int:
    """Of the last stage, when it goes back through its logits."""
    rows = padded_vocabulary(arch, tensor) // tensor
    logits = min(_LOGITS, config.training.megatron.micro_batch_tokens * rows)
    return _FP32 * (_LOGIT_TENSORS * logits + _HEAD_GRADIENTS * rows * arch.hidden_size)


def _packs(pipeline: int) -> str:
    return "one pack" if pipeline == 1 else f"{pipeline} packs in flight"


def _activations(config: RunConfig, arch: Architecture, tensor: int, pipeline: int) -> int:
    """Of all layers, or their inputs and one layer that is recomputed; a group of tensor parallelism shares a layer's
    inside, and with sequence parallelism its inputs too. Stages share no activations: the first one has as many packs
    in flight as there are stages."""
    spread = config.training.megatron
    hidden, heads = arch.hidden_size, (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    width = arch.intermediate_size
    if (experts := arch.experts) is not None:
        width = experts.per_token * (experts.intermediate_size + hidden)
    inside = (5 * hidden + 2 * heads + 3 * width) // tensor
    inputs = hidden // (tensor if spread.sequence_parallel else 1)
    layers = arch.num_layers // pipeline * pipeline
    kept = layers * inputs + 2 * inside if spread.recompute == "full" else layers * (inputs + inside)
    return spread.micro_batch_tokens * _BF16 * kept
