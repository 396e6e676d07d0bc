"""From a precision contract to the settings of an SGLang engine: its environment, its arguments, its config.json.

Everything that decides a bit is pinned here (facts about SGLang 0.5.15 to 0.5.17 on Hopper):

- Its own block-FP8 linears quantise activations by FP32 scales on Hopper, whatever the weights' scales are
  (`deep_gemm_wrapper/configurer.py`). Ours (`quantisation`) have the contract's rule.
- FP8 attention is FlashAttention 3. SGLang casts Q unscaled, without saturation, and takes 1.0 where it finds no
  scale of K or V. Ours (`attention`) makes the codes and hands the scales to the kernel.
- Logits are FP32 sums of BF16 products. SGLang's FP32 head would multiply in FP32, a copy of the head each step.
- SGLang itself has seeds in deterministic inference alone; ours (`sampler`) draws as the embedded engine does.

All of it is registered where SGLang takes methods, backends and samplers from outside (`worker.register`). This module
imports no SGLang.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import block_fp8_section
from fp8core.models.families import parameter_shapes
from fp8core.models.families.config_json import architecture_to_hf
from fp8core.models.weights import is_linear, rollout_formats
from fp8core.resources.memory import cache_bytes_per_token
from fp8core.rollout.aligned import POINTS, aligned_config, is_aligned
from fp8core.rollout.resident import executed_formats

QUANTISATION = "fp8_grpo"
ALIGNED_QUANTISATION = "fp8_grpo_aligned"
"""Names in SGLang: of our quantisation method, attention backend and sampler; of attention and sampler as we train."""
WORKER = "fp8core.rollout.sglang.worker.answer"
# FlashAttention 3 with the policy's scales, and ours for all steps.
_BACKENDS = ("ScaledAttention", "AlignedAttention")
_POINTS = "kernels of SGLang"
# Methods that compute what the contract means, by type of the weights.
_KERNELS = {"bfloat16": ("UnquantizedLinearMethod",), "float8_e4m3fn": ("BlockFp8Linear",)}
# SGLang ends a request of the full length this many tokens before its context does.
BEYOND = 2
_GIB = 1 << 30


def required_environment() -> dict[str, str]:
    """No plugin has this name, so none is loaded."""
    return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_PLUGINS": QUANTISATION}


def suggested_environment() -> dict[str, str]:
    """SGLang looks for compiled kernels in its own folder."""
    cache = str(Path.home() / ".cache" / "deep_gemm")
    return {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "SGLANG_DG_CACHE_DIR": cache, "DG_JIT_CACHE_DIR": cache}


SPARE = 1
"""Places beside those of `max_batch`, which requests never take (`host`).

SGLang's scheduler counts a prompt twice that it cuts in two, so the last of a full batch would wait for the end of
another.
"""


def engine_arguments(
    arch: Architecture,
    contract: PrecisionContract,
    options: SglangConfig,
    folder: str,
    longest: int,
    max_batch: int,
    worker: str = WORKER,
) -> dict[str, Any]:
    """Plain values, which travel to another process.

    `folder`: of a config.json (`model_config`), and of the worker's requests. `worker`: path of `worker.answer`.
    """
    name = ALIGNED_QUANTISATION if options.model == "aligned" else QUANTISATION
    return {
        "model_path": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "random_seed": 0,
        "quantization": QUANTISATION,
        "attention_backend": name,
        "sampling_backend": name,
        # Brings the parameters of requests to the sampler.
        "enable_custom_logit_processor": True,
        "kv_cache_dtype": "fp8_e4m3" if contract.rollout.kv_cache == "fp8" else "bf16",
        "context_length": longest + BEYOND,
        "max_running_requests": max_batch + SPARE,
        "max_total_tokens": cache_tokens(arch, contract, options),
        "mem_fraction_static": options.mem_fraction_static,
        "chunked_prefill_size": options.chunked_prefill_size,
        "page_size": options.page_size,
        "disable_cuda_graph": not options.graphs,
        # Compiled pieces of prompts round where torch.compile fuses, graphs of decode steps do not.
        "disable_prefill_cuda_graph": True,
        **({"cuda_graph_max_bs_decode": max_batch} if options.graphs else {}),
        "enable_memory_saver": options.sleep,
        "custom_weight_loader": [worker],
        "log_level": "error",
    }


def cache_tokens(arch: Architecture, contract: PrecisionContract, options: SglangConfig) -> int | None:
    """Whole pages; None where SGLang takes what is left."""
    if options.kv_cache_gib is None:
        return None
    tokens = int(options.kv_cache_gib * _GIB) // cache_bytes_per_token(arch, contract.rollout.kv_cache)
    return tokens // options.page_size * options.page_size


def model_config(arch: Architecture, contract: PrecisionContract, options: SglangConfig) -> dict[str, Any]:
    """A config.json without tokens: the engine is told where completions end."""
    # A request that ignores the model's end would ignore its own stop tokens as well: the model has no end.
    config = architecture_to_hf(arch, bos_id=None, eos_ids=[], pad_id=None, dtype="bfloat16")
    formats = rollout_formats(contract, arch.num_layers).stored_names()
    linears = (name for name in parameter_shapes(arch) if is_linear(name))
    outer_linears = [name.removesuffix(".weight") for name in linears if formats.of(name) != "fp8_block"]
    section = block_fp8_section(["lm_head", *outer_linears])
    about = {"quant_method": QUANTISATION, "scale_rule": contract.scale_rule, "head": contract.rollout.head}
    # SGLang refuses a context beyond the model's positions.
    positions = {"max_position_embeddings": arch.max_positions + BEYOND}
    settings = {**config, **positions, "quantization_config": {**section, **about}}
    return aligned_config(settings, arch, contract.recipe) if options.model == "aligned" else settings


def described_formats(description: Mapping[str, Any], contract: PrecisionContract, layers: int) -> dict[str, object]:
    return executed_formats(description, contract, layers, _KERNELS, _BACKENDS)


def executed_points(description: Mapping[str, Any]) -> str:
    return POINTS if is_aligned(description) else _POINTS
