"""Block-FP8 linears and an FP32 head, as a quantisation method of SGLang, by the functions that train."""

from functools import cache
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from fp8core.kernels.hopper_gemm import forward_gemm, head_logits
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.e4m3 import Codes, FiniteFlag, row_codes
from fp8core.numerics.recipe import RECIPES, TILE, Grouping
from fp8core.rollout.sglang.settings import QUANTISATION
from fp8core.rollout.slots import FUSED


class BlockFp8Linear(LinearMethodBase):
    def __init__(self, groups: Grouping) -> None:
        self.groups = groups

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """E4M3 `weight` [out, in] and FP32 `weight_scale_inv`, one a tile."""
        rows = sum(output_partition_sizes)
        columns = input_size_per_partition
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.ones(rows // TILE, columns // TILE, dtype=torch.float32)
        for name, tensor in (("weight", codes), (f"weight{SCALE_SUFFIX}", scales)):
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is laid out anew."""

    def quantise(self, x: Tensor) -> Codes:
        return row_codes(x, self.groups, flag_of(x.device))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """BF16 [..., out]; a bias is added to the rounded product."""
        rows = x.reshape(-1, x.shape[-1])
        weight = layer.get_parameter("weight"), layer.get_parameter(f"weight{SCALE_SUFFIX}")
        product = forward_gemm(self.quantise(rows), weight).view(*x.shape[:-1], -1)
        return product if bias is None else product + bias


class Fp32Head(UnquantizedEmbeddingMethod):
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None, "no model here has a biased head"
        return head_logits(x, layer.get_parameter("weight"))


class PolicyQuantisation(QuantizationConfig):
    def __init__(self, outer_linears: frozenset[str], groups: Grouping, head: str) -> None:
        super().__init__()
        self._outer_linears = outer_linears
        self._groups = groups
        self._head = head

    @classmethod
    def get_name(cls) -> str:
        return QUANTISATION

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PolicyQuantisation":
        groups = RECIPES[config["scale_rule"]].activations
        return cls(frozenset(config["modules_to_not_convert"]), groups, config["head"])

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if self._keeps(prefix) else BlockFp8Linear(self._groups)
        if isinstance(layer, VocabParallelEmbedding):
            return Fp32Head() if self._head == "fp32" else UnquantizedEmbeddingMethod()
        return None

    def _keeps(self, prefix: str) -> bool:
        stem, _, module = prefix.rpartition(".")
        formats = {f"{stem}.{part}" in self._outer_linears for part in FUSED.get(module, (module,))}
        assert len(formats) == 1, f"{prefix}: its parts differ in format"
        return formats.pop()


@cache
def flag_of(device: torch.device) -> FiniteFlag:
    """It is not read: a value that is not finite reaches the log-probs."""
    return FiniteFlag(device)
