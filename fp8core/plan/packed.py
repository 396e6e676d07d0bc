"""Memory of the torch trainer for packed sequences (`training.torch`): one GPU holds everything."""

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.formats import training_formats
from fp8core.plan.needs import Need
from fp8core.plan.weights import count_parameters, stored_bytes

_FP32, _BF16 = 4, 2
_MOMENT_BYTES = {"fp32": _FP32, "bf16": _BF16}
# CUDA context, GEMM workspaces, and a chunk of logits with what is made of it. An estimate.
_WORKSPACE = 4_000_000_000
# CUDA context, and memory that torch keeps because a part of it is used. An estimate: 10 GiB for this and an engine's
# workspace were too few beside a policy of 8B.
PACKED_AT_REST = 8_000_000_000


def packed_state(config: RunConfig, arch: Architecture) -> tuple[Need, ...]:
    """What stays between steps."""
    total, form = count_parameters(arch).total, config.training.optimiser_state
    moments = Need("optimiser states", 2 * total * _MOMENT_BYTES[form], f"AdamW, {form.upper()}")
    return Need("master weights", total * _FP32, "FP32"), moments


def packed_step(config: RunConfig, arch: Architecture) -> tuple[Need, ...]:
    """What a step adds."""
    stored = stored_bytes(parameter_shapes(arch), training_formats(config.precision, arch.num_layers).stored_names())
    recomputed = config.training.activation_checkpointing
    return (
        Need("weights", stored.total, "as they are multiplied"),
        Need("quantised copies", stored.codes, "transposed FP8 codes for dgrad"),
        Need("gradients", count_parameters(arch).total * _FP32, "FP32"),
        Need("activations", _activations(config, arch), "layers recomputed" if recomputed else "all kept"),
        Need("workspace", _WORKSPACE, "estimate"),
    )


def _activations(config: RunConfig, arch: Architecture) -> int:
    """What blocks, rotary positions and attention keep of a pass for its backward (`training.torch.blocks`)."""
    hidden, query = arch.hidden_size, arch.num_heads * arch.head_dim
    every, width = query + 2 * arch.num_kv_heads * arch.head_dim, arch.intermediate_size
    # Inputs of the four linears: column codes, or the BF16 tensors.
    inputs = (2 * hidden + query + width) * (1 if config.precision.training.linear == "fp8_block" else _BF16)
    inside = inputs + _BF16 * (2 * hidden + 2 * every + query + 2 * width)
    # Of each layer that is computed again: input, what is added to it, and what it attended to.
    outside, layers = _BF16 * (2 * hidden + query), arch.num_layers
    if config.precision.training.kv_cache == "bf16":
        outside += _FP32 * arch.num_heads  # FlashAttention's log-sum-exp
    kept = outside * layers + inside if config.training.activation_checkpointing else inside * layers
    return config.training.tokens_per_pass * kept
