"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Q, K and V have a bias."""

from fp8core.models.families.family import Family, LayerParts, qwen_config

FAMILY = Family(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    layer=LayerParts(qkv_bias=True),
    aligned_class="AlignedQwen2ForCausalLM",
    heads_fill_hidden=True,
    config=qwen_config,
)
