"""Linears of vLLM on a CPU whose weights stay where they are.

vLLM packs BF16 weights for oneDNN when they are loaded: written in place, they would change nothing that is computed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from fp8core.rollout.vllm.settings import IN_PLACE


class InPlaceLinear(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack nothing."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product = nn.functional.linear(x, layer.get_parameter("weight"))
        return product if bias is None else product + bias


class InPlaceEmbedding(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack nothing."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.get_parameter("weight"), bias)


@register_quantization_config(IN_PLACE)
class InPlaceConfig(QuantizationConfig):
    def get_name(self) -> str:
        return IN_PLACE

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "InPlaceConfig":
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return InPlaceLinear()
        return InPlaceEmbedding() if isinstance(layer, VocabParallelEmbedding) else None
