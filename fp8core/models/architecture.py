"""The shape of a decoder: its sizes and the name of its family (`fp8core.models.families`)."""

from dataclasses import dataclass, replace
from math import gcd

from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.recipe import TILE
from fp8core.numerics.rotary import RopeScaling

VOCABULARY_STEP = 64
"""vLLM and SGLang pad the vocabulary to a multiple of this; the rows beyond it are never read."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts instead of SwiGLU blocks (Qwen3-MoE, arXiv 2505.09388).

    Attributes:
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
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    The rest is of its family: the places of norms, the biases, the names of weights.
    """

    family: str
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
    tie_embeddings: bool
    experts: Experts | None = None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        if (experts := self.experts) is None:
            return ()
        steps = range(experts.sparse_step - 1, self.num_layers, experts.sparse_step)
        return tuple(layer for layer in steps if layer not in experts.dense_layers)


def with_whole_tiles(arch: Architecture) -> Architecture:
    """The decoder as kernels for block FP8 compute it: parts of fused linears end where tiles of 128 do.

    Heads of zeros follow its own, and columns of zeros those of SwiGLU. They change no amax and no sum, so every byte
    of the results is that of partial tiles. The hidden size stays: norms take its mean. A family whose norms of Q and K
    take the mean over all heads would compute something else; no kernel computes one."""
    together = TILE // gcd(TILE, arch.head_dim)
    kv_heads = round_up(arch.num_kv_heads, together)
    heads = arch.num_heads // arch.num_kv_heads * kv_heads
    width = round_up(arch.intermediate_size, TILE)
    experts = arch.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=round_up(experts.intermediate_size, TILE))
    return replace(arch, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=width, experts=experts)


def padded_vocabulary(tokens: int) -> int:
    return round_up(tokens, VOCABULARY_STEP)
