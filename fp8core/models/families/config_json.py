"""Hugging Face's config.json of every family, read and written.

Rotary parameters have the precedence of transformers 5 (`modeling_rope_utils.py`, `convert_rope_params_to_dict`)."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.families import FAMILIES, family_of
from fp8core.models.families.family import Family, Finding
from fp8core.numerics.recipe import TILE
from fp8core.numerics.rotary import SCALINGS, RopeScaling, YarnScaling

# The `quantization_config` of block FP8, as DeepSeek-V3 and Qwen3-FP8 have it; other keys say which modules have it.
BLOCK_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [TILE, TILE]}

_CLASSES = {family.hf_class: family for family in FAMILIES.values()}
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
# Numbers that no default of transformers may stand in for.
_REQUIRED_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps"),
)


def _error(where: str, key: str, value: object, supported: str) -> UserError:
    text = "nothing" if value is None else json.dumps(value, default=str)[:200]
    return UserError(f"{where}: {key}: found {text}; {supported}")


def architecture_from_hf(config: Mapping[str, Any], where: str) -> Architecture:
    """The decoder that a config.json describes, read by transformers; `where` names the file in messages.
    Raises UserError: another architecture, or a feature that the decoder lacks, by the file and the key."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _CLASSES:
        raise _error(where, "architectures", names, f"supported: one of {', '.join(_CLASSES)}")
    family = _CLASSES[names[0]]
    if config.get("model_type") not in (None, family.name):
        raise _error(where, "model_type", config["model_type"], f"supported: {family.name}, for {names[0]}")
    for key in _REQUIRED_KEYS:
        size = config.get(key)
        if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
            raise _error(where, key, size, "expected a positive number")
    if config.get("quantization_config") is not None:
        raise _error(where, "quantization_config", config["quantization_config"], "take the checkpoint in BF16")
    hf = _read(config, family, where)
    for finding in (*_unsupported_keys(hf, family), *family.unsupported(hf)):
        raise _error(where, *finding)
    theta, scaling = _rope(hf, where)
    sizes: dict[str, Any] = {field: getattr(hf, key) for field, key in _SIZES.items()}
    if isinstance(scaling, YarnScaling):
        # Files of Qwen keep the original length in `max_position_embeddings`, others have the new one.
        sizes["max_positions"] = scaling.max_positions
    return Architecture(
        **sizes,
        family=family.name,
        head_dim=_head_dim(hf),
        rope_theta=theta,
        rope_scaling=scaling,
        experts=None if family.experts is None else family.experts(hf),
    )


def _read(config: Mapping[str, Any], family: Family, where: str) -> Any:
    from transformers import AutoConfig
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]  # What it would say of a file is an error here.
    fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        return AutoConfig.for_model(family.name, **fields)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{where}: transformers cannot read it: {' '.join(str(error).split())}") from error


def _head_dim(hf: Any) -> int:
    head_dim: int | None = getattr(hf, "head_dim", None)
    share: int = hf.hidden_size // hf.num_attention_heads
    return share if head_dim is None else head_dim


def _unsupported_keys(hf: Any, family: Family) -> Iterator[Finding]:
    heads = hf.num_attention_heads
    kv_heads = hf.num_key_value_heads
    head_dim = _head_dim(hf)
    if heads % kv_heads:
        yield "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}"
    if head_dim % 2:
        yield "head_dim", head_dim, "supported: even numbers"
    if family.heads_fill_hidden and head_dim * heads != hf.hidden_size:
        yield "head_dim", head_dim, f"supported: hidden_size / heads, {hf.hidden_size} / {heads}"
    if hf.hidden_act != "silu":
        yield "hidden_act", hf.hidden_act, 'supported: "silu"'
    for key in ("attention_bias", "mlp_bias"):
        if getattr(hf, key, False):
            yield key, True, "supported: false"
    layer_types = getattr(hf, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types):
        yield "layer_types", layer_types, 'supported: "full_attention" for every layer'


def _rope(hf: Any, where: str) -> tuple[float, RopeScaling | None]:
    parameters = hf.rope_parameters
    kind = parameters.get("rope_type")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1:
        raise _error(where, "partial_rotary_factor", share, "supported: 1")
    if kind == "default":
        return parameters["rope_theta"], None
    if kind not in SCALINGS:
        raise _error(where, "rope_type", kind, f"supported: default, {', '.join(SCALINGS)}, for all layers alike")
    # null and 0 mean the default, as in transformers; `truncate` may be false.
    values = {
        field.name: value
        for field in fields(SCALINGS[kind])
        if (value := parameters.get(field.name)) or value is False or field.default is MISSING
    }
    for key, value in values.items():
        if not isinstance(value, int | float) or (value <= 0 and value is not False):
            raise _error(where, key, value, "expected a positive number")
    return parameters["rope_theta"], SCALINGS[kind](**values)


def architecture_to_hf(
    arch: Architecture, *, bos_id: int | None, eos_ids: Collection[int], pad_id: int | None, dtype: str
) -> dict[str, Any]:
    """A config.json that transformers loads, and the engines that compute the family."""
    family = family_of(arch)
    assert (arch.experts is None) == (family.experts is None), f"experts in a {family.title}, or none where they belong"
    scaling = None
    if (rope := arch.rope_scaling) is not None:
        own = {each.name: getattr(rope, each.name) for each in fields(rope) if getattr(rope, each.name) != each.default}
        scaling = {"rope_type": rope.rope_type, **own}
    return {
        "architectures": [family.hf_class],
        "model_type": family.name,
        **{key: getattr(arch, field) for field, key in _SIZES.items()},
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": arch.rope_theta},
        # Qwen2's class always has the bias, and no key for it.
        **({} if family.layer.qkv_bias else {"attention_bias": False}),
        "attention_dropout": 0.0,
        **family.config(arch),
        "bos_token_id": bos_id,
        "eos_token_id": one_or_list(eos_ids),
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }


def one_or_list(ids: Collection[int]) -> int | list[int]:
    sorted_ids = sorted(ids)
    return sorted_ids[0] if len(sorted_ids) == 1 else sorted_ids
