"""Linears and experts for vLLM on a CPU whose weights stay where they are.

vLLM packs BF16 weights for oneDNN when they are loaded: written in place, they would change nothing that is computed.
This quantisation method, registered through vLLM's registry, multiplies by the parameter itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.utils import set_weight_attrs

from fp8core.rollout.vllm.settings import IN_PLACE


class InPlaceLinear(UnquantizedLinearMethod):
    """y = x W^T, by the parameter."""

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


class InPlaceExperts(FusedMoEMethodBase):
    """y = sum of g_e W_down,e (silu(W_gate,e x) * W_up,e x); added in FP32, rounded once. Each computes every token."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        width = intermediate_size_per_partition
        shapes = {"w13_weight": (2 * width, hidden_size), "w2_weight": (hidden_size, width)}
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(num_experts, *shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, attributes)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> FusedMoEQuantConfig | None:
        """Nothing is quantised."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object,
        shared_experts_input: object,
    ) -> Tensor:
        """BF16 [tokens, hidden] from FP32 gate weights and expert ids, both [tokens, k]."""
        assert shared_experts is None, "no model here shares experts"
        w13, w2 = layer.get_parameter("w13_weight"), layer.get_parameter("w2_weight")
        gates = x.new_zeros(len(x), len(w13), dtype=torch.float32).scatter(1, topk_ids.long(), topk_weights.float())
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert, (gate_up, down) in enumerate(zip(w13, w2, strict=True)):
            gate, up = nn.functional.linear(x, gate_up).chunk(2, dim=-1)
            total += gates[:, expert, None] * nn.functional.linear(nn.functional.silu(gate) * up, down).float()
        return total.to(x.dtype)


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
        if isinstance(layer, RoutedExperts):
            return InPlaceExperts(layer.moe_config)
        if isinstance(layer, LinearBase):
            return InPlaceLinear()
        return InPlaceEmbedding() if isinstance(layer, VocabParallelEmbedding) else None
