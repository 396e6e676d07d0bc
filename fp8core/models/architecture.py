"""The shape of a decoder, and Hugging Face's config.json of each family that we compute, read and written.

Rotary parameters are read in the keys of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5
(`rope_parameters`), and both are written. Precedence is that of transformers 5 (`modeling_rope_utils.py`,
`convert_rope_params_to_dict`). Anything that would make the decoder compute something else is refused by its key.
Weights in block FP8 are read as what their codes stand for (`models.checkpoint`).
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from fp8core.config.run import MOST_EXPERTS
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

    Heads of zeros follow its own, KV heads with as many query heads as the others have, and columns of zeros those of
    SwiGLU. They change no amax and no sum, so every byte of the results is that of partial tiles. The hidden size
    stays: norms take its mean.
    """
    together = TILE // gcd(TILE, arch.head_dim)
    kv_heads = round_up(arch.num_kv_heads, together)
    heads = arch.num_heads // arch.num_kv_heads * kv_heads
    width = round_up(arch.intermediate_size, TILE)
    return replace(arch, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=width)


def padded_vocabulary(tokens: int) -> int:
    """Rows of embedding and head in vLLM, and in SGLang."""
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

# Key -> the one value the decoder implements, which is also what an absent key means to transformers.
_FIXED: dict[str, Any] = {
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}

# The `quantization_config` of block FP8, as DeepSeek-V3 and Qwen3-FP8 have it; other keys say which modules have it.
BLOCK_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [TILE, TILE]}

# Sizes of lists and tables that are made before a weight is read; several times those of the largest released models.
_LARGEST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 22,
}
_LARGEST_INTEGER = 1 << 30
_SHOWN_CHARACTERS = 200

