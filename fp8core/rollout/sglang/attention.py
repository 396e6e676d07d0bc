"""FlashAttention 3 of SGLang with the policy's scales, as an attention backend of SGLang.

SGLang has scales of K and V as attributes of a layer and none of Q. This backend makes all three codes itself, with
saturation and one rounding. Scores are sums of products of Q and K, so the scale of Q goes with that of K. Scales lie
in buffers, which captured graphs read.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor, nn

from fp8core.kernels.head_codes import codes_of_scale_tensor
from fp8core.numerics.recipe import AttentionProducts
from fp8core.rollout.sglang import internals


class ScaledAttention(FlashAttentionBackend):
    """All layers of a model; with a BF16 cache FlashAttention as SGLang has it."""

    products: AttentionProducts = "fp8"

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._has_scales = runner.kv_cache_dtype == torch.float8_e4m3fn
        for layer in internals.attention_layers(runner.model):
            internals.give_scales(layer, runner.device, self._has_scales)
        internals.hold_backend(runner.model, self)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        q, save_kv_cache = self._codes(q, k, v, layer, forward_batch, save_kv_cache)
        result: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)
        return result

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        q, save_kv_cache = self._codes(q, k, v, layer, forward_batch, save_kv_cache)
        result: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **more)
        return result

    def _codes(
        self, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, forward_batch: Any, save: bool
    ) -> tuple[Tensor, bool]:
        """Q as the products take it, with codes of K and V in the cache; as they came where the cache is BF16."""
        if not self._has_scales:
            return q, save
        of_q, of_k, of_v = internals.scale_buffers(layer)
        if save:
            place = KVWriteLoc(forward_batch.out_cache_loc, self.forward_metadata.swa_out_cache_loc)
            codes = codes_of_scale_tensor(k, of_k), codes_of_scale_tensor(v, of_v)
            self.token_to_kv_pool.set_kv_buffer(layer, place, *codes)
        return codes_of_scale_tensor(q, of_q) if self.products == "fp8" else q, False
