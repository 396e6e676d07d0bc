"""The only place that touches what SGLang does not publish: attributes of attention layers, kernels, the KV cache.

Attributes are read, and those that SGLang leaves empty are filled; no method is replaced.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.numerics.e4m3 import scale_from_amax
from fp8core.numerics.recipe import TILE

# Of an attention layer: our buffer, FP32 [3] for Q, K and V; and what FlashAttention multiplies scores and values by.
_SCALES, _OF_SCORES, _OF_VALUES = "policy_scales", "k_scale", "v_scale"
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


def give_scales(layer: nn.Module, device: Any, scaled: bool) -> None:
    if scaled:
        setattr(layer, _SCALES, torch.ones(3, dtype=torch.float32, device=device))
        setattr(layer, _OF_SCORES, torch.ones(1, dtype=torch.float32, device=device))
        setattr(layer, _OF_VALUES, torch.ones(1, dtype=torch.float32, device=device))


def hold_backend(model: nn.Module, backend: object) -> None:
    setattr(model, _BACKEND, backend)


def scale_buffers(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    scales: Tensor = getattr(layer, _SCALES)
    return scales[0:1], scales[1:2], scales[2:3]


def has_scales(model: nn.Module) -> bool:
    return all(hasattr(layer, _SCALES) for layer in attention_layers(model))


def write_scales(model: nn.Module, scales: Sequence[Sequence[float]]) -> None:
    for layer, values in zip(attention_layers(model), scales, strict=True):
        held: Tensor = getattr(layer, _SCALES)
        held.copy_(torch.tensor(values, dtype=torch.float32))
        getattr(layer, _OF_SCORES).copy_(held[0:1] * held[1:2])
        getattr(layer, _OF_VALUES).copy_(held[2:3])


def read_scales(model: nn.Module) -> list[list[float]]:
    """Scales of Q, K and V of every layer, from the device; NaN where what FlashAttention reads does not follow."""
    found = []
    for layer in attention_layers(model):
        held: Tensor = getattr(layer, _SCALES)
        follows = torch.cat([held[0:1] * held[1:2], held[2:3]])
        kernel = torch.cat([getattr(layer, _OF_SCORES), getattr(layer, _OF_VALUES)])
        found.append(torch.where((kernel == follows).all(), held, torch.nan))
    rows: list[list[float]] = torch.stack(found).tolist()
    return rows


def cache_tensors(model: nn.Module) -> Iterator[Tensor]:
    pool = getattr(model, _BACKEND).token_to_kv_pool
    yield from pool.k_buffer
    yield from pool.v_buffer


def describe_attention(model: nn.Module) -> list[dict[str, Any]]:
    """Implementation, FlashAttention's version, splits of keys (0: it chooses), cache and products of every layer."""
    backend = getattr(model, _BACKEND)
    pool = str(backend.token_to_kv_pool.dtype).removeprefix("torch.")
    about = {"implementation": type(backend).__name__, "version": backend.fa_impl_ver, "splits": backend.num_splits}
    return [{**about, "cache": pool, "products": backend.products} for _ in attention_layers(model)]


def describe_linears(model: nn.Module) -> dict[str, dict[str, str]]:
    return {
        name: {
            "kernel": type(module.quant_method).__name__,
            "dtype": str(module.get_parameter("weight").dtype).removeprefix("torch."),
        }
        for name, module in model.named_modules()
        if name.endswith("_proj") and hasattr(module, "quant_method")
    }


def describe_head(model: nn.Module) -> str:
    """Type of the logits, from what the head makes of a hidden state."""
    head: Any = model.lm_head
    hidden = torch.zeros(1, head.weight.shape[1], dtype=torch.bfloat16, device=head.weight.device)
    logits: Tensor = head.quant_method.apply(head, hidden, None)
    return str(logits.dtype).removeprefix("torch.")


def describe_scale_rule(model: nn.Module) -> str:
    """The rule of every FP8 linear, found from what each quantised; `none` where there are none."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "quant_method")]
    return "+".join(sorted({_rule_of(each) for each in modules if hasattr(each.quant_method, "quantise")})) or "none"


def _rule_of(linear: Any) -> str:
    weight, columns = linear.weight, linear.weight.shape[-1]
    # Magnitudes over several powers of two, so that no group's amax / 448 is one by chance.
    x = torch.linspace(-3, 5, 4 * columns, device=weight.device).view(4, columns).to(torch.bfloat16)
    scales = linear.quant_method.quantise(x)[1].float()
    amax = x.float().view(4, columns // TILE, TILE).abs().amax(-1)
    found = [rule for rule in ("pow2", "fp32") if torch.equal(scales, scale_from_amax(amax, rule))]
    return found[0] if len(found) == 1 else "unknown"
