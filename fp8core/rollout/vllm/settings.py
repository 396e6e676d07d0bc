"""From a precision contract to the settings of a vLLM engine: its environment, its arguments, its config.json.

Everything that decides a bit is pinned here (facts about vLLM 0.26 on Hopper):

- Block-FP8 linears run DeepGEMM at every batch size; left alone, vLLM takes another kernel below 32 rows.
- DeepGEMM's activation quantiser follows VLLM_USE_DEEP_GEMM_E8M0: powers of two, or FP32.
- The passes that fuse quantisation into norm and activation have FP32 scales only, and quantise values that were never
  rounded to BF16. They are off for both rules.
- FP8 attention is FlashAttention 3, and our own kernel in decode steps (`kernels.decode_attention`).
- Router logits are BF16, rounded from FP32; gate weights are FP32. vLLM's first model runner records the chosen
  experts; vLLM selects it when they are requested.

This module imports no vLLM.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture, with_whole_tiles
from fp8core.models.checkpoint import block_fp8_section
from fp8core.models.families import parameter_shapes
from fp8core.models.families.config_json import architecture_to_hf
from fp8core.models.weights import is_linear, rollout_formats
from fp8core.numerics.attention import decode_kernel_takes
from fp8core.rollout.aligned import POINTS, aligned_config, is_aligned
from fp8core.rollout.requirements import EngineBuild
from fp8core.rollout.resident import executed_formats

# The product of the aligned model, and classes of vLLM's kernels that compute what `fp8_block` means.
ALIGNED_KERNEL = "forward_gemm"
FP8_KERNELS = (ALIGNED_KERNEL, "DeepGemmFp8BlockScaledMMKernel", "TritonOrDeepGemmExperts", "TritonExperts")
_KERNELS_BY_TYPE = {"bfloat16": None, "float8_e4m3fn": FP8_KERNELS}


WORKER = "fp8core.rollout.vllm.worker.PolicyWorker"
EXECUTOR = "fp8core.rollout.vllm.executor.ForkingExecutor"
SCHEDULER = "fp8core.rollout.vllm.scheduler.DraftScheduler"
OWN_TOKENS = "fp8_grpo_own_tokens"
"""Of a request's `extra_args`: tokens at the end of its prompt that were written in earlier turns."""
# The method of quantisation that vLLM's registry is given (`in_place`).
IN_PLACE = "fp8_grpo_in_place"

# FlashAttention 3, ours for decode steps (`decode`), and ours for all steps (`aligned`).
_FP8_BACKENDS = ("FlashAttentionImpl", "DecodeImpl", "AlignedImpl")
# vLLM quantises in these passes; what they fuse is another arithmetic than the contract's.
FUSIONS = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "enable_qk_norm_rope_fusion")
_GATHERED_COLUMNS = 1024
# Operations that vLLM has kernels of its own for, and that torch.compile fuses where they are not asked for.
_KERNELS = ("rms_norm", "silu_and_mul", "rotary_embedding")
_NORMS = ("rms_norm", "fused_add_rms_norm")
# Where prompts enter while others decode: a larger step takes a GPU longer than its kernels take to launch.
CAPTURED_TOKENS = 2048
# A GiB of cache holds all that a test or a laptop generates.
_CPU_CACHE_GIB = 1.0
_CPU_BLOCK = 32
_CPU_BATCHED_TOKENS = 2048


