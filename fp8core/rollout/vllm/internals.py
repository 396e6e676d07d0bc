"""The only place that touches what vLLM does not publish: scales of attention, kernels, the KV cache.

Attributes are read and tensors are filled; no method is replaced.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.numerics.recipe import ScaleRule
from fp8core.rollout.aligned import NAMES, AlignedDecoder

# Scale -> its buffer on the device, and the mirrors on the host that some attention kernels read instead; vLLM 0.24 has
# no tensors among them.
_BUFFERS = {"q": "_q_scale", "k": "_k_scale", "v": "_v_scale"}
_FLOATS = {"q": "_q_scale_float", "k": "_k_scale_float", "v": "_v_scale_float"}
_MIRRORS = {"q": "_q_scale_cpu", "k": "_k_scale_cpu", "v": "_v_scale_cpu"}


def end_calls(client: Any, error: Exception) -> None:
    """Let every call end with an error that waits for an answer of the core; vLLM would let it wait for ever."""
    for call in list(client.utility_results.values()):
        with suppress(InvalidStateError):
            call.set_exception(error)
    if client.outputs_queue.empty():
        client.outputs_queue.put_nowait(error)


def register_decode_backend() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "fp8core.rollout.vllm.decode.DecodeBackend")


def register_aligned_models() -> None:
    """Give vLLM the paths of the aligned models, by their names in a config.json; to be done in every process."""
    from vllm import ModelRegistry

    for name in set(NAMES.values()):
        ModelRegistry.register_model(name, f"fp8core.rollout.vllm.aligned:{name}")


def load_model_class(name: str) -> None:
    """Give vLLM the class of a model itself. Of a path it learns in a process of its own: 13 s on two processors."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if hasattr(module, "attn_backend") and hasattr(module, "impl"):
            yield name, module


def write_scales(model: nn.Module, scales: Sequence[Sequence[float]]) -> None:
    for (_, layer), values in zip(_attention_layers(model), scales, strict=True):
        for name, value in zip("qkv", values, strict=True):
            getattr(layer, _BUFFERS[name]).fill_(value)
            setattr(layer, _FLOATS[name], value)
            if hasattr(layer, _MIRRORS[name]):
                getattr(layer, _MIRRORS[name]).fill_(value)


def read_scales(model: nn.Module) -> list[list[float]]:
    """Scales of Q, K and V of every layer, from the device; NaN where a mirror on the host differs."""
    places = [(layer, name) for _, layer in _attention_layers(model) for name in "qkv"]
    values = torch.stack([getattr(layer, _BUFFERS[name]) for layer, name in places]).tolist()
    held = [_confirmed(layer, name, value) for (layer, name), value in zip(places, values, strict=True)]
    return [held[i : i + 3] for i in range(0, len(held), 3)]


def _confirmed(layer: nn.Module, name: str, value: float) -> float:
    mirrors = [float(getattr(layer, _FLOATS[name]))]
    if hasattr(layer, _MIRRORS[name]):
        mirrors.append(float(getattr(layer, _MIRRORS[name])))
    return value if all(mirror == value for mirror in mirrors) else torch.nan


def gather(part: Tensor, axis: int) -> Tensor:
    from vllm.distributed import get_tp_group

    # As words of four bytes, none of which is in two rows: vLLM sends no codes of FP8, and on a CPU no bytes.
    joined: Tensor = get_tp_group().all_gather(part.contiguous().view(torch.float32), axis)
    return joined.view(part.dtype)


def layer_share() -> tuple[int, int]:
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def cache_tensors(runner: Any) -> list[Tensor]:
    caches: list[Tensor] = runner.kv_caches
    return caches


def _expert_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight") and hasattr(module, "quant_method"):
            yield name, module


def describe_attention(model: nn.Module) -> list[dict[str, Any]]:
    """Implementation, version (of FlashAttention, else None), cache format and products over FP8 of every layer."""
    return [
        {
            "implementation": type(layer.impl).__name__,
            "version": getattr(layer.impl, "vllm_flash_attn_version", None),
            "cache": layer.kv_cache_dtype,
            "products": getattr(layer.impl, "products", "fp8"),
        }
        for _, layer in _attention_layers(model)
    ]


def describe_linears(model: nn.Module) -> dict[str, dict[str, str]]:
    linears = {}
    for name, module in model.named_modules():
        method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
        if name.endswith("_proj") and method is not None and weight is not None:
            linears[name] = _described(getattr(method, "fp8_linear", method), weight)
    for name, experts in _expert_layers(model):
        linears[name] = _described(_expert_kernel(experts), experts.get_parameter("w13_weight"))
    return linears


def _described(kernel: object, weight: Tensor) -> dict[str, str]:
    return {"kernel": type(kernel).__name__, "dtype": str(weight.dtype).removeprefix("torch.")}


def _expert_kernel(experts: nn.Module) -> Any:
    method: Any = experts.quant_method
    kernel = getattr(method, "moe_kernel", None)
    return method if kernel is None else kernel.fused_experts


def head_dtype(model: nn.Module) -> str:
    """Type of the logits; vLLM 0.24, which cannot choose it, has that of the model."""
    found = next((m.head_dtype for m in model.modules() if hasattr(m, "head_dtype")), torch.bfloat16)
    return str(found).removeprefix("torch.")


def norm_providers(config: Any) -> list[str]:
    """The providers of RMSNorm without and with a residual sum (`native` is torch); none where vLLM has no choice."""
    priority = getattr(getattr(config, "kernel_config", None), "ir_op_priority", None)
    return [] if priority is None else [priority.rms_norm[0], priority.fused_add_rms_norm[0]]


def activation_rule(model: nn.Module) -> ScaleRule:
    """`pow2` if every FP8 linear and expert quantises its input with power-of-two scales, else `fp32`."""
    if isinstance(model, AlignedDecoder):
        return model.recipe.activations.rule
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [kernel for method in methods if (kernel := getattr(method, "fp8_linear", None)) is not None]
    rules = [bool(kernel.quant_fp8.use_ue8m0) for kernel in kernels]
    if any(hasattr(experts, "w13_weight_scale_inv") for _, experts in _expert_layers(model)):
        # The quantisers of both kernels call it when they run.
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        rules.append(is_deep_gemm_e8m0_used())
    return "pow2" if rules and all(rules) else "fp32"