# The base that transformers assumes when a configuration gives none (`RotaryEmbeddingConfigMixin.default_theta`).
_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class _Reader:
    """Typed access to a configuration; null counts as absent, as in transformers."""

    keys: Mapping[str, Any]
    where: str

    def refused(self, key: str, supported: str) -> UserError:
        found = json.dumps(self.keys.get(key), default=str)[:_SHOWN_CHARACTERS] if key in self.keys else "nothing"
        return UserError(f"{self.where}: {key}: found {found}, supported: {supported}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.keys.get(key)
        value = default if value is None else value
        largest = _LARGEST.get(key, _LARGEST_INTEGER)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise self.refused(key, f"an integer from 1 to {largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.keys.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.refused(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.keys.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def section(self, key: str) -> Mapping[str, Any]:
        value = self.keys.get(key)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise self.refused(key, "an object")
        return value


def architecture_from_hf(config: Mapping[str, Any], where: str) -> Architecture:
    """The decoder that a config.json describes; `where` names the file in messages.

    Raises UserError: naming the file and the key: another architecture, or a feature that the decoder lacks.
    """
    reader = _Reader(config, where)
    family = _family(reader)
    _refuse_unsupported(reader, family)
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.refused("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    max_positions = reader.integer("max_position_embeddings")
    rope_theta, rope_scaling = _rope(reader)
    return Architecture(
        family=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(reader, family, num_heads),
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope_theta=rope_theta,
        max_positions=max_positions,
        rope_scaling=rope_scaling,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2",
        tie_embeddings=reader.flag("tie_word_embeddings", default=False),
        experts=_experts(reader) if family == "qwen3_moe" else None,
    )


def architecture_to_hf(
    arch: Architecture, *, bos_id: int | None, eos_ids: Collection[int], pad_id: int | None, dtype: str
) -> dict[str, Any]:
    """A config.json that transformers and vLLM load.

    Experts, the RMSNorm of Q and K, and the bias pick the class; Mistral without a window is Llama by another name.
    """
    name = _class_of(arch)
    scaling = _rope_scaling_to_hf(arch.rope_scaling)
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
        **_specific_to_hf(arch),
        "tie_word_embeddings": arch.tie_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": one_or_list(eos_ids),
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }


def _class_of(arch: Architecture) -> str:
    assert not (arch.qkv_bias and arch.qk_norm), "no family has both a bias and norms of Q and K"
    assert arch.qk_norm or arch.experts is None, "no family has experts and no norm of Q and K"
    if arch.experts is not None:
        return "Qwen3MoeForCausalLM"
    if arch.qk_norm:
        return "Qwen3ForCausalLM"
    if arch.qkv_bias:
        return "Qwen2ForCausalLM"
    return "MistralForCausalLM" if arch.family == "mistral" else "LlamaForCausalLM"


def _specific_to_hf(arch: Architecture) -> dict[str, Any]:
    experts = {} if arch.experts is None else _experts_to_hf(arch.experts)
    if arch.qk_norm or arch.qkv_bias:
        window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": arch.num_layers}
        return {**window, **experts}
    # An absent key means a window of 4096 tokens to Mistral's class.
    return {"sliding_window": None} if arch.family == "mistral" else {"mlp_bias": False}


def one_or_list(ids: Collection[int]) -> int | list[int]:
    """End-of-sequence ids as Hugging Face writes them: one number, or a list of several."""
    ordered = sorted(ids)
    return ordered[0] if len(ordered) == 1 else ordered


def _family(reader: _Reader) -> Family:
    names = reader.keys.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in _FAMILIES:
        raise reader.refused("architectures", "one of " + ", ".join(_FAMILIES))
    family = _FAMILIES[name]
    if reader.keys.get("model_type", family) != family:
        raise reader.refused("model_type", f'"{family}", for {name}')
    return family


def check_block_fp8(found: object, where: str) -> None:
    """Raises UserError: a `quantization_config` is of another format than block FP8."""
    section = found if isinstance(found, Mapping) else {}
    for key, expected in BLOCK_FP8.items():
        if section.get(key, expected if key == "fmt" else None) != expected:
            given = json.dumps(section.get(key), default=str)[:_SHOWN_CHARACTERS]
            raise UserError(f"{where}: quantization_config: {key}: found {given}, expected {json.dumps(expected)}")


def _refuse_unsupported(reader: _Reader, family: str) -> None:
    if reader.keys.get("quantization_config") is not None:
        check_block_fp8(reader.keys["quantization_config"], reader.where)
    for key, only in {**_FIXED, "attention_bias": family == "qwen2"}.items():
        if reader.keys.get(key) not in (None, only):
            raise reader.refused(key, json.dumps(only))
    layer_types = reader.keys.get("layer_types")
    if layer_types is not None:
        if layer_types != ["full_attention"] * reader.integer("num_hidden_layers"):
            raise reader.refused("layer_types", '"full_attention" for every layer')
        # The layers of others have a window all the same.
        if family in ("qwen2", "qwen3"):
            return
    # Qwen configurations may carry a window that nothing uses; Llama and Mistral have no such switch.
    unused = family.startswith("qwen") and not reader.flag("use_sliding_window", default=False)
    implied = family == "mistral" and "sliding_window" not in reader.keys
    if implied or (reader.keys.get("sliding_window") is not None and not unused):
        raise reader.refused("sliding_window", "null (full attention)")


def _head_dim(reader: _Reader, family: str, num_heads: int) -> int:
    hidden_size = reader.integer("hidden_size")
    if reader.keys.get("head_dim") is None and family != "qwen3":
        if hidden_size % num_heads:
            raise reader.refused("hidden_size", f"a multiple of num_attention_heads={num_heads}, or a head_dim")
        head_dim = hidden_size // num_heads
    else:
        head_dim = reader.integer("head_dim")
    if family == "qwen2" and head_dim * num_heads != hidden_size:
        raise reader.refused("head_dim", f"hidden_size / num_attention_heads, {hidden_size} / {num_heads}")
    if head_dim % 2:
        raise reader.refused("head_dim", f"an even number (it is {head_dim})")
    return head_dim


def _experts(reader: _Reader) -> Experts:
    # transformers 5 writes num_local_experts and reads both (`Qwen3MoeConfig.attribute_map`).
    key = "num_experts" if reader.keys.get("num_experts") is not None else "num_local_experts"
    count, per_token = reader.integer(key), reader.integer("num_experts_per_tok")
    if reader.keys.get("num_local_experts") not in (None, count):
        raise reader.refused("num_local_experts", f"the value of num_experts, {count}")
    if per_token > count:
        raise reader.refused("num_experts_per_tok", f"at most {key}={count}")
    if count * reader.integer("num_hidden_layers") > MOST_EXPERTS:
        raise reader.refused(key, f"at most {MOST_EXPERTS} experts in all layers")
    dense = reader.keys.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise reader.refused("mlp_only_layers", "a list of layer indices")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=reader.integer("moe_intermediate_size"),
        normalise_top_k=reader.flag("norm_topk_prob", default=False),
        sparse_step=reader.integer("decoder_sparse_step", default=1),
        dense_layers=tuple(dense),
    )


def _experts_to_hf(experts: Experts) -> dict[str, Any]:
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalise_top_k,
        "decoder_sparse_step": experts.sparse_step,
        "mlp_only_layers": list(experts.dense_layers),
    }


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions."""
    key = "rope_scaling" if reader.section("rope_scaling") else "rope_parameters"
    section = reader.section(key)
    rope = _Reader(section, f"{reader.where}: {key}")
    if any(isinstance(value, Mapping) for value in section.values()):
        raise reader.refused(key, "one set of parameters for all layers")
    if section.get("partial_rotary_factor") not in (None, 1.0):
        raise rope.refused("partial_rotary_factor", "1.0")
    theta = reader.number("rope_theta", default=rope.number("rope_theta", default=_DEFAULT_ROPE_THETA))
    if rope.number("rope_theta", default=theta) != theta:
        raise reader.refused("rope_theta", f"the value in {key}, {section['rope_theta']}")
    type_key = "rope_type" if "rope_type" in section else "type"
    rope_type = section.get(type_key, "default")
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise rope.refused(type_key, '"default" or "llama3"')
    return theta, _llama3_scaling(rope)


def _llama3_scaling(rope: _Reader) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refused("high_freq_factor", f"a number above low_freq_factor={low}")
    return RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )


def _rope_scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
