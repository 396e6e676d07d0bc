"""The shape of a decoder, and Hugging Face's config.json of each family that we compute, read and written.

Rotary parameters have the precedence of transformers 5 (`modeling_rope_utils.py`, `convert_rope_params_to_dict`)."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from fp8core.errors import UserError
from fp8core.numerics.e4m3 import round_up
from fp8core.numerics.recipe import TILE

VOCABULARY_STEP = 64
"""vLLM and SGLang pad the vocabulary to a multiple of this; the rows beyond it are never read."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's frequency scaling (rope_type `llama3` of the Hugging Face configuration)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


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


Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    `qkv_bias` is Qwen2's: a bias is added to Q, K and V. `qk_norm` is Qwen3's: their heads are normed.
    """

    family: Family
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
    qkv_bias: bool = False

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        if (experts := self.experts) is None:
            return ()
        steps = range(experts.sparse_step - 1, self.num_layers, experts.sparse_step)
        return tuple(layer for layer in steps if layer not in experts.dense_layers)


def with_whole_tiles(arch: Architecture) -> Architecture:
    """The decoder as kernels for block FP8 compute it: parts of fused linears end where tiles of 128 do.

    Heads of zeros follow its own, and columns of zeros those of SwiGLU. They change no amax and no sum, so every byte
    of the results is that of partial tiles. The hidden size stays: norms take its mean."""
    together = TILE // gcd(TILE, arch.head_dim)
    kv_heads = round_up(arch.num_kv_heads, together)
    heads = arch.num_heads // arch.num_kv_heads * kv_heads
    width = round_up(arch.intermediate_size, TILE)
    return replace(arch, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=width)


def padded_vocabulary(tokens: int) -> int:
    return round_up(tokens, VOCABULARY_STEP)


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
        if arch.qkv_bias:
            sizes = {"q": q_size, "k": kv_size, "v": kv_size}
            shapes |= {f"{layer}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
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


_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

# The `quantization_config` of block FP8, as DeepSeek-V3 and Qwen3-FP8 have it; other keys say which modules have it.
BLOCK_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [TILE, TILE]}

# Fields of our classes and the keys of config.json.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_EXPERTS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "normalise_top_k": "norm_topk_prob",
    "sparse_step": "decoder_sparse_step",
    "dense_layers": "mlp_only_layers",
}
_LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
# Numbers that no default of transformers may stand in for.
_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps"),
)


def _refused(where: str, key: str, found: object, supported: str) -> UserError:
    shown = "nothing" if found is None else json.dumps(found, default=str)[:200]
    return UserError(f"{where}: {key}: found {shown}; {supported}")


def architecture_from_hf(config: Mapping[str, Any], where: str) -> Architecture:
    """The decoder that a config.json describes, read by transformers; `where` names the file in messages.
    Raises UserError: another architecture, or a feature that the decoder lacks, by the file and the key."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _FAMILIES:
        raise _refused(where, "architectures", names, f"supported: one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[names[0]]
    if config.get("model_type") not in (None, family):
        raise _refused(where, "model_type", config["model_type"], f"supported: {family}, for {names[0]}")
    for key in _NEEDED:
        size = config.get(key)
        if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
            raise _refused(where, key, size, "expected a positive number")
    if config.get("quantization_config") is not None:
        raise _refused(where, "quantization_config", config["quantization_config"], "take the checkpoint in BF16")
    hf = _read(config, family, where)
    _check_supported(hf, family, where)
    theta, scaling = _rope(hf, where)
    sizes: dict[str, Any] = {field: getattr(hf, key) for field, key in _SIZES.items()}
    return Architecture(
        **sizes,
        family=family,
        head_dim=_head_dim(hf),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2",
        experts=_experts(hf, where) if family == "qwen3_moe" else None,
    )


def _read(config: Mapping[str, Any], family: Family, where: str) -> Any:
    from transformers import AutoConfig
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]  # What it would say of a file is an error here.
    known = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        return AutoConfig.for_model(family, **known)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{where}: transformers cannot read it: {' '.join(str(error).split())}") from error


def _head_dim(hf: Any) -> int:
    head_dim: int | None = getattr(hf, "head_dim", None)
    share: int = hf.hidden_size // hf.num_attention_heads
    return share if head_dim is None else head_dim


