"""Block-FP8 linears of vLLM's own models whose sides are no multiples of 128: each is padded by itself.

vLLM quantises activations in whole groups, and tiles of fused linears where the parts end on tiles. Here every part has
rows of zeros, and the linear columns of zeros, up to the next multiple of 128. They change no amax and no sum, so codes
and results are those of partial tiles. vLLM's own kernel multiplies; only the linear's own rows of a result go on. So
norms, heads and the cache keep their sizes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.recipe import TILE
from fp8core.rollout.vllm.settings import PADDED


class PaddedLinear(Fp8LinearMethod):
    """y = x W^T, where W has zeros beside what is shipped."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Codes and scales of whole tiles."""
        self._sizes = output_partition_sizes
        self._rows = [round_up(size, TILE) for size in output_partition_sizes]
        columns = round_up(input_size_per_partition, TILE)
        self._columns = columns - input_size_per_partition
        super().create_weights(layer, columns, self._rows, columns, sum(self._rows), params_dtype, **attributes)
        # A bias is made by these.
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """BF16 [..., out]; a bias is added to the rounded product, as vLLM's own method adds it."""
        product: Tensor = super().apply(layer, nn.functional.pad(x, (0, self._columns)) if self._columns else x)
        if self._rows != self._sizes:
            parts = zip(product.split(self._rows, dim=-1), self._sizes, strict=True)
            product = torch.cat([part[..., :size] for part, size in parts], dim=-1)
        return product if bias is None else product + bias


@register_quantization_config(PADDED)
class PaddedConfig(Fp8Config):
    @classmethod
    def get_name(cls) -> str:
        return PADDED

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Layers that stay in BF16, experts and the cache have the methods that they have in vLLM."""
        method = super().get_quant_method(layer, prefix)
        return PaddedLinear(self) if isinstance(layer, LinearBase) and isinstance(method, Fp8LinearMethod) else method
