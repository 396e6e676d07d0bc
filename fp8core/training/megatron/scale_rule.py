"""The scale rule that Transformer Engine really follows: it reads its environment once, when it is imported."""

import torch

from fp8core.errors import UserError
from fp8core.numerics.e4m3 import TILE, ScaleRule


def scale_rule_in_force() -> ScaleRule:
    """Read from the scales of a tensor that was quantised by the recipe Megatron builds."""
    import transformer_engine_torch
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    recipe = Float8BlockScaling()
    quantise = Float8BlockQuantizer(
        transformer_engine_torch.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        amax_epsilon=recipe.fp8_quant_fwd_weight.amax_epsilon,
        force_pow_2_scales=recipe.fp8_quant_fwd_weight.power_2_scale,
        block_scaling_dim=recipe.w_block_scaling_dim,
    )
    # 3 / 448 is no power of two.
    scales = quantise(torch.full((TILE, TILE), 3.0, dtype=torch.bfloat16, device="cuda"))._rowwise_scale_inv
    return "pow2" if float(torch.frexp(scales.flatten()[:1].float().cpu()).mantissa) == 0.5 else "fp32"


def check_scale_rule(wanted: ScaleRule) -> None:
    """Raises UserError when Transformer Engine was imported under another rule than the contract's."""
    found = scale_rule_in_force()
    if found != wanted:
        raise UserError(
            f"precision.scale_rule={wanted}: Transformer Engine was imported under the rule {found} and keeps it; "
            "start a new process"
        )