def _check_supported(hf: Any, family: Family, where: str) -> None:
    heads, kv_heads, head_dim = hf.num_attention_heads, hf.num_key_value_heads, _head_dim(hf)
    if heads % kv_heads:
        raise _refused(where, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    if head_dim % 2:
        raise _refused(where, "head_dim", head_dim, "supported: even numbers")
    if family == "qwen2" and head_dim * heads != hf.hidden_size:
        raise _refused(where, "head_dim", head_dim, f"supported: hidden_size / heads, {hf.hidden_size} / {heads}")
    if hf.hidden_act != "silu":
        raise _refused(where, "hidden_act", hf.hidden_act, 'supported: "silu"')
    for key in ("attention_bias", "mlp_bias"):
        if getattr(hf, key, False):
            raise _refused(where, key, True, "supported: false")
    layer_types = getattr(hf, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types):
        raise _refused(where, "layer_types", layer_types, 'supported: "full_attention" for every layer')
    # The layers of others have a window by their types alone.
    if family not in ("qwen2", "qwen3") and getattr(hf, "sliding_window", None) is not None:
        raise _refused(where, "sliding_window", hf.sliding_window, "supported: null (full attention)")


def _rope(hf: Any, where: str) -> tuple[float, RopeScaling | None]:
    found = hf.rope_parameters
    kind, share = found.get("rope_type"), found.get("partial_rotary_factor", 1.0)
    if share != 1:
        raise _refused(where, "partial_rotary_factor", share, "supported: 1")
    if kind == "default":
        return found["rope_theta"], None
    if kind != "llama3":
        raise _refused(where, "rope_type", kind, 'supported: "default" and "llama3", for all layers alike')
    return found["rope_theta"], RopeScaling(**{field: found[key] for field, key in _LLAMA3_ROPE.items()})


def _experts(hf: Any, where: str) -> Experts:
    if hf.num_experts_per_tok > hf.num_experts:
        raise _refused(where, "num_experts_per_tok", hf.num_experts_per_tok, f"at most num_experts={hf.num_experts}")
    found: dict[str, Any] = {field: getattr(hf, key) for field, key in _EXPERTS.items()}
    return Experts(**found | {"dense_layers": tuple(hf.mlp_only_layers)})


def architecture_to_hf(
    arch: Architecture, *, bos_id: int | None, eos_ids: Collection[int], pad_id: int | None, dtype: str
) -> dict[str, Any]:
    """A config.json that transformers and vLLM load."""
    assert not (arch.qkv_bias and arch.qk_norm), "no family has both a bias and norms of Q and K"
    assert arch.qk_norm or arch.experts is None, "no family has experts and no norm of Q and K"
    # An absent key means a window of 4096 tokens to Mistral's class.
    name, specific = "LlamaForCausalLM", dict[str, Any](mlp_bias=False)
    if arch.qk_norm or arch.qkv_bias:
        name = "Qwen3ForCausalLM" if arch.qk_norm else "Qwen2ForCausalLM"
        specific = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": arch.num_layers}
    elif arch.family == "mistral":
        name, specific = "MistralForCausalLM", {"sliding_window": None}
    if (experts := arch.experts) is not None:
        name = "Qwen3MoeForCausalLM"
        specific |= {key: getattr(experts, field) for field, key in _EXPERTS.items()}
        specific["mlp_only_layers"] = list(experts.dense_layers)
    scaling = None
    if (rope := arch.rope_scaling) is not None:
        scaling = {"rope_type": "llama3", **{key: getattr(rope, field) for field, key in _LLAMA3_ROPE.items()}}
    return {
        "architectures": [name],
        "model_type": _FAMILIES[name],
        **{key: getattr(arch, field) for field, key in _SIZES.items()},
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": arch.rope_theta},
        # Qwen2's class always has the bias, and no key for it.
        **({} if arch.qkv_bias else {"attention_bias": False}),
        "attention_dropout": 0.0,
        **specific,
        "bos_token_id": bos_id,
        "eos_token_id": one_or_list(eos_ids),
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }


def one_or_list(ids: Collection[int]) -> int | list[int]:
    ordered = sorted(ids)
    return ordered[0] if len(ordered) == 1 else ordered
