"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a router and experts in place of the MLP of some layers."""

from collections.abc import Iterator
from typing import Any

from fp8core.models.architecture import Architecture, Experts
from fp8core.models.families.family import Family, Finding, LayerParts, no_window, qwen_config

# Fields of `Experts` and the keys of config.json.
_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "normalise_top_k": "norm_topk_prob",
    "sparse_step": "decoder_sparse_step",
    "dense_layers": "mlp_only_layers",
}


def _experts(hf: Any) -> Experts:
    values: dict[str, Any] = {field: getattr(hf, key) for field, key in _KEYS.items()}
    return Experts(**values | {"dense_layers": tuple(hf.mlp_only_layers)})


def _unsupported(hf: Any) -> Iterator[Finding]:
    yield from no_window(hf)
    if hf.num_experts_per_tok > hf.num_experts:
        yield "num_experts_per_tok", hf.num_experts_per_tok, f"at most num_experts={hf.num_experts}"


def _config(arch: Architecture) -> dict[str, Any]:
    assert arch.experts is not None, "a mixture of experts has experts"
    keys = {key: getattr(arch.experts, field) for field, key in _KEYS.items()}
    return qwen_config(arch) | keys | {"mlp_only_layers": list(arch.experts.dense_layers)}


FAMILY = Family(
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    layer=LayerParts(qk_norm="head"),
    paths=frozenset({"packed", "megatron", "vllm", "aligned"}),
    aligned_class="AlignedQwen3MoeForCausalLM",
    experts=_experts,
    unsupported=_unsupported,
    config=_config,
)