def required_environment(contract: PrecisionContract, options: VllmConfig, build: EngineBuild) -> dict[str, str]:
    """They must be set before vLLM is imported."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_BATCH_INVARIANT": str(int(options.batch_invariant))}
    if build.on_gpu:
        variables |= {
            "VLLM_USE_DEEP_GEMM": "1",
            "VLLM_MOE_USE_DEEP_GEMM": "1",
            "VLLM_USE_DEEP_GEMM_E8M0": str(int(contract.recipe.activations.rule == "pow2")),
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int(captures_prompts(options))),
        }
        if options.model == "aligned":
            # Its sampler draws by seed and position. vLLM takes the older runner for experts, whose generators do not.
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return variables


def suggested_environment(threads: int, build: EngineBuild) -> dict[str, str]:
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if build.on_gpu:
        # Kernels are compiled before a run (`run.compilation`): vLLM's own warm-up, one after the other, takes minutes.
        # Both sides find them where vLLM keeps its own anyway. nvcc compiles them: with NVRTC (DG_JIT_USE_NVRTC)
        # DeepGEMM 2.5.0 does not compile against CUDA 13.
        cache = Path.home() / ".cache" / "vllm" / "deep_gemm"
        variables |= {"VLLM_DEEP_GEMM_WARMUP": "skip", "DG_JIT_CACHE_DIR": str(cache)}
    else:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    return variables


def captures_prompts(options: VllmConfig) -> bool:
    return options.model == "aligned" and options.graphs and bool(options.captured_tokens)


def captured_sizes(tokens: int, max_batch: int) -> list[int]:
    """Tokens of the steps that are captured, ascending: four to a doubling. Others are padded to the next size."""
    sizes = {1, 2, 4, max_batch}
    size = 8
    while size <= max(tokens, max_batch):
        sizes.add(size)
        size += max(8, (1 << size.bit_length() - 1) // 4)
    return sorted(sizes)


def engine_arguments(
    arch: Architecture,
    contract: PrecisionContract,
    options: VllmConfig,
    build: EngineBuild,
    *,
    folder: str,
    max_batch: int,
    worker: str,
    routes: bool = False,
    draft_tokens: int = 0,
) -> dict[str, Any]:
    """`folder`: of a config.json (`model_config`). `worker`: qualified name of the class mixed into vLLM's worker.
    `draft_tokens`: of the longest draft (`speculation`); 0 for none."""
    longest = options.max_model_len or arch.max_positions
    arguments: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "seed": 0,
        "max_num_seqs": max_batch,
        "max_model_len": longest,
        "tensor_parallel_size": options.tensor_parallel,
        # While the worker launches a step, the core schedules the next one in its own process: one processor for both
        # is slower than the GPU. And in a process of Ray vLLM would ask Ray for places of several workers. On a CPU
        # a worker reads its number of threads when it starts.
        "distributed_executor_backend": EXECUTOR if build.on_gpu else "mp",
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": _cache_bytes(options.kv_cache_gib),
        "enable_prefix_caching": True,
        "enforce_eager": not options.graphs,
        "enable_sleep_mode": options.sleep,
        "logprobs_mode": "processed_logits" if options.model == "aligned" else "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": worker,
        "kv_cache_dtype": "fp8" if contract.rollout.kv_cache == "fp8" else "auto",
    }
    if contract.rollout.head == "fp32":
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if arch.experts is not None and routes:
        arguments["enable_return_routed_experts"] = True
    arguments |= draft_arguments(draft_tokens)
    if build.on_gpu:
        return arguments | _cuda_arguments(arch, contract, options, max_batch, draft_tokens)
    return arguments | {
        # vLLM takes back what a seeded request drew at the end of a part of its prompt, which CPU generators cannot do.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_CPU_BATCHED_TOKENS, longest),
        "quantization": IN_PLACE,
        "kv_cache_memory_bytes": _cache_bytes(options.kv_cache_gib or _CPU_CACHE_GIB),
        "block_size": _CPU_BLOCK,
    }


def draft_arguments(draft_tokens: int) -> dict[str, Any]:
    if not draft_tokens:
        return {}
    # vLLM schedules so many rows beside each request's own, also of a model that denoises nothing.
    canvas = {"canvas_length": draft_tokens}
    return {"diffusion_config": canvas, "scheduler_cls": SCHEDULER, "async_scheduling": True}


def _cuda_arguments(
    arch: Architecture, contract: PrecisionContract, options: VllmConfig, max_batch: int, draft_tokens: int
) -> dict[str, Any]:
    kernels = _KERNELS if contract.rounding_points == "kernels" else ()
    custom_ops = ["+quant_fp8", *(f"+{name}" for name in kernels)]
    own: dict[str, Any] = {}
    if draft_tokens and options.graphs:
        # A step of no more rows than a full batch is one graph, whatever they are: drafts or prompts.
        own = {"mode": "NONE", "cudagraph_mode": "FULL", "cudagraph_capture_sizes": captured_sizes(0, max_batch)}
    elif captures_prompts(options):
        # A decode step is one graph. A step with prompts has a graph between each two attentions.
        sizes = captured_sizes(options.captured_tokens or 0, max_batch)
        own = {"mode": "NONE", "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sizes}
    elif options.model == "aligned":
        own = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY" if options.graphs else "NONE"}
    # FlashAttention, or the one that has our kernel for decode steps (vLLM calls what comes from outside CUSTOM).
    ours = contract.rollout.kv_cache == "fp8" and decode_kernel_takes(
        arch.head_dim, arch.num_heads // arch.num_kv_heads
    )
    backend = "CUSTOM" if ours else "FLASH_ATTN"
    arguments: dict[str, Any] = {
        # Left alone vLLM takes 2,048 here, and reads prompts in four times as many steps.
        "max_num_batched_tokens": max(options.batched_tokens, max_batch),
        "attention_config": {"backend": backend, "flash_attn_version": 3},
        "compilation_config": {"custom_ops": custom_ops, "pass_config": dict.fromkeys(FUSIONS, False), **own},
    }
    if contract.rounding_points == "kernels":
        arguments["ir_op_priority"] = {norm: ["vllm_c"] for norm in _NORMS}
    if contract.rollout.linear == "fp8_block":
        # The aligned model multiplies by itself; vLLM's DeepGEMM refuses widths of its own choice.
        arguments["linear_backend"] = "triton" if options.model == "aligned" else "deep_gemm"
    # Its weights stay as they are written, which the aligned model reads.
    by_triton = options.model == "aligned" or contract.rollout.linear == "bf16" or options.batch_invariant
    by_triton = by_triton or not _gathers(arch.hidden_size)
    if arch.experts is not None and by_triton:
        # DeepGEMM is chosen by the environment: asked for by name, it would be demanded of layers in BF16 as well.
        arguments["moe_backend"] = "triton"
    return arguments


def _cache_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def model_config(arch: Architecture, contract: PrecisionContract, options: VllmConfig) -> dict[str, Any]:
    """A config.json without tokens: the engine is told where completions end."""
    arch = with_whole_tiles(arch) if options.model == "aligned" else arch
    config = architecture_to_hf(arch, bos_id=None, eos_ids=[0], pad_id=None, dtype="bfloat16")
    if contract.rollout.linear == "fp8_block":
        config["quantization_config"] = block_fp8_section(_kept_modules(arch, contract))
    return aligned_config(config, arch, contract.recipe) if options.model == "aligned" else config


def _kept_modules(arch: Architecture, contract: PrecisionContract) -> Iterator[str]:
    """Modules that vLLM must not take for FP8: routers, and what stays in BF16."""
    formats = rollout_formats(contract, arch.num_layers).stored_names()
    yield "lm_head"
    for name in parameter_shapes(arch):
        if is_linear(name) and ".experts." not in name and formats.of(name) != "fp8_block":
            yield name.removesuffix(".weight")
    for layer in range(arch.num_layers) if arch.experts else ():
        mlp = f"model.layers.{layer}.mlp"
        sparse = layer in arch.sparse_layers
        if sparse:
            yield f"{mlp}.gate"
        if formats.layers[layer] != "fp8_block":
            yield f"{mlp}.experts" if sparse else f"{mlp}.gate_up_proj"


def _gathers(columns: int) -> bool:
    """The kernel that puts DeepGEMM's experts together takes so many columns, at once or in whole blocks."""
    return columns % _GATHERED_COLUMNS == 0 or (columns < _GATHERED_COLUMNS and not columns & (columns - 1))


