"""From an architecture and a contract to the arguments of Megatron Core's `TransformerConfig`."""

from typing import Any, Literal

import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.config.training import MegatronConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, Experts
from fp8core.numerics.recipe import TILE, ScaleRule

Kind = Literal["cpu", "cuda"]


def transformer_arguments(
    arch: Architecture, contract: PrecisionContract, megatron: MegatronConfig, device: Kind, deterministic: bool
) -> dict[str, Any]:
    """Of `megatron.core.transformer.TransformerConfig`; `device`: Megatron's local layers compute on `cpu`."""
    on_gpu, piped = device == "cuda", megatron.pipeline_parallel > 1
    dtype = torch.float32 if contract.training.linear == "fp32" else torch.bfloat16
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.intermediate_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.rms_norm_eps,
        "qk_layernorm": arch.qk_norm,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": megatron.tensor_parallel,
        "pipeline_model_parallel_size": megatron.pipeline_parallel,
        "expert_model_parallel_size": megatron.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": megatron.sequence_parallel,
        # Packs differ in length: a stage sends the length of each to the next stage.
        "variable_seq_lengths": piped,
        # The other dispatcher needs no GPU; with lengths that vary Megatron refuses it, of a dense model too.
        "moe_token_dispatcher_type": "alltoall" if on_gpu or piped else "allgather",
        # Weights are loaded, never drawn; but initialisation is where Megatron marks what is cut.
        "perform_initialization": True,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": not on_gpu,
        "apply_rope_fusion": on_gpu,
        "bias_activation_fusion": on_gpu,
        "gradient_accumulation_fusion": False,
        # The loss is divided by the tokens of the whole batch before the backward pass: gradients are summed.
        "calculate_per_token_loss": True,
        "deterministic_mode": deterministic,
        # A pass without gradients caches codes of weights by rows alone, and Transformer Engine 2.12 would reuse them
        # in a pass that needs columns. Quantising anew costs little beside the GEMMs of a pack.
        "disable_parameter_transpose_cache": True,
        "transformer_impl": "transformer_engine" if on_gpu else "local",
        **_precision(contract),
        **_recompute(megatron),
        **_experts(arch, on_gpu),
    }


def _leave(weight: Tensor) -> Tensor:
    return weight


def _precision(contract: PrecisionContract) -> dict[str, Any]:
    if contract.training.linear != "fp8_block":
        return {}
    return {
        "fp8": "e4m3",
        "fp8_recipe": "blockwise",
        "first_last_layers_bf16": contract.bf16_first_layers + contract.bf16_last_layers > 0,
        "num_layers_at_start_in_bf16": contract.bf16_first_layers,
        "num_layers_at_end_in_bf16": contract.bf16_last_layers,
    }


def _recompute(megatron: MegatronConfig) -> dict[str, Any]:
    match megatron.recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _experts(arch: Architecture, on_gpu: bool) -> dict[str, Any]:
    experts: Experts | None = arch.experts
    if experts is None or not arch.sparse_layers:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(layer in arch.sparse_layers) for layer in range(arch.num_layers)],
        # Softmax over the chosen experts alone makes their weights sum to 1.
        "moe_router_pre_softmax": not experts.normalise_top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": on_gpu,
        "moe_permute_fusion": on_gpu,
    }


def scale_rule_in_force() -> ScaleRule:
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch.quantization import get_fp8_te_dtype
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    recipe = Float8BlockScaling()
    quantise = Float8BlockQuantizer(
        get_fp8_te_dtype(recipe, True),
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
