"""Which layers a model is built of: the one place that chooses between Transformer Engine's and Megatron's own."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from fp8core.training.megatron.attention import PackedAttention
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
        if not fused:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        if hasattr(layer.submodules.mlp.submodules, "router"):
            layer.submodules.mlp.submodules.router = PolicyRouter
    return block
