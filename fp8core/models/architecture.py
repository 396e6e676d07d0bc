"""The shape of a decoder, and Hugging Face's config.json of each family that we compute, read and written.

Rotary parameters have the precedence of transformers 5 (`modeling_rope_utils.py`, `convert_rope_params_to_dict`)."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, Field, ValidationError

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
        """Layers with a router and experts, ascending."""
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

# The base that transformers assumes when a configuration gives none (`RotaryEmbeddingConfigMixin.default_theta`).
_DEFAULT_ROPE_THETA = 10_000.0
_SHOWN_CHARACTERS = 200

_Size = Annotated[int, Field(strict=True, ge=1, le=1 << 30)]
# Tables and lists of these lengths are made before a weight is read; released models have a fraction of them.
_Count = Annotated[int, Field(strict=True, ge=1, le=4096)]
_Positions = Annotated[int, Field(strict=True, ge=1, le=1 << 22)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_One = Annotated[float, Field(ge=1, le=1)]
_Flag = Annotated[bool, Field(strict=True)]


class _Rope(BaseModel):
    rope_type: Literal["default", "llama3"] = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: _Positive | None = None
    partial_rotary_factor: _One | None = None


class _Llama3Rope(BaseModel):
    factor: _Positive
    low_freq_factor: _Positive
    high_freq_factor: _Positive
    original_max_position_embeddings: _Size


class _HfConfig(BaseModel):
    """The keys that the decoder depends on, with the values that transformers gives absent ones."""

    architectures: list[Literal[tuple(_FAMILIES)]] = Field(min_length=1, max_length=1)  # type: ignore[valid-type]
    model_type: str | None = None
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    rms_norm_eps: _Positive
    max_position_embeddings: _Positions
    tie_word_embeddings: _Flag = False
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    hidden_act: Literal["silu"] = "silu"
    mlp_bias: Literal[False] = False
    attention_bias: _Flag | None = None
    partial_rotary_factor: _One = 1.0
    layer_types: list[Any] | None = None
    use_sliding_window: _Flag = False
    sliding_window: int | None = None


class _HfExperts(BaseModel):
    num_experts: _Count
    num_local_experts: _Count | None = None
    num_experts_per_tok: _Count
    moe_intermediate_size: _Size
    norm_topk_prob: _Flag = False
    decoder_sparse_step: _Count = 1
    mlp_only_layers: list[Annotated[int, Field(strict=True, ge=0)]] = []


_Model = TypeVar("_Model", bound=BaseModel)


def _read(model: type[_Model], keys: Mapping[str, Any], where: str) -> _Model:
    """Some keys of a configuration, of which null counts as absent, as in transformers."""
    try:
        return model.model_validate({key: value for key, value in keys.items() if value is not None})
    except ValidationError as refusal:
        error = refusal.errors()[0]
        key = ": ".join(part for part in error["loc"] if isinstance(part, str))
        raise _refused(where, key, ... if error["type"] == "missing" else error["input"], error["msg"]) from refusal


def _refused(where: str, key: str, found: object, supported: str) -> UserError:
    shown = "nothing" if found is ... else json.dumps(found, default=str)[:_SHOWN_CHARACTERS]
    return UserError(f"{where}: {key}: found {shown}; {supported}")


def architecture_from_hf(config: Mapping[str, Any], where: str) -> Architecture:
    """The decoder that a config.json describes; `where` names the file in messages.
    Raises UserError: another architecture, or a feature that the decoder lacks, by the file and the key."""
    hf = _read(_HfConfig, config, where)
    family, heads = _FAMILIES[hf.architectures[0]], hf.num_attention_heads
    kv_heads = heads if hf.num_key_value_heads is None else hf.num_key_value_heads
    _check_supported(config, hf, family, where)
    if heads % kv_heads:
        raise _refused(where, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    theta, scaling = _rope(config, hf, where)
    return Architecture(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(hf, family, where),
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=theta,
        max_positions=hf.max_position_embeddings,
        rope_scaling=scaling,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2",
        tie_embeddings=hf.tie_word_embeddings,
        experts=_experts(config, hf, where) if family == "qwen3_moe" else None,
    )


def _check_supported(config: Mapping[str, Any], hf: _HfConfig, family: Family, where: str) -> None:
    """Raises UserError: by one of the keys, the model computes something that the decoder does not."""
    if hf.model_type not in (None, family):
        raise _refused(where, "model_type", hf.model_type, f"supported: {family}, for {hf.architectures[0]}")
    if config.get("quantization_config") is not None:
        check_block_fp8(config["quantization_config"], where)
    if hf.attention_bias not in (None, family == "qwen2"):
        raise _refused(where, "attention_bias", hf.attention_bias, f"supported: {json.dumps(family == 'qwen2')}")
    if hf.layer_types is not None:
        if hf.layer_types != ["full_attention"] * hf.num_hidden_layers:
            raise _refused(where, "layer_types", hf.layer_types, 'supported: "full_attention" for every layer')
        # The layers of others have a window all the same.
        if family in ("qwen2", "qwen3"):
            return
    # Qwen configurations may carry a window that nothing uses; Llama and Mistral have no such switch.
    unused = family.startswith("qwen") and not hf.use_sliding_window
    implied = family == "mistral" and "sliding_window" not in config
    if implied or (hf.sliding_window is not None and not unused):
        raise _refused(where, "sliding_window", hf.sliding_window, "supported: null (full attention)")


def check_block_fp8(found: object, where: str) -> None:
    """Raises UserError: a `quantization_config` is of another format than block FP8."""
    section = found if isinstance(found, Mapping) else {}
    for key, expected in BLOCK_FP8.items():
        if section.get(key, expected if key == "fmt" else None) != expected:
            raise _refused(where, f"quantization_config: {key}", section.get(key), f"expected {json.dumps(expected)}")


def _head_dim(hf: _HfConfig, family: Family, where: str) -> int:
    heads, head_dim = hf.num_attention_heads, hf.head_dim
    if head_dim is None:
        if family == "qwen3" or hf.hidden_size % heads:
            raise _refused(where, "head_dim", ..., f"expected one (hidden_size={hf.hidden_size}, {heads} heads)")
        head_dim = hf.hidden_size // heads
    if family == "qwen2" and head_dim * heads != hf.hidden_size:
        raise _refused(where, "head_dim", head_dim, f"supported: hidden_size / heads, {hf.hidden_size} / {heads}")
    if head_dim % 2:
        raise _refused(where, "head_dim", head_dim, "supported: even numbers")
    return head_dim


def _rope(config: Mapping[str, Any], hf: _HfConfig, where: str) -> tuple[float, RopeScaling | None]:
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    section, rope = config.get(key) or {}, getattr(hf, key) or _Rope()
    if any(isinstance(value, Mapping) for value in section.values()):
        raise _refused(where, key, section, "supported: one set of parameters for all layers")
    theta = hf.rope_theta or rope.rope_theta or _DEFAULT_ROPE_THETA
    if rope.rope_theta not in (None, theta):
        raise _refused(where, "rope_theta", theta, f"expected the value in {key}, {rope.rope_theta}")
    if rope.rope_type == "default":
        return theta, None
    llama3 = _read(_Llama3Rope, section, f"{where}: {key}")
    if llama3.high_freq_factor <= llama3.low_freq_factor:
        supported = f"supported: a number above low_freq_factor={llama3.low_freq_factor}"
        raise _refused(where, f"{key}: high_freq_factor", llama3.high_freq_factor, supported)
    return theta, RopeScaling(
        factor=llama3.factor,
        low_freq_factor=llama3.low_freq_factor,
        high_freq_factor=llama3.high_freq_factor,
        original_max_positions=llama3.original_max_position_embeddings,
    )


def _experts(config: Mapping[str, Any], hf: _HfConfig, where: str) -> Experts:
    # transformers 5 writes num_local_experts and reads both (`Qwen3MoeConfig.attribute_map`).
    known = dict(config)
    if known.get("num_experts") is None:
        known["num_experts"] = known.get("num_local_experts")
    moe = _read(_HfExperts, known, where)
    if moe.num_local_experts not in (None, moe.num_experts):
        raise _refused(where, "num_local_experts", moe.num_local_experts, f"expected num_experts={moe.num_experts}")
    if moe.num_experts_per_tok > moe.num_experts:
        raise _refused(where, "num_experts_per_tok", moe.num_experts_per_tok, f"at most num_experts={moe.num_experts}")
    return Experts(
        count=moe.num_experts,
        per_token=moe.num_experts_per_tok,
        intermediate_size=moe.moe_intermediate_size,
        normalise_top_k=moe.norm_topk_prob,
        sparse_step=moe.decoder_sparse_step,
        dense_layers=tuple(moe.mlp_only_layers),
    )


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
        specific |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalise_top_k,
            "decoder_sparse_step": experts.sparse_step,
            "mlp_only_layers": list(experts.dense_layers),
        }
    scaling = None
    if (rope := arch.rope_scaling) is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return {
        "architectures": [name],
        "model_type": _FAMILIES[name],
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": arch.rope_theta},
        # Qwen2's class always has the bias, and no key for it.
        **({} if arch.qkv_bias else {"attention_bias": False}),
        "attention_dropout": 0.0,
        **specific,
        "tie_word_embeddings": arch.tie_embeddings,
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
