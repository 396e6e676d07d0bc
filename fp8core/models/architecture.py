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
class Experts:
    """Mixture of experts in the place of SwiGLU blocks (Qwen3-MoE, arXiv 2505.09388).

    Attributes:
        count: experts of a sparse layer.
        per_token: experts a token goes to.
        intermediate_size: width of one expert (`moe_intermediate_size`).
        normalise_top_k: the weights of a token's experts sum to 1 (`norm_topk_prob`).
        sparse_step: every n-th layer is sparse (`decoder_sparse_step`).
        dense_layers: layers that are dense all the same (`mlp_only_layers`).
    """

    count: int
    per_token: int
    intermediate_size: int
    normalise_top_k: bool
    sparse_step: int
    dense_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A Llama, Qwen3 or Qwen3-MoE decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Literal["llama", "qwen3", "qwen3_moe"]
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
    experts: Experts | None = None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with a router and experts, ascending."""
        if (experts := self.experts) is None:
            return ()
        steps = range(experts.sparse_step - 1, self.num_layers, experts.sparse_step)
        return tuple(layer for layer in steps if layer not in experts.dense_layers)


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
        if arch.experts is not None and i in arch.sparse_layers:
            shapes |= _expert_shapes(f"{layer}.mlp", hidden, arch.experts)
        else:
            shapes |= _mlp_shapes(f"{layer}.mlp", hidden, arch.intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    if not arch.tie_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _expert_shapes(prefix: str, hidden: int, experts: Experts) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (experts.count, hidden)}
    for e in range(experts.count):
        shapes |= _mlp_shapes(f"{prefix}.experts.{e}", hidden, experts.intermediate_size)
    return shapes