def described_formats(description: Mapping[str, Any], contract: PrecisionContract, layers: int) -> dict[str, object]:
    if is_aligned(description):
        linears = {name: {**linear, "kernel": ALIGNED_KERNEL} for name, linear in description["linears"].items()}
        description = {**description, "linears": linears}
    else:
        # Passes of the compiler quantise by another rule where they fuse.
        fusions = (name for name in FUSIONS if description["passes"].get(name))
        description = {**description, "activations": "+".join([description["activations"], *fusions])}
    return executed_formats(description, contract, layers, _KERNELS_BY_TYPE, _FP8_BACKENDS)


def executed_points(description: Mapping[str, Any], build: EngineBuild) -> str:
    """Those of the contract that these kernels have, or what runs where they have none of them."""
    if is_aligned(description):
        return POINTS
    operations = description["custom_ops"]
    norms = set(description["norms"])
    is_compiled = description["compilation"] != "NONE"
    if not build.on_gpu:
        return "compiled for a CPU" if is_compiled else "native"
    own = {name for name in _KERNELS if f"+{name}" in operations or "all" in operations}
    if own == set(_KERNELS) and norms <= {"vllm_c"}:
        return "kernels"
    if is_compiled and not own and norms <= {"native"}:
        return "fused"
    return f"kernels of vLLM for {', '.join(sorted(own)) or 'nothing'}, norms by {', '.join(sorted(norms))}"
