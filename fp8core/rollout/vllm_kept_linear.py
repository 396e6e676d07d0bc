"""Linears for vLLM on a CPU whose weights stay where they are.

vLLM packs BF16 weights for oneDNN when they are loaded and drops, or keeps beside the packed copy, the parameter:
written in place, it would change nothing that is computed, and read back it would prove nothing. This quantisation
method, registered through vLLM's registry, multiplies by the parameter itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from fp8core.rollout.vllm_settings import KEPT


class KeptLinear(UnquantizedLinearMethod):
    """y = x W^T, by the parameter."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack nothing."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """BF16 [..., out]."""
        return nn.functional.linear(x, layer.get_parameter("weight"), bias)


class KeptEmbedding(UnquantizedEmbeddingMethod):
    """Embedding and head, by the parameter."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack nothing."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits, BF16 [tokens, vocabulary]."""
        return nn.functional.linear(x, layer.get_parameter("weight"), bias)


@register_quantization_config(KEPT)
class KeptConfig(QuantizationConfig):
    """Names the method of each layer."""

    def get_name(self) -> str:
        """Name that `EngineArgs.quantization` takes."""
        return KEPT

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """BF16 alone: what the contract says."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """None: a CPU has none."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file of its own."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "KeptConfig":
        """There is nothing to configure."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Linears, embedding and head; the rest is vLLM's own."""
        if isinstance(layer, LinearBase):
            return KeptLinear()
        return KeptEmbedding() if isinstance(layer, VocabParallelEmbedding) else None
