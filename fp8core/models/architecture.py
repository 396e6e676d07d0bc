"""The shape of a decoder, independent of where it came from."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's frequency scaling (rope_type `llama3` of the Hugging Face configuration)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A Llama or Qwen3 decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Literal["llama", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: RopeScaling | None
    qk_norm: bool
    tie_embeddings: bool


def parameter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the Hugging Face layout (`out x in` for linears)."""
    hidden, q_size, kv_size = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for i in range(arch.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.self_attn.q_proj.weight"] = (q_size, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (kv_size, hidden)
        if arch.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (arch.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (arch.head_dim,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (arch.intermediate_size, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (arch.intermediate_size, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, arch.intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    if not arch.tie_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return shapes
