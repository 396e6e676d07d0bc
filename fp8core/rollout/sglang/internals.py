"""Attributes that SGLang does not publish: they are read, and empty ones are filled; no method is replaced."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.numerics.e4m3 import scale_from_amax
from fp8core.numerics.recipe import TILE
from fp8core.rollout.worker_policy import WorkerPolicy

# Attributes of an attention layer: our buffer, FP32 [3] for Q, K and V; FlashAttention's factors of scores and values.
_SCALES = "policy_scales"
_OF_SCORES = "k_scale"
_OF_VALUES = "v_scale"
_BACKEND = "policy_backend"


def register_models(*models: type[nn.Module]) -> None:
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models |= {model.__name__: model for model in models}


def pages(pool: Any, layer: Any, size: int) -> tuple[Tensor, Tensor]:
    """Codes of K and V of a layer in pages of `size` tokens, E4M3 [pages, size, kv_heads, head_dim]."""
    shape = (-1, size, layer.tp_k_head_num, layer.head_dim)
    keys, values = (buffers[layer.layer_id].view(torch.float8_e4m3fn) for buffers in (pool.k_buffer, pool.v_buffer))
    return keys.view(shape), values.view(shape)


def attention_layers(model: nn.Module) -> list[nn.Module]:
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def give_scales(layer: nn.Module, device: Any, has_scales: bool) -> None:
    if has_scales:
        setattr(layer, _SCALES, torch.ones(3, dtype=torch.float32, device=device))
        setattr(layer, _OF_SCORES, torch.ones(1, dtype=torch.float32, device=device))
        setattr(layer, _OF_VALUES, torch.ones(1, dtype=torch.float32, device=device))


def hold_backend(model: nn.Module, backend: object) -> None:
    setattr(model, _BACKEND, backend)


def scale_buffers(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    scales: Tensor = getattr(layer, _SCALES)
    return scales[0:1], scales[1:2], scales[2:3]


class SglangPolicy(WorkerPolicy):
    def describe(self) -> dict[str, Any]:
        backend = getattr(self._model, _BACKEND)
        linears = list(self._linears())
        attention = {
            "implementation": type(backend).__name__,
            "version": backend.fa_impl_ver,
            "splits": backend.num_splits,
            "cache": _name(backend.token_to_kv_pool.dtype),
            "products": backend.products,
        }
        # The rule of every FP8 linear, found from what each quantised.
        rules = {_rule_of(linear) for _, linear in linears if hasattr(linear.quant_method, "quantise")}
        return {
            "model": type(self._model).__name__,
            "linears": {
                name: {"kernel": type(linear.quant_method).__name__, "dtype": _name(linear.weight.dtype)}
                for name, linear in linears
            },
            "attention": [attention for _ in attention_layers(self._model)],
            "head": self._head_type(),
            "activations": "+".join(sorted(rules)) or "none",
        }

    def _linears(self) -> Iterator[tuple[str, Any]]:
        for name, module in self._model.named_modules():
            if name.endswith("_proj") and hasattr(module, "quant_method"):
                yield name, module

    def _head_type(self) -> str:
        """From what the head makes of a hidden state."""
        head = self._model.lm_head
        hidden = torch.zeros(1, head.weight.shape[1], dtype=torch.bfloat16, device=head.weight.device)
        return _name(head.quant_method.apply(head, hidden, None).dtype)

    def _has_scales(self) -> bool:
        return all(hasattr(layer, _SCALES) for layer in attention_layers(self._model))

    def _write_scales(self, scales: Sequence[Sequence[float]]) -> None:
        for layer, values in zip(attention_layers(self._model), scales, strict=True):
            buffer: Tensor = getattr(layer, _SCALES)
            buffer.copy_(torch.tensor(values, dtype=torch.float32))
            getattr(layer, _OF_SCORES).copy_(buffer[0:1] * buffer[1:2])
            getattr(layer, _OF_VALUES).copy_(buffer[2:3])

    def _read_scales(self) -> list[list[float]]:
        layer_scales = []
        for layer in attention_layers(self._model):
            buffer: Tensor = getattr(layer, _SCALES)
            follows = torch.cat([buffer[0:1] * buffer[1:2], buffer[2:3]])
            kernel = torch.cat([getattr(layer, _OF_SCORES), getattr(layer, _OF_VALUES)])
            layer_scales.append(torch.where((kernel == follows).all(), buffer, torch.nan))
        rows: list[list[float]] = torch.stack(layer_scales).tolist()
        return rows

    def _caches(self) -> Iterator[Tensor]:
        pool = getattr(self._model, _BACKEND).token_to_kv_pool
        yield from pool.k_buffer
        yield from pool.v_buffer


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rule_of(linear: Any) -> str:
    weight = linear.weight
    columns = linear.weight.shape[-1]
    # Magnitudes over several powers of two, so that no group's amax / 448 is one by chance.
    x = torch.linspace(-3, 5, 4 * columns, device=weight.device).view(4, columns).to(torch.bfloat16)
    scales = linear.quant_method.quantise(x)[1].float()
    amax = x.float().view(4, columns // TILE, TILE).abs().amax(-1)
    rules = [rule for rule in ("pow2", "fp32") if torch.equal(scales, scale_from_amax(amax, rule))]
    return rules[0] if len(rules) == 1 else "unknown"
