"""Whether a model can be cut over a grid of GPUs, and what is padded: decided by shapes, before anything is loaded."""

import math

from fp8core.config.megatron import MegatronConfig
from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.numerics.e4m3 import TILE


def padded_vocabulary(arch: Architecture, tensor_parallel: int) -> int:
    """Rows of the embedding and the head with padding: each GPU of a tensor-parallel group has a multiple of 128."""
    unit = TILE * tensor_parallel
    return math.ceil(arch.vocab_size / unit) * unit


def token_multiple(megatron: MegatronConfig) -> int:
    """What the tokens of a micro-batch are padded to: each GPU of a sequence-parallel group has a multiple of 128."""
    return TILE * (megatron.tensor_parallel if megatron.sequence_parallel else 1)


def check_grid(arch: Architecture, megatron: MegatronConfig, contract: PrecisionContract, longest: int) -> None:
    """Refuse what Megatron Core or Transformer Engine would refuse later, or in their own words.

    Args:
        arch: the model.
        megatron: how it is spread.
        contract: formats; block FP8 wants multiples of 128 in every dimension of a GPU's share.
        longest: tokens of the longest sequence.

    Raises:
        UserError: the setting, and the number that does not divide.
    """
    tensor, pipeline, expert = megatron.tensor_parallel, megatron.pipeline_parallel, megatron.expert_parallel
    _divides("tensor_parallel", tensor, arch.num_kv_heads, "KV heads")
    _divides("tensor_parallel", tensor, arch.intermediate_size, "columns of the MLP")
    _divides("pipeline_parallel", pipeline, arch.num_layers, "layers")
    if arch.experts is None:
        _divides("expert_parallel", expert, 1, "expert (it is dense)")
    else:
        _divides("expert_parallel", expert, arch.experts.count, "experts")
        if tensor > 1 and not megatron.sequence_parallel:
            raise _refused("sequence_parallel", "false", f"with experts and tensor_parallel={tensor} it must be true")
    multiple = token_multiple(megatron)
    if megatron.micro_batch_tokens % multiple:
        raise _refused("micro_batch_tokens", megatron.micro_batch_tokens, f"is no multiple of {multiple}")
    if longest > megatron.micro_batch_tokens:
        raise _refused("micro_batch_tokens", megatron.micro_batch_tokens, f"the longest sequence has {longest} tokens")
    if contract.training.linear == "fp8_block":
        _check_tiles(arch, tensor)


def _check_tiles(arch: Architecture, tensor: int) -> None:
    """Transformer Engine quantises a linear in blocks only where both sides of a GPU's share are multiples of 128."""
    sides = {
        "hidden size": arch.hidden_size,
        "Q, K and V": (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim // tensor,
        "attention": arch.num_heads * arch.head_dim // tensor,
        "MLP": arch.intermediate_size // tensor,
    }
    if arch.experts is not None:
        sides["expert"] = arch.experts.intermediate_size
        if len(arch.sparse_layers) == arch.num_layers:
            del sides["MLP"]
    for name, side in sides.items():
        if side % TILE:
            raise UserError(
                f"precision.training.linear=fp8_block: {name} has {side} columns on each GPU, and Megatron's block FP8 "
                f"needs a multiple of {TILE}; lower training.megatron.tensor_parallel or set it to bf16"
            )


def _divides(name: str, group: int, count: int, what: str) -> None:
    if count % group:
        raise _refused(name, group, f"does not divide the model's {count} {what}")


def _refused(name: str, value: object, reason: str) -> UserError:
    return UserError(f"training.megatron.{name}={value}: {reason}")
