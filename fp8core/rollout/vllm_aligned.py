"""What the aligned model can be asked for, and how vLLM is told to run it (`rollout.vllm.model: aligned`).

The aligned model computes with the functions that train (`vllm_aligned_model`). This module imports no vLLM.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from fp8core.config.precision import PrecisionContract
from fp8core.config.vllm import VllmConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.numerics.decode_attention import HEAD_DIM, LARGEST_GROUP
from fp8core.rollout.vllm_versions import VllmBuild

SCALE_RULE: Final = "pow2"
POINTS: Final = "kernels"
# vLLM's class -> the name that the one derived from it is registered under.
ALIGNED = {"Qwen3ForCausalLM": "AlignedQwen3ForCausalLM", "LlamaForCausalLM": "AlignedLlamaForCausalLM"}
# Where a config.json has the decoder in our own words.
_KEY = "fp8_grpo_decoder"
# Logits of a row that begins on 16 bytes, as TMA stores it; `log_softmax` sums another way from elsewhere.
_ROW = 4
# Of vLLM, the model needs more than the engine does: what its decoders' modules are called, and whose sampler it has.
_VERSION = "0.26"


def check_aligned_fits(contract: PrecisionContract, options: VllmConfig, build: VllmBuild) -> None:
    """Refuse a contract, settings or a vLLM that the aligned model is not made for.

    Raises:
        UserError: naming the first setting, what it must be and why.
    """
    if build.platform == "cpu" or not build.version.startswith(f"{_VERSION}."):
        where = "a CPU" if build.platform == "cpu" else "a GPU"
        raise UserError(
            f"rollout.vllm.model=aligned: {build.distribution} {build.version} on {where}: "
            f"it is made for vllm {_VERSION} on Hopper; set it to stock"
        )
    for setting, value, needed, reason in _demands(contract, options):
        if value != needed:
            raise UserError(f"rollout.vllm.model=aligned: {setting}={value}, it must be {needed}: {reason}")


def _demands(contract: PrecisionContract, options: VllmConfig) -> Iterator[tuple[str, object, object, str]]:
    """Setting, what it is, what it must be, and why."""
    rollout = contract.rollout
    yield "precision.rounding_points", contract.rounding_points, POINTS, "its operations round there"
    yield "precision.scale_rule", contract.scale_rule, SCALE_RULE, "vLLM quantises Q by the reciprocal of its scale"
    yield "precision.rollout.linear", rollout.linear, "fp8_block", "its linears multiply codes"
    yield "precision.bf16_first_layers", contract.bf16_first_layers, 0, "all of its linears multiply codes"
    yield "precision.bf16_last_layers", contract.bf16_last_layers, 0, "all of its linears multiply codes"
    yield "precision.rollout.kv_cache", rollout.kv_cache, "fp8", "its attention reads an FP8 cache"
    yield "precision.rollout.head", rollout.head, "fp32", "its logits are FP32"
    yield "rollout.vllm.decode_kernel", options.decode_kernel, "fp8_decode", "prompts and decode steps share one kernel"


def check_aligned_shape(arch: Architecture) -> None:
    """Refuse a decoder that the aligned model does not compute.

    Raises:
        UserError: naming what the decoder has.
    """
    group = arch.num_heads // arch.num_kv_heads
    if arch.experts is not None:
        raise UserError(
            "rollout.vllm.model=aligned: the model has experts, only dense ones are aligned; set it to stock"
        )
    if arch.head_dim != HEAD_DIM or group > LARGEST_GROUP:
        raise UserError(
            f"rollout.vllm.model=aligned: head_dim {arch.head_dim} with {group} query heads per KV head; its attention "
            f"needs head_dim {HEAD_DIM} and at most {LARGEST_GROUP}; set it to stock"
        )
    if arch.vocab_size % _ROW:
        raise UserError(
            f"rollout.vllm.model=aligned: a vocabulary of {arch.vocab_size}, which is no multiple of {_ROW}; "
            "set it to stock"
        )


def aligned_config(config: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    """A config.json for vLLM's class, as one for ours."""
    (name,) = config["architectures"]
    return {**config, "architectures": [ALIGNED[name]], _KEY: asdict(arch)}


def decoder_of(config: Any) -> Architecture:
    """The decoder that the configuration of an aligned model describes (`aligned_config`), as vLLM holds it."""
    fields = dict(getattr(config, _KEY))
    scaling = fields["rope_scaling"]
    return Architecture(**fields | {"rope_scaling": None if scaling is None else RopeScaling(**scaling)})


def aligned_compilation(options: VllmConfig) -> dict[str, Any]:
    """Of vLLM's `CompilationConfig`: nothing is compiled, decode steps are captured whole.

    What is fused is fused by hand, so torch.compile would only add minutes to the start. Prompts run eagerly.
    """
    return {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY" if options.graphs else "NONE"}


def is_aligned(described: Mapping[str, Any]) -> bool:
    """Whether what a worker reports of itself (`PolicyWorker.policy_describe`) is an aligned model."""
    return described["model"] in ALIGNED.values()
