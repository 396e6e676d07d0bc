"""Weights of a decoder built from scratch."""

from typing import Literal

import torch
from torch import Tensor

from fp8core.config.run import ArchitectureConfig
from fp8core.models.architecture import Architecture, Experts, parameter_shapes


def architecture_from_config(config: ArchitectureConfig, vocab_size: int) -> Architecture:
    """A Qwen3-shaped decoder (Qwen3-MoE with experts, Llama without QK norm) of the configured size."""
    dense: Literal["llama", "qwen3"] = "qwen3" if config.qk_norm else "llama"
    experts = _experts(config)
    return Architecture(
        family=dense if experts is None else "qwen3_moe",
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=config.rope_theta,
        max_positions=config.max_positions,
        rope_scaling=None,
        qk_norm=config.qk_norm,
        tie_embeddings=config.tie_embeddings,
        experts=experts,
    )


def _experts(config: ArchitectureConfig) -> Experts | None:
    if config.num_experts == 0:
        return None
    return Experts(
        count=config.num_experts,
        per_token=config.experts_per_token,
        intermediate_size=config.expert_intermediate_size,
        normalise_top_k=config.normalise_top_k,
        sparse_step=config.decoder_sparse_step,
        dense_layers=tuple(config.mlp_only_layers),
    )


def initial_weights(arch: Architecture, seed: int) -> dict[str, Tensor]:
    """FP32 weights: norms 1, embedding N(0, 1), linears N(0, 1 / in), outputs of a block scaled by 1 / sqrt(2 layers).

    An embedding that is also the head is drawn as a head, so that a fresh policy is nearly uniform.

    The scaling of block outputs is that of GPT-2 (Radford et al., 2019, section 2.3).
    """
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * arch.num_layers) ** -0.5
    weights: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(arch).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        embeds_only = name.startswith("model.embed_tokens") and not arch.tie_embeddings
        spread = 1.0 if embeds_only else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            spread *= shrink
        weights[name] = torch.randn(shape, generator=generator) * spread
    return weights
