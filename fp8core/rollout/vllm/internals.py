"""Attributes that vLLM does not publish: they are read, and tensors are filled; no method is replaced."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.numerics.recipe import ScaleRule
from fp8core.numerics.truncation import Truncation
from fp8core.processes import end_with_parent
from fp8core.rollout.aligned import NAMES, AlignedDecoder
from fp8core.rollout.worker_policy import WorkerPolicy


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
    """To be done in every process."""
    from vllm import ModelRegistry

    for name in set(NAMES.values()):
        ModelRegistry.register_model(name, f"fp8core.rollout.vllm.aligned:{name}")


def load_model_class(name: str) -> None:
    """Register the class itself: vLLM imports a class by path in another process first (13 s on two processors)."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def gather(part: Tensor, axis: int) -> Tensor:
    """A matrix of which every GPU that shares a layer has an equal part along the axis."""
    from vllm.distributed import get_tp_group

    # As words of four bytes, none of which is in two rows: vLLM sends no codes of FP8, and on a CPU no bytes.
    whole: Tensor = get_tp_group().all_gather(part.contiguous().view(torch.float32), axis)
    return whole.view(part.dtype)


def layer_share() -> tuple[int, int]:
    """The number of this process among those that share each layer, from 0, and how many they are."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


class VllmPolicy(WorkerPolicy):
    def __init__(self, worker: Any) -> None:
        super().__init__(worker.model_runner.get_model(), worker.device)
        self._worker = worker

    def follow(self, pid: int) -> None:
        end_with_parent.follow(pid)

    def set_distribution(self, temperature: float, truncation: Mapping[str, Any] | None) -> None:
        self._model.temperature = temperature
        self._model.truncation = None if truncation is None else Truncation(**truncation)
        if self._model.judge is not None:
            self._model.judge.begin_session()

    def draft_counts(self) -> dict[str, int]:
        """Of an engine that was started with drafts (`speculation`)."""
        return dict(self._model.judge.counts())

    def describe(self) -> dict[str, Any]:
        model = self._model
        config = self._worker.vllm_config
        compilation = config.compilation_config
        norms = config.kernel_config.ir_op_priority
        head = next(module.head_dtype for module in model.modules() if hasattr(module, "head_dtype"))
        return {
            "model": type(model).__name__,
            "linears": self.linears(),
            "attention": [_described_attention(layer) for layer in self._attention_layers()],
            "head": str(head).removeprefix("torch."),
            "activations": self._activation_rule(),
            "passes": {k: v for k, v in vars(compilation.pass_config).items() if isinstance(v, bool)},
            "custom_ops": list(compilation.custom_ops),
            "norms": [norms.rms_norm[0], norms.fused_add_rms_norm[0]],
            "compilation": compilation.mode.name,
            "graphs": str(compilation.cudagraph_mode),
            "runner": type(self._worker.model_runner).__module__,
        }

    def linears(self) -> dict[str, dict[str, str]]:
        kernels = {}
        for name, module in self._model.named_modules():
            method = getattr(module, "quant_method", None)
            weight = getattr(module, "weight", None)
            if _has_experts(module):
                kernel = getattr(method, "moe_kernel", None)
                kernel = method if kernel is None else kernel.fused_experts
                kernels[name] = _description(kernel, module.get_parameter("w13_weight"))
            elif name.endswith("_proj") and method is not None and weight is not None:
                kernels[name] = _description(getattr(method, "fp8_linear", method), weight)
        return kernels

    def _activation_rule(self) -> ScaleRule:
        """`pow2` if every FP8 linear and expert quantises its input with power-of-two scales, else `fp32`."""
        if isinstance(self._model, AlignedDecoder):
            return self._model.recipe.activations.rule
        modules = list(self._model.modules())
        methods = [getattr(module, "quant_method", None) for module in modules]
        kernels = [kernel for method in methods if (kernel := getattr(method, "fp8_linear", None)) is not None]
        rules = [bool(kernel.quant_fp8.use_ue8m0) for kernel in kernels]
        if any(_has_experts(module) and hasattr(module, "w13_weight_scale_inv") for module in modules):
            # The quantisers of both kernels call it when they run.
            from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

            rules.append(is_deep_gemm_e8m0_used())
        return "pow2" if rules and all(rules) else "fp32"

    def _attention_layers(self) -> list[Any]:
        """In the order of the decoder."""
        return [each for each in self._model.modules() if hasattr(each, "attn_backend") and hasattr(each, "impl")]

    def _has_scales(self) -> bool:
        return str(self._worker.vllm_config.cache_config.cache_dtype).startswith("fp8")

    def _write_scales(self, scales: Sequence[Sequence[float]]) -> None:
        for layer, values in zip(self._attention_layers(), scales, strict=True):
            for name, value in zip("qkv", values, strict=True):
                getattr(layer, f"_{name}_scale").fill_(value)
                setattr(layer, f"_{name}_scale_float", value)
                if (mirror := getattr(layer, f"_{name}_scale_cpu", None)) is not None:
                    mirror.fill_(value)

    def _read_scales(self) -> list[list[float]]:
        layers = self._attention_layers()
        values = torch.stack([getattr(layer, f"_{name}_scale") for layer in layers for name in "qkv"]).tolist()
        copies = [_host_copies(layer, name) for layer in layers for name in "qkv"]
        agreed_values = [value if {value} == each else torch.nan for value, each in zip(values, copies, strict=True)]
        return [agreed_values[i : i + 3] for i in range(0, len(agreed_values), 3)]

    def _caches(self) -> Iterable[Tensor]:
        caches: list[Tensor] = self._worker.model_runner.kv_caches
        return caches

    def _rank(self) -> int:
        return layer_share()[0]

    def _gather(self, part: Tensor, axis: int) -> Tensor:
        return gather(part, axis)


def _host_copies(layer: Any, name: str) -> set[float]:
    """Copies of a scale that some attention kernels read instead."""
    values = {float(getattr(layer, f"_{name}_scale_float"))}
    mirror = getattr(layer, f"_{name}_scale_cpu", None)
    return values if mirror is None else values | {float(mirror)}


def _has_experts(module: nn.Module) -> bool:
    return hasattr(module, "w13_weight") and hasattr(module, "quant_method")


def _described_attention(layer: Any) -> dict[str, Any]:
    return {
        "implementation": type(layer.impl).__name__,
        "version": getattr(layer.impl, "vllm_flash_attn_version", None),
        "cache": layer.kv_cache_dtype,
        "products": getattr(layer.impl, "products", "fp8"),
    }


def _description(kernel: object, weight: Tensor) -> dict[str, str]:
    return {"kernel": type(kernel).__name__, "dtype": str(weight.dtype).removeprefix("torch.")}
