"""Which layers a model is built of: the one place that chooses between Transformer Engine's and Megatron's own."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from fp8core.training.megatron.local_layers import LocalNorm, PackedAttention
from fp8core.training.megatron.names import LOCAL, TRANSFORMER_ENGINE, Style
from fp8core.training.megatron.router import PolicyRouter


def style_of(config: TransformerConfig) -> Style:
    """How the layers of `layers` name their parameters."""
    return TRANSFORMER_ENGINE if config.transformer_impl == "transformer_engine" else LOCAL


def layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this process's pipeline stage, which knows its rank once process groups exist."""
    fused = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=fused, normalization="RMSNorm")
    for layer in block.layer_specs:
        if hasattr(layer.submodules.mlp.submodules, "router"):
            layer.submodules.mlp.submodules.router = PolicyRouter
    if not fused:
        _for_cpu(block, config.qk_layernorm)
    return block


def _for_cpu(block: TransformerBlockSubmodules, qk_norm: bool) -> None:
    block.layer_norm = LocalNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if qk_norm:
            attention.q_layernorm = attention.k_layernorm = LocalNorm
