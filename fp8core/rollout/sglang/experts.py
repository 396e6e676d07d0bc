"""Experts in block FP8 as a quantisation method of SGLang.

On Hopper SGLang's own FP8 experts quantise by FP32 scales, whatever the weights' scales are, and in Triton for one
engine. These have the contract's rule, with the quantisers that train and DeepGEMM's grouped product. Experts in BF16
are SGLang's own, in Triton.

The router is SGLang's: logits in BF16, gate weights in FP32 by descending weight.
"""

from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import nn

from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.e4m3 import Codes
from fp8core.numerics.grouped import Quantisers, grouped_experts
from fp8core.numerics.recipe import TILE, Grouping
from fp8core.rollout.sglang.quantisation import flag_of


class BlockFp8Experts(FusedMoEMethodBase):
    """y = sum of g_e W_down,e (silu(W_gate,e x) * W_up,e x): products of codes, as those of `BlockFp8Linear`."""

    def __init__(self, groups: Grouping) -> None:
        self.groups = groups

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """E4M3 `w13_weight` [experts, 2 m, hidden], gate above up, `w2_weight` [experts, hidden, m], and scales."""
        width = intermediate_size_per_partition
        for part, rows, columns in (("w13", 2 * width, hidden_size), ("w2", hidden_size, width)):
            codes = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn)
            scales = torch.ones(num_experts, rows // TILE, columns // TILE, dtype=torch.float32)
            for name, tensor in ((f"{part}_weight", codes), (f"{part}_weight{SCALE_SUFFIX}", scales)):
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Lay nothing out anew."""

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Refuse what other models have in their experts; nothing is made."""
        about = moe_runner_config
        assert about.activation == "silu", about.activation
        assert about.is_gated
        assert not about.apply_router_weight_on_input
        assert about.routed_scaling_factor is None
        assert about.swiglu_limit is None
        assert about.num_local_experts == about.num_experts, "an engine has one GPU"

    def quantisers(self, device: torch.device) -> Quantisers:
        """Of the inputs of both products."""
        return Quantisers(self.groups, flag_of(device))

    def apply(self, layer: nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        """BF16 [tokens, hidden]."""
        x, routed = dispatch_output.hidden_states, dispatch_output.topk_output
        weights, quantisers = (_codes(layer, "w13"), _codes(layer, "w2")), self.quantisers(x.device)
        return StandardCombineInput(grouped_experts(x, routed.topk_ids, routed.topk_weights, weights, quantisers))


def _codes(layer: nn.Module, part: str) -> Codes:
    return layer.get_parameter(f"{part}_weight"), layer.get_parameter(f"{part}_weight{SCALE_SUFFIX}")
