"""From an architecture and a contract to the arguments of Megatron Core's `TransformerConfig`."""

from typing import Any

import torch

from fp8core.config.precision import PrecisionContract
from fp8core.config.training import MegatronConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.families import layer_parts
from fp8core.numerics.recipe import ScaleRule


def transformer_arguments(
    arch: Architecture, contract: PrecisionContract, megatron: MegatronConfig, deterministic: bool
) -> dict[str, Any]:
    """Of `megatron.core.transformer.TransformerConfig`."""
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.intermediate_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.rms_norm_eps,
        "qk_layernorm": layer_parts(arch).qk_norm == "head",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": layer_parts(arch).qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "tensor_model_parallel_size": megatron.tensor_parallel,
        "expert_model_parallel_size": megatron.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": megatron.sequence_parallel,
        "moe_token_dispatcher_type": "alltoall",
        # Weights are loaded, never drawn; but initialisation is where Megatron marks what is cut.
        "perform_initialization": True,
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), lambda weight: weight),
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "gradient_accumulation_fusion": False,
        # The loss is divided by the tokens of the whole batch before the backward pass: gradients are summed.
        "calculate_per_token_loss": True,
        "deterministic_mode": deterministic,
        # A pass without gradients caches codes of weights by rows alone, and Transformer Engine 2.12 would reuse them
        # in a pass that needs columns. Quantising anew costs little beside the GEMMs of a pack.
        "disable_parameter_transpose_cache": True,
        "transformer_impl": "transformer_engine",
        **(_block_fp8(contract) if contract.training.linear == "fp8_block" else {}),
        **(_RECOMPUTATION if megatron.recompute == "full" else {}),
        **_experts(arch),
    }


_RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _block_fp8(contract: PrecisionContract) -> dict[str, Any]:
    return {
        "fp8": "e4m3",
        "fp8_recipe": "blockwise",
        "first_last_layers_bf16": contract.bf16_first_layers + contract.bf16_last_layers > 0,
        "num_layers_at_start_in_bf16": contract.bf16_first_layers,
        "num_layers_at_end_in_bf16": contract.bf16_last_layers,
    }


def _experts(arch: Architecture) -> dict[str, Any]:
    experts = arch.experts
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
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
    }


def check_scale_rule(expected: ScaleRule) -> None:
    """Raises UserError when Transformer Engine was imported under another rule, which it reads from its environment."""
    from transformer_engine.common.recipe import Float8BlockScaling

    rule: ScaleRule = "pow2" if Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale else "fp32"
    if rule != expected:
        raise UserError(
            f"precision.scale_rule={expected}: Transformer Engine was imported under the rule {rule} and keeps it; "
            "start a new process"
        )
